"""`asyncrl report`: a run, or several side by side, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import RunsDir
from asyncrl_cli.cli.output import echo


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run ids, unique starts of them, paths, or `latest` (the default)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where to write; report.html in the first run's folder when left out.",
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a report that any browser opens without a network: did it learn, what held it back, was it ever too stale,
    what failed, and the curves, distributions and rollouts behind that.

    Reads the journals of runs that are running, stopped or dead.
    """
    from asyncrl_cli.core.errors import RunError
    from asyncrl_cli.core.files import is_replaceable
    from asyncrl_cli.inspect.report.page import render, write
    from asyncrl_cli.inspect.report.summary import summarize
    from asyncrl_cli.runs.catalogue import find_run

    found = list({run.path: run for run in (find_run(runs_dir, name) for name in runs or ["latest"])}.values())
    page = render([summarize(run) for run in found])
    path = output or found[0].path / "report.html"
    try:
        write(page, path)
    except OSError as error:
        raise RunError(
            f"the report cannot be written: {error.strerror}", location=str(path), hint="name another place with -o"
        ) from None
    # The file itself may be standard output.
    echo(f"wrote {path} ({len(page.encode()) / 1e6:.1f} MB)", err=not is_replaceable(path))
