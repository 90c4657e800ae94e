"""A run's report as files: the page, and its charts as pictures."""

from __future__ import annotations

from pathlib import Path

from asyncrl_cli.inspect.report.charts import curve_charts
from asyncrl_cli.inspect.report.page import render, write
from asyncrl_cli.inspect.report.pictures import draw
from asyncrl_cli.inspect.report.summary import summarize
from asyncrl_cli.runs.directory import RunDirectory

PAGE = "report.html"
PLOTS = "plots"


def write_report(run: RunDirectory, folder: Path) -> None:
    """Write ``report.html`` and ``plots/*.png``.

    Raises ``JournalError`` when the run has no journal, or one that cannot be read, and ``OSError``.
    """
    summary = summarize(run)
    write(render([summary]), folder / PAGE)
    draw([*curve_charts({run.run_id: summary.curves}).charts, *summary.charts], folder / PLOTS)
