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
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from asyncrl_cli.inspect.report.charts import (
    SERIES,
    Chart,
    curve_charts,
    histogram_chart,
    scatter_chart,
    shares_chart,
    staleness_chart,
    time_chart,
)
from asyncrl_cli.inspect.report.curves import Curves, curves
from asyncrl_cli.inspect.report.evidence import StepTime, activity, besides, breakdown, prediction, trainer_time
from asyncrl_cli.inspect.report.facts import Facts, facts
from asyncrl_cli.inspect.report.findings import Answer, failed, healthy, learned, limited, stale
from asyncrl_cli.inspect.report.samples import (
    HeldOutSample,
    Sample,
    evaluation_files,
    held_out_samples,
    machine_samples,
    newest,
    samples,
)
from asyncrl_cli.inspect.resolved import resolved_spec, spec_text
from asyncrl_cli.inspect.what_if import no_advice
from asyncrl_cli.journal import rollouts
from asyncrl_cli.journal.events import Fault
from asyncrl_cli.journal.history import failures, history, metrics_rows
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.journal.staleness import Report, staleness_report
from asyncrl_cli.journal.step_timeline import step_spans
from asyncrl_cli.plan.prediction import Prediction
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory

FAULTS_SHOWN = 100
NOT_SET = "not set"
RUN_ID = re.compile(r"^(.+)-\d{8}-\d{6}-(\w+)$")
LABEL_LENGTH = 28
"""Largest length of a run's label in charts and tables."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    run_id: str
    answers: tuple[Answer, ...]
    prediction: Prediction | str
    """The prediction, or the reason why there is none."""
    facts: Facts
    """The same names for every run."""
    curves: Curves
    charts: tuple[Chart, ...]
    samples: tuple[Sample, ...]
    held_out: tuple[HeldOutSample, ...]
    """Answers before and after training."""
    decoded: bool
    faults: tuple[Fault, ...]
    faults_in_all: int
    spec: Mapping[str, Any]
    spec_text: str


def summarize(run: RunDirectory) -> RunSummary:
    """Read a run. Raises ``JournalError`` if its journal is missing or cannot be read."""
    spec, files, machine = resolved_spec(run), evaluation_files(run), machine_samples(run)
    with snapshot(run.path / FILE) as connection:
        past = history(connection)
        settings = past.progress.settings
        spans = list(step_spans(connection, settings.publish_every))
        staleness = staleness_report(connection)
        times = trainer_time(connection, spans, settings.groups_per_step)
        spent = activity(times, spans)
        findings = health(metrics_rows(connection), spec)
        reason = no_advice(findings)
        found = reason or prediction(connection, spec)
        recorded: list[str] = []
        if spent:
            costs = besides(connection, spec=spec, spans=spans, settings=settings, spent=spent)
            recorded = [breakdown(spent)] if reason else [breakdown(spent), *costs]
        course = curves(
            connection, spans=spans, names=SERIES, files=files, samples=machine, max_staleness=settings.max_staleness
        )
        decoder = open_decoder(run)
        faults = failures(connection, FAULTS_SHOWN, newest=False)
        charts = tuple(_charts(connection, times, staleness))
        chosen = samples(connection, decoder)
        both = newest(files, "greedy")
        held_out = tuple(held_out_samples(connection, *both)) if both else ()
    phase = run.status
    ended = phase not in ACTIVE
    rewards = [span.metrics.get("reward/mean", math.nan) for span in spans]
    first = f"{faults[0].part}: {faults[0].message.strip()}" if faults else ""
    return RunSummary(
        run_id=run.run_id,
        answers=(
            healthy(findings, len(spans), ended),
            learned(rewards, evaluations=past.evaluations, spec=spec, ended=ended, findings=findings),
            limited(found, recorded, ended),
            stale(staleness, ended),
            failed(
                phase,
                reason=run.state.reason,
                fault_counts=past.failures_by_kind,
                first_fault=first,
                is_healthy=all(finding.last_step is not None for finding in findings),
            ),
        ),
        prediction=found,
        facts=facts(run=run, phase=phase, past=past, spans=spans, spent=spent, spec=spec, files=files, machine=machine),
        curves=course,
        charts=charts,
        samples=tuple(chosen),
        held_out=held_out,
        decoded=decoder is not None,
        faults=faults,
        faults_in_all=sum(past.failures_by_kind.values()),
        spec=spec,
        spec_text=spec_text(run),
    )


def _charts(connection: sqlite3.Connection, times: Sequence[StepTime], staleness: Report) -> Iterator[Chart]:
    if times:
        yield time_chart(times)
    if staleness.steps:
        yield staleness_chart(staleness.steps)
    few = rollouts.distinct_rewards(connection)
    if few and (shares := rollouts.reward_shares(connection)) is not None:
        yield shares_chart("Rollouts by reward", shares)
    elif few is None and (rewards := rollouts.histogram(connection, "reward")) is not None:
        yield histogram_chart("Rewards", rewards)
    if (groups := rollouts.group_shares(connection)) is not None:
        yield shares_chart("Groups by their rewards", groups)
    if (lengths := rollouts.histogram(connection, "tokens")) is not None:
        yield histogram_chart("Length of responses (tokens)", lengths)
    if points := rollouts.length_and_reward(connection):
        yield scatter_chart(points, few)


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

    def drawn(some: Iterable[Chart]) -> list[tuple[str, str]]:
        """Add charts to the page. Returns their ids and titles."""
        first = len(charts)
        charts.update((f"chart-{at}", chart) for at, chart in enumerate(some, first))
        return [(name, chart.title) for name, chart in list(charts.items())[first:]]

    labels = short_labels([run.run_id for run in runs])
    course = curve_charts(dict(zip(labels, (run.curves for run in runs), strict=True)))
    sections = dict.fromkeys(chart.section for chart in course.charts)
    folder = resources.files("asyncrl_cli.inspect.report") / "page"
    return environment.get_template("report.html.j2").render(
        runs=runs,
        labels=labels,
        common=[(name, drawn(chart for chart in course.charts if chart.section == name)) for name in sections],
        constant={title: number(value) for title, value in course.constant.items()},
        own={run.run_id: drawn(run.charts) for run in runs},
        differences=differences(runs),
        style=(folder / "report.css").read_text(encoding="utf-8"),
        script=(folder / "report.js").read_text(encoding="utf-8"),
        plotly=(resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"),
        data=embedded({name: {"data": chart.data, "layout": chart.layout} for name, chart in charts.items()}),
    )


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
