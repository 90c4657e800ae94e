"""The report as one HTML file that loads nothing: plotly.js, styles, script and data are in it.

A Content-Security-Policy forbids what would go over the network. Text of runs (prompts, tokens, messages) is escaped by
the template, and data is JSON without a ``<``, so that nothing in a run can become markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl_cli.core.files import output_file
from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.core.terminal import counted, printable
from asyncrl_cli.inspect.pages import moment, number
from asyncrl_cli.inspect.report.charts import Chart, curve_charts
from asyncrl_cli.inspect.report.summary import RunSummary

NOT_SET = "not set"
RUN_ID = re.compile(r"^(.+)-\d{8}-\d{6}-(\w+)$")
LABEL_LENGTH = 28
"""Characters of a run's label in charts and tables."""


def render(runs: Sequence[RunSummary]) -> str:
    """The page of one run, or of several side by side."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("asyncrl_cli.inspect.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        # Text that changes the direction of writing would also change the rest of its line.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": moment, "counted": counted}
    charts: dict[str, Chart] = {}

    def drawn(some: Iterable[Chart]) -> list[tuple[str, str]]:
        """The ids of charts on the page, with their titles."""
        first = len(charts)
        charts.update((f"chart-{at}", chart) for at, chart in enumerate(some, first))
        return [(name, chart.title) for name, chart in list(charts.items())[first:]]

    labels = short_labels([run.run_id for run in runs])
    course = curve_charts(dict(zip(labels, (run.curves for run in runs), strict=True)))
    sections = dict.fromkeys(chart.section for chart in course.charts)
    folder = files("asyncrl_cli.inspect.report") / "page"
    return environment.get_template("report.html.j2").render(
        runs=runs,
        labels=labels,
        common=[(name, drawn(chart for chart in course.charts if chart.section == name)) for name in sections],
        constant={title: number(value) for title, value in course.constant.items()},
        own={run.run_id: drawn(run.charts) for run in runs},
        differences=differences(runs),
        style=(folder / "report.css").read_text(encoding="utf-8"),
        script=(folder / "report.js").read_text(encoding="utf-8"),
        plotly=(files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"),
        data=embedded({name: {"data": chart.data, "layout": chart.layout} for name, chart in charts.items()}),
    )


def short_labels(run_ids: Sequence[str]) -> list[str]:
    """Run ids as short as they stay different: the name, the name with the last part, or the whole id."""

    def name(run_id: str) -> str:
        return RUN_ID.sub(r"\1", run_id)

    def with_last(run_id: str) -> str:
        return RUN_ID.sub(r"\1 \2", run_id)

    for shorten in (name, with_last):
        labels = [shorten(run_id)[:LABEL_LENGTH] for run_id in run_ids]
        if len(set(labels)) == len(labels):
            return labels
    return list(run_ids)


def write(text: str, path: Path) -> None:
    """Write a page whole. Raises ``OSError``."""
    with output_file(path) as file:
        file.write(text.encode())


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def differences(runs: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    """The keys of the specs that are not the same in all runs, with the value of each run."""
    specs = [flatten(run.spec) for run in runs]
    keys = dict.fromkeys(key for spec in specs for key in spec)
    rows = [(key, [_value_text(spec[key]) if key in spec else NOT_SET for spec in specs]) for key in keys]
    return [(key, values) for key, values in rows if any(a != b for a, b in pairwise(values))]


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
