"""Adds commands to the command line, and defines the arguments and options that several of them share, with shell
completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose usage line reads `train SPEC`; typer's own reads `train {SPEC}`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


def add(
    app: typer.Typer, name: str, function: Callable[..., None], summary: str, example: str, *, foreign: bool = False
) -> None:
    """Add a command, with its line in the help of its group and an example in its own.

    ``summary`` may have 61 characters: the space beside the longest name on a terminal of 80 columns. A ``foreign``
    command receives unknown options as arguments.
    """
    settings = {"ignore_unknown_options": foreign}
    command = app.command(
        name, cls=Command, short_help=summary, epilog=f"Example: {example}", context_settings=settings
    )
    command(function)


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """The ids of the runs in ``--runs-dir`` that begin with what was typed."""
    from asyncrl_cli.runs.catalogue import all_runs

    runs_dir = Path(context.params.get("runs_dir") or "runs")
    names = [run.run_id for run in all_runs(runs_dir)] if runs_dir.is_dir() else []
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion function; ``names`` is called each time the shell asks for completions."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def checkpoint_steps(context: typer.Context, incomplete: str) -> list[str]:
    """The steps of the checkpoints of the run that the command line names."""
    from asyncrl_cli.core.errors import UserError
    from asyncrl_cli.runs.catalogue import find_run
    from asyncrl_cli.runs.checkpoints import complete_checkpoints

    values = context.params
    name = values.get("run") or values.get("run_id") or values.get("target") or "latest"
    try:
        run = find_run(Path(values.get("runs_dir") or "runs"), str(name))
    except UserError:  # a completion has no place for a message
        return []
    steps = (str(checkpoint.step) for checkpoint in complete_checkpoints(run.path / "checkpoints"))
    return [step for step in steps if step.startswith(incomplete)]


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's id, a unique prefix of it, `latest`, or a path.", autocompletion=run_names
    ),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="The folder that contains all runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key; may be repeated.")
]
Step = Annotated[
    int | None,
    typer.Option(
        "--step", metavar="STEP", min=0, help="Use the checkpoint of this step.", autocompletion=checkpoint_steps
    ),
]
