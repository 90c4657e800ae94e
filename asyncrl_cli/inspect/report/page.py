"""The report: everything about a run, read at one moment, as one HTML file that loads nothing.

Memory is bounded for any length of run: SQL counts and chooses rollouts, and only steps are held one by one.

plotly.js, styles, script and data are in the page, and a Content-Security-Policy forbids network access. The template
escapes texts of runs (prompts, tokens, messages), and data is JSON without a ``<``, so nothing in a run can become
markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from asyncrl_cli.core.terminal import counted, printable
from asyncrl_cli.inspect.decoding import open_decoder
from asyncrl_cli.inspect.health import health
from asyncrl_cli.inspect.pages import duration, moment
from asyncrl_cli.inspect.report.answers import (
    AnswerCard,
    failed,
    healthy,
    learned,
    limited,
    stale,
    trainer_shares,
    trainer_time,
)
from asyncrl_cli.inspect.report.charts import Chart, Curves, curve_charts, curves, run_charts
from asyncrl_cli.inspect.report.held_out import HeldOutPrompt, evaluation_files, held_out_prompts
from asyncrl_cli.inspect.report.samples import Sample, samples
from asyncrl_cli.inspect.reproduction import no_advice, prediction
from asyncrl_cli.inspect.resolved import resolved_spec, spec_text
from asyncrl_cli.journal.history import Fault, History, StepSpan, failures, history, metrics_rows, step_spans
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.journal.staleness import staleness_report
from asyncrl_cli.plan.prediction import Prediction
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory

FAULTS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run on the page. ``prediction`` may be a text: the reason why there is none."""

    run_id: str
    answers: tuple[AnswerCard, ...]
    prediction: Prediction | str
    headline: str
    curves: Curves
    charts: tuple[Chart, ...]
    samples: tuple[Sample, ...]
    held_out: tuple[HeldOutPrompt, ...]
    decoded: bool
    faults: tuple[Fault, ...]
    faults_in_all: int
    spec_text: str


def summarize(run: RunDirectory) -> RunSummary:
    """Read a run. Raises ``JournalError`` if its journal is missing or cannot be read."""
    spec, files = resolved_spec(run), evaluation_files(run.path)
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
        predicted = no_advice(findings) or prediction(connection, spec)
        faults = failures(connection, FAULTS_SHOWN, newest_first=False)
        run_curves = curves(connection, spans, files, settings.max_staleness)
        charts = tuple(run_charts(times, staleness.steps))
        rollouts = tuple(samples(connection, decoder))
    rewards = [span.metrics.get("reward/mean", math.nan) for span in spans]
    first_fault = f"{faults[0].part}: {faults[0].message.strip()}" if faults else ""
    is_healthy = all(finding.last_step is not None for finding in findings)
    return RunSummary(
        run_id=run.run_id,
        answers=(
            healthy(findings, len(spans), has_ended),
            learned(rewards, run_history.evaluations, spec, has_ended=has_ended, findings=findings),
            limited(predicted, shares, has_ended),
            stale(staleness, has_ended),
            failed(phase, run.state.reason, run_history.failures_by_kind, first_fault, is_healthy),
        ),
        prediction=predicted,
        headline=_headline(run, run_history, spans),
        curves=run_curves,
        charts=charts,
        samples=rollouts,
        held_out=tuple(held_out_prompts(files)),
        decoded=decoder is not None,
        faults=faults,
        faults_in_all=sum(run_history.failures_by_kind.values()),
        spec_text=spec_text(run),
    )


def _headline(run: RunDirectory, run_history: History, spans: Sequence[StepSpan]) -> str:
    """The phase, the steps and the wall time of a run."""
    started_at = run_history.starts[0].at if run_history.starts else math.inf
    run_end = max([run.state.updated, *(span.reported_at for span in spans[-1:])])
    steps = f"{run.status}, {run_history.work.steps:,} of {run_history.progress.settings.total_steps:,} steps"
    if run_end <= started_at:
        return steps
    resumes = sum(start.process == "resume" for start in run_history.starts)
    stops = f", stops before {counted(resumes, 'resume')} included" if resumes else ""
    return f"{steps}, started {moment(started_at)}, {duration(run_end - started_at)} in all{stops}"


def render(run: RunSummary) -> str:
    """Render the page of a run."""
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
    charts = {f"chart-{index}": chart for index, chart in enumerate([*curve_charts(run.curves), *run.charts])}
    charts_by_section: dict[str, list[tuple[str, str]]] = {}
    for name, chart in charts.items():
        charts_by_section.setdefault(chart.section, []).append((name, chart.title))
    charts_of_run = charts_by_section.pop("", [])
    folder = resources.files("asyncrl_cli.inspect.report") / "page"
    return environment.get_template("report.html.j2").render(
        run=run,
        charts_by_section=list(charts_by_section.items()),
        charts_of_run=charts_of_run,
        style=(folder / "report.css").read_text(encoding="utf-8"),
        script=(folder / "report.js").read_text(encoding="utf-8"),
        plotly=(resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"),
        data=embedded({name: _figure_data(chart) for name, chart in charts.items()}),
    )


def _figure_data(chart: Chart) -> dict[str, Any]:
    figure = chart.figure.to_plotly_json()
    # The page's script sets all colours, which plotly's template would override.
    layout = {name: value for name, value in figure["layout"].items() if name != "template"}
    return {"data": figure["data"], "layout": layout}


def embedded(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
