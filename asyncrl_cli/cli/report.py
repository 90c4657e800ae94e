"""`asyncrl report`: a run as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.cli.output import echo
from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs.catalogue import find_run


def report(
    run: RunName = "latest",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The file to write. Default: report.html in the run's folder."
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a report that any browser opens without a network: whether the run learned, what limited its speed, its
    staleness and failures, with curves and rollouts.

    Reads the journal of a run that is running, stopped or dead.
    """
    from asyncrl_cli.inspect.report.page import render, summarize

    found_run = find_run(runs_dir, run)
    page = render(summarize(found_run)).encode()
    path = output or found_run.path / "report.html"
    is_new_folder = not path.parent.is_dir()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(page)
    except OSError as error:
        message = f"the report cannot be written: {error.strerror}"
        raise RunError(message, location=str(path), hint="name another file with -o") from None
    if is_new_folder:
        echo(f"created the folder {path.parent}", err=True)
    echo(f"wrote {path} ({len(page) / 1e6:.1f} MB)", err=True)  # the file may itself be standard output
