"""`asyncrl report` and `asyncrl timeline`: runs as an HTML page, and a run as a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.arguments import RunName, RunsDir
from asyncrl_cli.cli.output import echo
from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.files import is_replaceable
from asyncrl_cli.runs.catalogue import find_run


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Ids of runs, unique prefixes of ids, paths, or `latest` (the default)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The file to write. Default: report.html in the first run's folder."
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a report that any browser opens without a network: whether the run learned, what limited its speed, its
    staleness and failures, with curves, distributions and rollouts.

    Reads the journals of runs that are running, stopped or dead.
    """
    from asyncrl_cli.inspect.report.page import render, summarize, write

    found = list({run.path: run for run in (find_run(runs_dir, name) for name in runs or ["latest"])}.values())
    page = render([summarize(run) for run in found])
    path = output or found[0].path / "report.html"
    with _writing("report", path):
        write(page, path)
    _confirm(path, f"wrote {path} ({len(page.encode()) / 1e6:.1f} MB)")


def timeline(
    run: RunName = "latest",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The file to write. Default: timeline.json in the run's folder."
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a trace of a run that ui.perfetto.dev and chrome://tracing open: trainer, engines, rollouts, publishes.

    Reads the journal of a run that is running, stopped or dead. A FILE that ends with .gz is compressed.
    """
    from asyncrl_cli.inspect.timeline import write_timeline

    found = find_run(runs_dir, run)
    path = output or found.path / "timeline.json"
    with _writing("timeline", path):
        count = write_timeline(found, path)
    _confirm(path, f"wrote {path} ({count:,} events); open it at https://ui.perfetto.dev")


@contextmanager
def _writing(what: str, path: Path) -> Iterator[None]:
    is_new = not path.parent.is_dir()
    try:
        yield
        if is_new:
            echo(f"created the folder {path.parent}", err=True)
    except OSError as error:
        message = f"the {what} cannot be written: {error.strerror}"
        raise RunError(message, location=str(path), hint="name another file with -o") from None


def _confirm(path: Path, text: str) -> None:
    echo(text, err=not is_replaceable(path))  # the file may itself be standard output
