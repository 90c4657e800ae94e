"""What the bottleneck is inferred from, read from a run's journal: how the trainer spent its time, step by step, and
the circumstances on which advice depends.

A step's window runs from the end of the step before to its own end. Time in which the run was down belongs to no
window. A reward that comes within 0.2 s is recorded together with its rollout, so its time counts as generation.

Steps are counted from 0 here, as in the journal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.inspect.report.bottleneck import FEW_STEPS, PARTS, Activity, Circumstances, Part, split_wait
from asyncrl_cli.inspect.resolved import setting
from asyncrl_cli.inspect.what_if import recorded_scenario, shares_host, what_if
from asyncrl_cli.journal.events import Checkpoint, Start
from asyncrl_cli.journal.progress import dropped_groups
from asyncrl_cli.journal.step_timeline import StepSpan, finished_groups, first_publish, last_groups
from asyncrl_cli.plan.from_journal import Calibration, calibrate
from asyncrl_cli.plan.prediction import Prediction, predict
from asyncrl_cli.records.groups import BufferSettings


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of one step's window by what the trainer did in them."""

    step: int
    seconds: Mapping[Part, float]


def trainer_time(connection: sqlite3.Connection, spans: Sequence[StepSpan], groups_per_step: int) -> list[StepTime]:
    """The windows of trained steps, all of ``PARTS`` in each."""
    enough = enough_finished(finished_groups(connection), [span.step for span in spans], groups_per_step)
    last = last_groups(connection)
    saved = {checkpoint.after_step: checkpoint.seconds for checkpoint in Checkpoint.read(connection)}
    starts = [start.at for start in Start.read(connection) if start.process != "restart"]
    first = first_publish(connection)
    free_at = first.ended_at if first else None
    found = []
    for span in spans:
        asked_at = span.taken_at if free_at is None else free_at
        if any(asked_at < at < span.ended_at for at in starts):
            asked_at = span.taken_at  # the run was down, and caught up
        scored_at, generated_at = last.get(span.step, (None, None))
        seconds = dict.fromkeys(PARTS, 0.0) | split_wait(
            asked_at,
            span.taken_at,
            enough.get(span.step, asked_at),
            generated_at if generated_at is not None else asked_at,
            scored_at if scored_at is not None else asked_at,
            saved.get(span.step, 0.0),
        )
        seconds["training"] = max(0.0, span.trained_until - span.taken_at)
        free_at = span.ended_at
        if span.publish is not None:
            begun_at = min(span.publish.begun_at, free_at)
            seconds["publishing"] = free_at - begun_at
            seconds["between"] += begun_at - span.trained_until
        found.append(StepTime(span.step, seconds))
    return found


def enough_finished(
    finished: Iterable[tuple[float, int | None]], steps: Sequence[int], groups_per_step: int
) -> dict[int, float]:
    """When as many groups had finished as a batch has, without those of earlier batches: by step.

    ``finished`` are times and batches of groups, by time; ``steps`` ascend. From that time to the batch's own, the
    ledger waited for groups that were due.
    """
    found: dict[int, float] = {}
    upcoming = iter(finished)
    waiting: list[tuple[float, int | None]] = []
    for step in steps:
        waiting = [group for group in waiting if group[1] is None or group[1] >= step]
        while len(waiting) < groups_per_step and (group := next(upcoming, None)) is not None:
            if group[1] is None or group[1] >= step:
                waiting.append(group)
        if len(waiting) >= groups_per_step:
            found[step] = waiting[groups_per_step - 1][0]
    return found


def activity(times: Sequence[StepTime], shares: Mapping[str, float]) -> Activity | None:
    """The shares of the whole; ``shares`` are the means of the metrics of these names. None before a trained step.

    The first step waits for the very first rollouts, whatever bounds the run, and counts in short runs only.
    """
    times = times[1:] if len(times) >= FEW_STEPS else times
    spent = {part: sum(time.seconds[part] for time in times) for part in PARTS}
    total = sum(spent.values())
    if not total:
        return None
    return Activity(
        trainer={part: seconds / total for part, seconds in spent.items()},
        engines_busy=shares.get("share/engines_busy"),
        engines_paused=shares.get("share/engines_paused"),
        journal_busy=shares.get("share/journal_busy"),
    )


SIMULATED_STEPS = 12
"""Steps that are simulated with each setting: few, so that a report is made within seconds."""


def circumstances(
    connection: sqlite3.Connection, spec: Mapping[str, Any], spans: Sequence[StepSpan], settings: BufferSettings
) -> Circumstances | None:
    """None before a trained step."""
    if not spans:
        return None
    trained = len(spans) * settings.groups_per_step
    dropped = {state: sum(counts.values()) for state, counts in dropped_groups(connection).items()}
    try:
        measured = calibrate(connection, shares_host(spec))
    except ValueError:  # too few steps, or a damaged journal, which has batches without groups
        measured = None
    return Circumstances(
        spec=spec,
        max_staleness=settings.max_staleness,
        episodic=any("response/calls_mean" in span.metrics for span in spans),
        steps=len(spans),
        most_rollouts=measured.concurrency if measured else 0,
        rejected=dropped["rejected"] / trained,
        requeued=dropped["requeued"] / trained,
        prediction=_prediction(spec, measured) if measured else None,
    )


def _prediction(spec: Mapping[str, Any], measured: Calibration) -> Prediction | None:
    """None where the simulator does not reproduce what was recorded."""
    if what_if(spec, measured, ()).misfit is not None:
        return None
    longest = max(rollout.response for group in measured.groups for rollout in group.rollouts)
    limit = setting(spec, "rollout.max_response_tokens", longest)
    return predict(recorded_scenario(spec, measured), limit, not shares_host(spec), SIMULATED_STEPS)
