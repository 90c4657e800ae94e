"""`asyncrl timeline`: a run as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.cli.output import echo


def timeline(
    run: RunName = "latest",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Where to write; timeline.json in the run's folder when left out."
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a trace of a run that ui.perfetto.dev and chrome://tracing open: trainer, engines, rollouts, publishes.

    Reads the journal of a run that is running, stopped or dead. With a FILE that ends with .gz it is compressed.
    """
    from asyncrl_cli.core.errors import RunError
    from asyncrl_cli.core.files import is_replaceable
    from asyncrl_cli.inspect.timeline import write_timeline
    from asyncrl_cli.runs.catalogue import find_run

    found = find_run(runs_dir, run)
    path = output or found.path / "timeline.json"
    try:
        count = write_timeline(found, path)
    except OSError as error:
        raise RunError(
            f"the timeline cannot be written: {error.strerror}", location=str(path), hint="name another place with -o"
        ) from None
    # The file itself may be standard output.
    echo(f"wrote {path} ({count:,} events); open it at https://ui.perfetto.dev", err=not is_replaceable(path))
