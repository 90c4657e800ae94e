"""Everything that a report says about one run, read from its folder at one moment.

Bounded for any length of run: rows of rollouts are counted and chosen in SQL, and only steps are held one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl_cli.inspect.decoding import open_decoder
from asyncrl_cli.inspect.report.charts import (
    SERIES,
    Chart,
    histogram_chart,
    scatter_chart,
    shares_chart,
    staleness_chart,
    time_chart,
)
from asyncrl_cli.inspect.report.curves import Curves, curves
from asyncrl_cli.inspect.report.evidence import StepTime, activity, besides, breakdown, prediction, trainer_time
from asyncrl_cli.inspect.report.facts import Facts, facts
from asyncrl_cli.inspect.report.findings import Answer, failed, learned, limited, stale
from asyncrl_cli.inspect.report.recorded_files import evaluation_files, machine_samples, newest
from asyncrl_cli.inspect.report.samples import HeldOutSample, Sample, held_out_samples, samples
from asyncrl_cli.inspect.resolved import resolved_spec, spec_text
from asyncrl_cli.journal import rollouts
from asyncrl_cli.journal.events import Fault
from asyncrl_cli.journal.history import first_failures, history
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.journal.staleness import Report, staleness_report
from asyncrl_cli.journal.step_timeline import step_spans
from asyncrl_cli.plan.prediction import Prediction
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory

if TYPE_CHECKING:
    import sqlite3

FAULTS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run."""

    run_id: str
    answers: tuple[Answer, ...]
    prediction: Prediction | str
    """The reason, if there is no prediction."""
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
    """Read a run. Raises ``JournalError`` when it has no journal, or one that cannot be read."""
    spec, files, machine = resolved_spec(run), evaluation_files(run), machine_samples(run)
    with snapshot(run.path / FILE) as connection:
        past = history(connection)
        settings = past.progress.settings
        spans = list(step_spans(connection, settings.publish_every))
        staleness = staleness_report(connection)
        times = trainer_time(connection, spans, settings.groups_per_step)
        spent = activity(times, spans)
        found = prediction(connection, spec)
        recorded = [breakdown(spent), *besides(connection, spec, spans, settings, spent)] if spent else []
        course = curves(connection, spans, SERIES, files, machine, settings.max_staleness)
        decoder = open_decoder(run)
        faults = first_failures(connection, FAULTS_SHOWN)
        charts = tuple(_charts(connection, times, staleness))
        chosen = samples(connection, decoder)
    phase = run.status
    ended = phase not in ACTIVE
    rewards = [span.metrics.get("reward/mean", math.nan) for span in spans]
    first = f"{faults[0].part}: {faults[0].message.strip()}" if faults else ""
    both = newest(files, "greedy")
    return RunSummary(
        run_id=run.run_id,
        answers=(
            learned(rewards, past.evaluations, spec, ended),
            limited(found, recorded, ended),
            stale(staleness, ended),
            failed(phase, run.state.reason, past.failures_by_kind, first),
        ),
        prediction=found,
        facts=facts(run=run, phase=phase, past=past, spans=spans, spent=spent, spec=spec, files=files, machine=machine),
        curves=course,
        charts=charts,
        samples=tuple(chosen),
        held_out=tuple(held_out_samples(*both)) if both else (),
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
