"""`asyncrl report`: a run as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.cli.output import echo
from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.files import is_replaceable
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
    from asyncrl_cli.inspect.report.page import render, summarize, write

    found_run = find_run(runs_dir, run)
    page = render(summarize(found_run))
    path = output or found_run.path / "report.html"
    is_new_folder = not path.parent.is_dir()
    try:
        write(page, path)
    except OSError as error:
        message = f"the report cannot be written: {error.strerror}"
        raise RunError(message, location=str(path), hint="name another file with -o") from None
    if is_new_folder:
        echo(f"created the folder {path.parent}", err=True)
    # The file may itself be standard output.
    echo(f"wrote {path} ({len(page.encode()) / 1e6:.1f} MB)", err=not is_replaceable(path))
