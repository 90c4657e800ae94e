"""Everything that a report says about one run, read from its folder at one moment.

Bounded for any length of run: rows of rollouts are counted and chosen in SQL, and only steps are held one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.buffer.history import History, history
from asyncrl_cli.buffer.queries import snapshot
from asyncrl_cli.buffer.schema import FILE
from asyncrl_cli.buffer.spans import StepSpan, step_spans
from asyncrl_cli.buffer.staleness import staleness_report
from asyncrl_cli.observe.decoding import open_decoder
from asyncrl_cli.observe.pages import duration, moment, number
from asyncrl_cli.observe.report.bottleneck import Activity, Bottleneck, bottleneck
from asyncrl_cli.observe.report.charts import (
    SERIES,
    Chart,
    histogram_chart,
    scatter_chart,
    staleness_chart,
    time_chart,
)
from asyncrl_cli.observe.report.circumstances import circumstances
from asyncrl_cli.observe.report.curves import Curves, curves, mean
from asyncrl_cli.observe.report.distributions import histogram, length_and_reward
from asyncrl_cli.observe.report.learning import learned
from asyncrl_cli.observe.report.samples import Sample, samples
from asyncrl_cli.observe.report.story import Answer, failed, held_back, stale
from asyncrl_cli.observe.report.trainer_time import activity, trainer_time
from asyncrl_cli.observe.resolved import resolved_spec
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.standing import standing

FAULTS_SHOWN = 100
SHARES = ("share/engines_busy", "share/engines_paused", "share/journal_busy")


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the faults' table."""

    at: str
    kind: str
    part: str
    message: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. ``facts`` are short values by their names, the same names for every run."""

    run_id: str
    answers: tuple[Answer, ...]
    bottleneck: Bottleneck | None
    facts: Mapping[str, str]
    curves: Curves
    charts: tuple[Chart, ...]
    samples: tuple[Sample, ...]
    decoded: bool
    faults: tuple[Fault, ...]
    faults_in_all: int
    spec: Mapping[str, Any]
    spec_text: str


def summarize(run: RunDirectory) -> RunSummary:
    """Read a run. Raises ``JournalError`` when it has no journal, or one that cannot be read."""
    spec = resolved_spec(run)
    with snapshot(run.path / FILE) as connection:
        past = history(connection)
        spans = list(step_spans(connection, past.standing.settings.publish_every))
        lags = staleness_report(connection)
        settings = past.standing.settings
        times = trainer_time(connection, spans, settings.groups_per_step)
        spent = activity(times, _shares(spans))
        known = circumstances(connection, spec, spans, settings.max_staleness)
        found = bottleneck(spent, known) if spent and known else None
        course = curves(connection, spans, SERIES)
        decoder = open_decoder(run)
        faults = [
            Fault(moment(at), kind, part, message)
            for at, kind, part, message in connection.execute(
                f"SELECT at, kind, part, message FROM failures ORDER BY id LIMIT {FAULTS_SHOWN}"
            )
        ]
        charts = [time_chart(times)] if times else []
        if lags.steps:
            charts.append(staleness_chart(lags.steps))
        for title, values in (
            ("Length of responses (tokens)", histogram(connection, "tokens")),
            ("Rewards", histogram(connection, "reward")),
        ):
            if values is not None:
                charts.append(histogram_chart(title, values))
        if points := length_and_reward(connection):
            charts.append(scatter_chart(points))
        chosen = samples(connection, decoder)
    phase = standing(run)
    rewards = [span.metrics.get("reward/mean", math.nan) for span in spans]
    first = f"{faults[0].part}: {faults[0].message.strip()}" if faults else ""
    return RunSummary(
        run_id=run.run_id,
        answers=(
            Answer("Did it learn?", *learned(rewards, past.evaluations, spec)),
            held_back(found),
            stale(lags),
            failed(phase, run.state.reason, past.failures_by_kind, first),
        ),
        bottleneck=found,
        facts=_facts(run, phase, past, spent, rewards),
        curves=course,
        charts=tuple(charts),
        samples=tuple(chosen),
        decoded=decoder is not None,
        faults=tuple(faults),
        faults_in_all=sum(past.failures_by_kind.values()),
        spec=spec,
        spec_text=_spec_text(run),
    )


def _shares(spans: list[StepSpan]) -> dict[str, float]:
    """Means of the shares that were recorded, weighted by the length of their windows."""
    found = {}
    for name in SHARES:
        known = [
            (span.metrics[name], span.metrics.get("time/step_s", 1.0))
            for span in spans
            if math.isfinite(span.metrics.get(name, math.nan))
        ]
        if total := math.fsum(seconds for _, seconds in known):
            found[name] = math.fsum(share * seconds for share, seconds in known) / total
    return found


def _facts(
    run: RunDirectory, phase: str, past: History, spent: Activity | None, rewards: list[float]
) -> dict[str, str]:
    work, manifest = past.work, run.manifest
    best = max((one.accuracy for one in past.evaluations if one.kind == "greedy"), default=None)
    tail = mean(rewards[-max(1, len(rewards) // 10) :]) if rewards else None
    return {
        "state": phase,
        "started": f"{manifest.get('started', '?')} on {manifest.get('host', '?')}",
        "steps trained": f"{work.steps:,} of {past.standing.settings.total_steps:,}",
        "time": f"{duration(work.seconds)}"
        + (f", {number(work.seconds / work.steps)} s per step" if work.steps else ""),
        "tokens trained": f"{work.trained_tokens:,}",
        "tokens generated": f"{work.generated_tokens:,}"
        + (f", {work.generated_tokens / work.seconds:,.0f}/s" if work.seconds else ""),
        "reward, last tenth": "–" if tail is None else number(tail),
        "best held-out accuracy": "–" if best is None else f"{best:.3f}",
        "trainer": "–"
        if spent is None
        else ", ".join(f"{part} {share:.0%}" for part, share in spent.trainer.items() if share >= 0.005),
        "engines": _engines(spent),
        "starts": f"{len(past.starts)}",
        "code": f"asyncrl {manifest.get('asyncrl', '?')}, Python {manifest.get('python', '?')}",
    }


def _engines(spent: Activity | None) -> str:
    if spent is None or spent.engines_busy is None:
        return "–"
    return f"busy {spent.engines_busy:.0%}, paused {spent.engines_paused or 0.0:.0%}"


def _spec_text(run: RunDirectory) -> str:
    try:
        return (run.path / "spec.yaml").read_text(errors="replace")
    except OSError:
        return ""
