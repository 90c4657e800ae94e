"""Adds commands to the command line, and defines the arguments and options that several commands share, with shell
completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from asyncrl_cli.runs.catalogue import all_runs

UsageError: type[Any] = typer.BadParameter.__mro__[1]
"""The base class of typer's usage errors; its name differs between releases."""


class Command(TyperCommand):
    """A command with its example in usage errors, and the usage line `train SPEC` instead of typer's `train {SPEC}`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            if self.epilog and not ctx.resilient_parsing:  # the shell's completion has no place for an error
                hint = f"{self.epilog[:1].lower()}{self.epilog[1:]}"
                raise UsageError(f"{error.format_message()}\nhint: {hint}", ctx=ctx) from None
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [text.replace("{", "").replace("}", "") for text in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    """A group that lists its commands by section. typer itself does this only with rich, which loads slowly."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
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


def completion(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion function; ``names`` is called each time the shell asks for completions."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def assignments(incomplete: str) -> list[str]:
    """Complete `KEY=` from the spec's keys."""
    from asyncrl_cli.spec.keys import keys

    candidates = [f"{name}=" for name, key in keys().items() if key.opens is None and "*" not in name]
    return [candidate for candidate in candidates if candidate.startswith(incomplete)]


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's id, a unique prefix of it, `latest`, or a path.", autocompletion=run_names
    ),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="The folder that contains all runs.")]
NewRunsDir = Annotated[
    Path | None,
    typer.Option("--runs-dir", metavar="DIR", help="The folder that contains all runs. Default: runs, or the spec's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key; may be repeated.", autocompletion=assignments),
]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="STEP", min=0, help="Use the checkpoint of this step."),
]
