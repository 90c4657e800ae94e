"""The report: everything about each run, read at one moment, as one HTML file that loads nothing.

Memory is bounded for any length of run: SQL counts and chooses rollouts, and only steps are held one by one.

plotly.js, styles, script and data are in the page, and a Content-Security-Policy forbids network access. The template
escapes texts of runs (prompts, tokens, messages), and data is JSON without a ``<``, so nothing in a run can become
markup.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl_cli.core.files import output_file
from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.core.terminal import counted, printable
from asyncrl_cli.inspect.decoding import open_decoder
from asyncrl_cli.inspect.health import health
from asyncrl_cli.inspect.pages import moment, number
from asyncrl_cli.inspect.report.answers import (
    Answer,
    failed,
    healthy,
    learned,
    limited,
    other_costs,
    stale,
    trainer_shares,
    trainer_time,
)
from asyncrl_cli.inspect.report.charts import Chart, Curves, curve_charts, curves, run_charts
from asyncrl_cli.inspect.report.facts import Facts, facts
from asyncrl_cli.inspect.report.samples import HeldOutSample, Sample, evaluation_files, held_out_samples, samples
from asyncrl_cli.inspect.reproduction import no_advice, prediction
from asyncrl_cli.inspect.resolved import resolved_spec, spec_text
from asyncrl_cli.journal.history import Fault, failures, history, metrics_rows, step_spans
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.rollouts import distributions
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.journal.staleness import staleness_report
from asyncrl_cli.plan.prediction import Prediction
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory

FAULTS_SHOWN = 100
NOT_SET = "not set"
RUN_ID = re.compile(r"^(.+)-\d{8}-\d{6}-(\w+)$")
LABEL_LENGTH = 28
"""Largest length of a run's label in charts and tables."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run on the page.

    Args:
        prediction: the prediction, or the reason why there is none.
        facts: the same names for every run.
        held_out: answers before and after training.
    """

    run_id: str
    answers: tuple[Answer, ...]
    prediction: Prediction | str
    facts: Facts
    curves: Curves
    charts: tuple[Chart, ...]
    samples: tuple[Sample, ...]
    held_out: tuple[HeldOutSample, ...]
    decoded: bool
    faults: tuple[Fault, ...]
    faults_in_all: int
    spec: Mapping[str, Any]
    spec_text: str


def summarize(run: RunDirectory) -> RunSummary:
    """Read a run. Raises ``JournalError`` if its journal is missing or cannot be read."""
    spec, files = resolved_spec(run), evaluation_files(run)
    phase = run.status
    has_ended = phase not in ACTIVE
    decoder = open_decoder(run)
    with snapshot(run.path / FILE) as connection:
        run_history = history(connection)
        settings = run_history.progress.settings
        spans = list(step_spans(connection, settings.publish_every))
        staleness = staleness_report(connection)
        times = trainer_time(connection, spans)
        shares = trainer_shares(times)
        findings = health(metrics_rows(connection), spec)
        unhealthy = no_advice(findings)
        predicted = unhealthy or prediction(connection, spec)
        costs = list(other_costs(connection, spec, spans, shares)) if shares and not unhealthy else []
        faults = failures(connection, FAULTS_SHOWN, newest=False)
        run_curves = curves(connection, spans, files, settings.max_staleness)
        charts = tuple(run_charts(times, staleness.steps, distributions(connection)))
        rollouts = tuple(samples(connection, decoder))
        held_out = tuple(held_out_samples(connection, files))
    rewards = [span.metrics.get("reward/mean", math.nan) for span in spans]
    first_fault = f"{faults[0].part}: {faults[0].message.strip()}" if faults else ""
    is_healthy = all(finding.last_step is not None for finding in findings)
    return RunSummary(
        run_id=run.run_id,
        answers=(
            healthy(findings, len(spans), has_ended),
            learned(rewards, run_history.evaluations, spec, has_ended=has_ended, findings=findings),
            limited(predicted, shares, costs, has_ended),
            stale(staleness, has_ended),
            failed(phase, run.state.reason, run_history.failures_by_kind, first_fault, is_healthy),
        ),
        prediction=predicted,
        facts=facts(run, run_history, spans, files),
        curves=run_curves,
        charts=charts,
        samples=rollouts,
        held_out=held_out,
        decoded=decoder is not None,
        faults=faults,
        faults_in_all=sum(run_history.failures_by_kind.values()),
        spec=spec,
        spec_text=spec_text(run),
    )


def render(runs: Sequence[RunSummary]) -> str:
    """Render the page of one run, or of several runs side by side."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("asyncrl_cli.inspect.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        # Escapes marks that change the writing direction: they would also turn around the rest of the line.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": moment, "counted": counted}
    charts: dict[str, Chart] = {}

    def chart_ids(new_charts: Iterable[Chart]) -> list[tuple[str, str]]:
        """Add charts to the page. Returns their ids and titles."""
        named = {f"chart-{index}": chart for index, chart in enumerate(new_charts, len(charts))}
        charts.update(named)
        return [(name, chart.title) for name, chart in named.items()]

    labels = short_labels([run.run_id for run in runs])
    common_charts, constants = curve_charts(dict(zip(labels, (run.curves for run in runs), strict=True)))
    sections = dict.fromkeys(chart.section for chart in common_charts)
    folder = resources.files("asyncrl_cli.inspect.report") / "page"
    return environment.get_template("report.html.j2").render(
        runs=runs,
        labels=labels,
        common=[(name, chart_ids(chart for chart in common_charts if chart.section == name)) for name in sections],
        constant={title: number(value) for title, value in constants.items()},
        own={run.run_id: chart_ids(run.charts) for run in runs},
        differences=differences(runs),
        style=(folder / "report.css").read_text(encoding="utf-8"),
        script=(folder / "report.js").read_text(encoding="utf-8"),
        plotly=(resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"),
        data=embedded({name: _figure_data(chart) for name, chart in charts.items()}),
    )


def _figure_data(chart: Chart) -> dict[str, Any]:
    figure = chart.figure.to_plotly_json()
    # The page's script sets all colours, which plotly's template would override.
    return {
        "data": figure["data"],
        "layout": {name: figure["layout"][name] for name in figure["layout"] if name != "template"},
    }


def short_labels(run_ids: Sequence[str]) -> list[str]:
    """Shorten run ids while they stay different: to the name, the name with the last part, or the entire id."""

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
    with output_file(path) as file:
        file.write(text.encode())


def embedded(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def differences(runs: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    """Return the keys that differ between the runs' specs, with the value of each run."""
    specs = [flatten(run.spec) for run in runs]
    keys = dict.fromkeys(key for spec in specs for key in spec)
    texts = [{k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in spec.items()} for spec in specs]
    rows = [(key, [text.get(key, NOT_SET) for text in texts]) for key in keys]
    return [(key, values) for key, values in rows if any(a != b for a, b in pairwise(values))]
