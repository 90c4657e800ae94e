"""Adds commands to the command line, and defines the arguments and options that several commands share, with shell
completion."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.runs.catalogue import all_runs, find_run

UsageError: type[Any] = typer.BadParameter.__mro__[1]
"""The base class of typer's usage errors; its name differs between releases."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\.\w+)*=.*", re.DOTALL)


class Command(TyperCommand):
    """A command with hints in its usage errors. Its usage line reads `train SPEC` instead of typer's `train {SPEC}`.

    A command with --set also accepts a bare `KEY=VALUE`, as other trainers do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # the shell's completion has no place for an error
            return super().parse_args(ctx, args)
        try:
            return super().parse_args(ctx, list(self._with_overrides(ctx, args)))
        except UsageError as error:
            if "\n" not in error.message and self.epilog:
                error.message = f"{error.format_message()}\nhint: {self.epilog[:1].lower()}{self.epilog[1:]}"
                raise UsageError(error.message, ctx=ctx) from None
            raise

    def _with_overrides(self, ctx: Any, args: list[str]) -> Iterator[str]:
        """Insert --set before each assignment. Raises ``UsageError`` for an unknown option."""
        options = {name: param for param in self.get_params(ctx) for name in param.opts + param.secondary_opts}
        words = iter(args)
        for word in words:
            name, equals, value = word.partition("=")
            if word == "--":
                yield from (word, *words)
            elif word.startswith("--") and name not in options and not ctx.ignore_unknown_options:
                hint = self._meant(ctx, option=name, value=value if equals else next(words, ""), options=options)
                raise UsageError(f"No such option: {name}\nhint: {hint}", ctx=ctx)
            elif "--set" in options and _ASSIGNMENT.fullmatch(word) and not os.path.exists(word):
                yield from ("--set", word)
            else:
                yield word
                if not equals and name in options and not getattr(options[name], "is_flag", False):
                    yield from (value for value in [next(words, None)] if value is not None)

    def _meant(self, ctx: Any, option: str, value: str, options: dict[str, Any]) -> str:
        """A hint for an unknown option."""
        from asyncrl_cli.core.suggest import closest

        words = option.removeprefix("--").replace("-", "_")
        arguments = [param for param in self.params if param.param_type_name == "argument" and param.metavar]
        for param in arguments:
            if words in (param.name, str(param.metavar).lower(), "config", "config_file", "file", "path"):
                return f"give it without an option: {ctx.command_path} {value or param.metavar}"
        if "--set" in options:
            from asyncrl_cli.spec.keys import keys
            from asyncrl_cli.spec.suggestions import suggest

            *sections, key = words.split(".")
            meant = [words] if words in keys() else suggest(".".join(sections), key)
            meant = [found for found in meant if found in keys() and keys()[found].opens is None]
            if meant and (words in keys() or not closest(option, options, cutoff=0.75)):
                return "set a key of the spec: " + " or ".join(f"--set {found}={value or '...'}" for found in meant[:3])
        close = closest(option, [name for name in options if name.startswith("--")])
        if close:
            return f"did you mean `{close[0]}`?"
        return f"options: {', '.join(name for name in options if name.startswith('--'))}"

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Show the help of all options. `{names}` in it stands for the names that the shell completes."""
        for param in self.params:
            if "{names}" in (getattr(param, "help", None) or ""):
                *names, last = [item.value for item in param.shell_complete(ctx, "")]
                param.help = param.help.replace("{names}", f"{', '.join(names)} or {last}")  # type: ignore[attr-defined]
        super().format_options(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    """A group of commands. An unknown command gets a hint. A group with a command for a run accepts the run alone:
    `inspect latest` is `inspect run latest`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {name for param in self.get_params(ctx) for name in param.opts}
        first = args[0].partition("=")[0] if args else ""
        if first.startswith("--") and first not in names and not ctx.resilient_parsing:
            hint = f"options of a command come after its name: {ctx.command_path} COMMAND {first}"
            raise UsageError(f"No such option: {first}\nhint: {hint}", ctx=ctx)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from asyncrl_cli.core.suggest import did_you_mean

        word = args[0]
        if word in self.commands:
            return super().resolve_command(ctx, args)
        hint = did_you_mean(word, self.commands, f"commands: {', '.join(self.commands)}")
        if word.endswith((".yaml", ".yml")) and "train" in self.commands:
            hint = f"name a command first: {ctx.command_path} train {shlex.quote(word)}"
        elif word == "latest" or "/" in word or any(letter.isdigit() for letter in word):
            for name in {"run", "list"}.intersection(self.commands):
                return name, self.commands[name], args
        raise UsageError(f"No such command {word!r}.\nhint: {hint}", ctx=ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by section. typer itself does this only with rich, which loads slowly."""
        width = max(map(len, self.commands))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            summary = command.get_short_help_str(formatter.width - 6 - width)
            section = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(section, []).append((name.ljust(width), summary))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)


def add(
    app: typer.Typer,
    *commands: tuple[str, Callable[..., None], str, str],
    section: str | None = None,
    foreign: bool = False,
) -> None:
    """Add commands: each with its name, its function, its line in the group's help, and an example for its own help.

    The line may have 61 characters, which fit next to the longest name on a terminal with 80 columns. ``section`` is a
    heading of the group's help. ``foreign`` commands receive unknown options as arguments.
    """
    for name, function, summary, example in commands:
        settings = {"ignore_unknown_options": foreign}
        register = app.command(
            name,
            cls=Command,
            short_help=summary,
            epilog=f"Example: asyncrl {example}",
            context_settings=settings,
            rich_help_panel=section,
        )
        register(function)


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a run's id from the runs in ``--runs-dir``."""
    runs_dir = Path(context.params.get("runs_dir") or "runs")
    names = [run.run_id for run in all_runs(runs_dir)] if runs_dir.is_dir() else []
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion function; ``names`` is called each time the shell asks for completions."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def checkpoint_steps(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a step from the checkpoints of the run that the command line names."""
    from asyncrl_cli.runs.checkpoints import complete_checkpoints

    values = context.params
    name = values.get("run") or values.get("run_id") or values.get("target") or "latest"
    try:
        run = find_run(Path(values.get("runs_dir") or "runs"), str(name))
    except UserError:  # the shell's completion has no place for an error
        return []
    steps = (str(checkpoint.step) for checkpoint in complete_checkpoints(run.path / "checkpoints"))
    return [step for step in steps if step.startswith(incomplete)]


def assignments(context: typer.Context, incomplete: str) -> list[str]:
    """Complete `KEY=` from the spec's keys; for `resume`, from the keys that may change. Complete words as values."""
    from asyncrl_cli.spec.changes import is_fixed
    from asyncrl_cli.spec.keys import keys

    fixed = context.info_name == "resume"
    settings = {
        name: key
        for name, key in keys().items()
        if key.opens is None and "*" not in name and not (fixed and is_fixed(name))
    }
    name, equals, _ = incomplete.partition("=")
    if equals:
        candidates = [f"{name}={word}" for word in settings[name].words] if name in settings else []
    else:
        candidates = [f"{name}=" for name in settings]
    return [candidate for candidate in candidates if candidate.startswith(incomplete)]


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's id, a unique prefix of it, `latest`, or a path.", autocompletion=run_names
    ),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="The folder that contains all runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key; may be repeated.", autocompletion=assignments),
]
Step = Annotated[
    int | None,
    typer.Option(
        "--step", metavar="STEP", min=0, help="Use the checkpoint of this step.", autocompletion=checkpoint_steps
    ),
]
