"""`asyncrl events`: everything that happened in a run, one event a line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir, one_of
from asyncrl_cli.cli.output import echo


def _kinds() -> Iterable[str]:
    from asyncrl_cli.journal.events import KINDS

    return KINDS


def events(
    run: RunName = "latest",
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            autocompletion=one_of(_kinds),
            help="Only these: start, admit, segment, finish, score, group, request, "
            "batch, step, publish, checkpoint, eval, fault or stall. May be given several times.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Print a run's events in the order of their times: of one that is running, stopped or dead.

    docs/events.md says what each kind tells.
    """
    from asyncrl_cli.inspect import event_lines
    from asyncrl_cli.journal.events import KINDS, RENAMED_KINDS
    from asyncrl_cli.runs.catalogue import find_run

    for name in kind or ():
        if name not in KINDS:
            known = f"it is {RENAMED_KINDS[name]!r} now" if name in RENAMED_KINDS else f"one of {', '.join(KINDS)}"
            raise typer.BadParameter(f"there is no kind {name!r}; {known}", param_hint="--kind")
    shown = event_lines.as_json if as_json else event_lines.as_line
    for event in event_lines.run_events(find_run(runs_dir, run), kind or (), follow):
        echo(shown(event))
