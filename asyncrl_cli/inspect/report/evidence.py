"""Measures how a recorded run's trainer spent its time, step by step: training, or waiting for exactly one thing. The
report prints it below the advice (plan/prediction.py), with costs that are not simulated.

Invariant: the parts of ``split_wait`` add up to the wait.

A step's window lasts from the end of the previous step to its own end. Time while the run was down belongs to no
window. A reward that comes within 0.2 s is recorded together with its rollout, so its time counts as generation.

Steps are counted from 0 here, as in the journal.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from asyncrl_cli.inspect.resolved import value_at
from asyncrl_cli.inspect.what_if import reproduced_from
from asyncrl_cli.journal.events import Checkpoint, Start
from asyncrl_cli.journal.history import first_start
from asyncrl_cli.journal.progress import dropped_groups
from asyncrl_cli.journal.step_timeline import StepSpan, finished_groups, first_publish, last_groups
from asyncrl_cli.plan.prediction import Prediction
from asyncrl_cli.records.groups import BufferSettings

TrainerPart = Literal["training", "publishing", "generation", "due", "reward", "saving", "between"]
"""Waits: ``generation``: fewer groups had finished than a batch needs. ``due``: enough had finished, but a group that
would have missed its deadline had not (the staleness bound). ``reward``: the batch's last group was generated but not
scored. ``between``: the batch was complete, and something else held up the loop, such as an evaluation."""
PARTS: tuple[TrainerPart, ...] = get_args(TrainerPart)

NAMES: Mapping[TrainerPart, str] = {
    "training": "training",
    "publishing": "publishing weights",
    "generation": "waiting for enough finished groups",
    "due": "waiting for groups that were due",
    "reward": "waiting for rewards",
    "saving": "saving checkpoints",
    "between": "other waits",
}
FEW_STEPS = 10
"""With fewer steps, the noise of the training reward cannot be estimated, and the start takes most of the time."""
MUCH = 0.1
"""Smallest cost to mention, as a share of the trainer's time or as groups per trained group."""
IDLE = 0.5
"""Engines count as idle if they had requests for less than this share of the time."""
BOUND_BY_DISK = 0.5
"""The disk delays commits if the journal was being written for more than this share of the time."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a step's window, by the trainer's activity."""

    step: int
    seconds: Mapping[TrainerPart, float]


@dataclass(frozen=True, slots=True)
class Activity:
    """Shares of the time, 0 to 1. ``trainer`` has every part, and its sum is 1. The other shares are independent of it,
    and None if they were not recorded."""

    trainer: Mapping[TrainerPart, float]
    engines_busy: float | None
    engines_paused: float | None
    journal_busy: float | None


def split_wait(
    asked_at: float, taken_at: float, enough_at: float, generated_at: float, scored_at: float, saving_s: float = 0.0
) -> dict[TrainerPart, float]:
    """Split the trainer's wait for its batch (from ``asked_at`` to ``taken_at``) by cause, in seconds.

    At ``enough_at`` enough groups for a batch had finished. At ``generated_at`` the batch's last group had all tokens,
    and at ``scored_at`` all rewards. A checkpoint stopped training for ``saving_s``.
    """
    taken_at = max(asked_at, taken_at)
    generated_at = min(max(generated_at, asked_at), taken_at)
    enough_at = min(max(enough_at, asked_at), generated_at)
    scored_at = min(max(scored_at, generated_at), taken_at)
    complete = taken_at - scored_at
    saving = min(saving_s, complete)
    return {
        "generation": enough_at - asked_at,
        "due": generated_at - enough_at,
        "reward": scored_at - generated_at,
        "saving": saving,
        "between": complete - saving,
    }


def trainer_time(connection: sqlite3.Connection, spans: Sequence[StepSpan], groups_per_step: int) -> list[StepTime]:
    """Return the windows of trained steps, each with all of ``PARTS``."""
    enough = enough_finished(finished_groups(connection), [span.step for span in spans], groups_per_step)
    last = last_groups(connection)
    saved = {checkpoint.after_step: checkpoint.stall_s for checkpoint in Checkpoint.read(connection)}
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
            taken_at=span.taken_at,
            enough_at=enough.get(span.step, asked_at),
            generated_at=generated_at if generated_at is not None else asked_at,
            scored_at=scored_at if scored_at is not None else asked_at,
            saving_s=saved.get(span.step, 0.0),
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
    """Return, by step, the time when enough groups for a batch had finished, without earlier batches' groups.

    ``finished`` has the groups' times and batches, by time; ``steps`` ascend. From the returned time until the batch
    was taken, the ledger waited for groups that were due.
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


def activity(times: Sequence[StepTime], spans: Sequence[StepSpan]) -> Activity | None:
    """Return the shares of the entire run, or None before the first trained step.

    The first step always waits for the very first rollouts, so it counts only in short runs.
    """
    times = times[1:] if len(times) >= FEW_STEPS else times
    spent = {part: sum(time.seconds[part] for time in times) for part in PARTS}
    total = sum(spent.values())
    if not total:
        return None
    return Activity(
        trainer={part: seconds / total for part, seconds in spent.items()},
        engines_busy=_mean_share(spans, "share/engines_busy"),
        engines_paused=_mean_share(spans, "share/engines_paused"),
        journal_busy=_mean_share(spans, "share/journal_busy"),
    )


def _mean_share(spans: Sequence[StepSpan], name: str) -> float | None:
    """The mean of a share, weighted by the lengths of the steps' windows; None if it was not recorded."""
    known = [
        (span.metrics[name], span.metrics.get("time/step_s", 1.0))
        for span in spans
        if math.isfinite(span.metrics.get(name, math.nan))
    ]
    total = math.fsum(seconds for _, seconds in known)
    return math.fsum(share * seconds for share, seconds in known) / total if total else None


def prediction(connection: sqlite3.Connection, spec: Mapping[str, Any]) -> Prediction | str:
    """Predict a recorded run. Returns the reason if that is impossible."""
    try:
        found = reproduced_from(connection, spec)
    except ValueError as error:
        return str(error)
    if found.misfit is not None:
        return f"the simulator does not reproduce the recorded steps within 10 % (the worst part: {found.misfit})"
    return found.prediction()


def breakdown(spent: Activity) -> str:
    """Describe how the trainer spent its time in a sentence."""
    parts = sorted((part for part in PARTS if spent.trainer[part] >= 0.005), key=lambda part: -spent.trainer[part])
    return f"The trainer's time: {', '.join(f'{NAMES[part]} {spent.trainer[part]:.0%}' for part in parts)}."


def besides(
    connection: sqlite3.Connection,
    spec: Mapping[str, Any],
    spans: Sequence[StepSpan],
    settings: BufferSettings,
    spent: Activity,
) -> Iterator[str]:
    """Describe large costs that are not simulated: the start, evaluations, checkpoints, the disk, discarded groups."""
    began, begun = first_start(connection), spans[0].taken_at
    share = (begun - began) / (spans[-1].ended_at - began)
    if share >= MUCH:
        yield f"The first batch was taken {begun - began:.0f} s after the start, {share:.0%} of the run's time."
    if spent.trainer["saving"] >= MUCH:
        yield "Checkpoints cost time: save less often (`checkpoints.every`), or to a faster disk."
    if spent.trainer["between"] >= MUCH:
        yield _less_between(spec, spent)
    dropped = {state: sum(counts.values()) for state, counts in dropped_groups(connection).items()}
    trained = len(spans) * settings.groups_per_step
    if dropped["rejected"] >= MUCH * trained:
        yield (
            f"For each trained group, {dropped['rejected'] / trained:.2f} were rejected (`asyncrl inspect buffer` has "
            "the reasons). Prompts with both right and wrong rollouts waste less (`data.curriculum`, `data.filter`)."
        )
    if dropped["requeued"] >= MUCH * trained:
        yield (
            f"For each trained group, {dropped['requeued'] / trained:.2f} were cancelled and started again "
            "(`on_stale: requeue`): a larger `pipeline.max_staleness` avoids that."
        )
    episodic = any("response/calls_mean" in span.metrics for span in spans)
    if episodic and spent.engines_busy is not None and spent.engines_busy < IDLE and settings.max_staleness:
        yield (
            f"Engines had no request for {1 - spent.engines_busy:.0%} of the time: look at environments and agents "
            "(`task.episode.workers`, `task.episode.concurrency`)."
        )


def _less_between(spec: Mapping[str, Any], spent: Activity) -> str:
    if (spent.journal_busy or 0.0) > BOUND_BY_DISK:
        return "The journal was being written most of the time: put the runs folder on a faster local disk."
    if not value_at(spec, "evaluation.every"):
        return "Other waits cost time: the timeline (`asyncrl timeline`) shows what ran between two steps."
    unfixed = " and switch `evaluation.fix_version` off" if value_at(spec, "evaluation.fix_version") else ""
    return (
        "Other waits cost time, mostly for evaluations: evaluate less often or on fewer prompts (`evaluation.every`, "
        f"`evaluation.prompts`){unfixed}."
    )
