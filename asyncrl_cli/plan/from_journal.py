"""Measures lengths and costs of a run from its journal, and the steps that a simulation is compared with.

These are the last steps without an evaluation, a checkpoint or a start in them, which no simulation has. Costs are
fitted to steps with an evaluation as well: its requests are work of the engines like any other. Steps are counted from
0 here, as in the journal; times are in seconds.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from asyncrl_cli.journal.events import Checkpoint, Start
from asyncrl_cli.journal.progress import progress
from asyncrl_cli.journal.step_timeline import StepSpan, last_groups, step_spans
from asyncrl_cli.journal.workload import (
    EVALUATION,
    GroupSpan,
    evaluation_spans,
    first_group,
    group_spans,
    pauses_since,
    requests_since,
    rollout_lengths,
    staleness_of,
)
from asyncrl_cli.plan.costs import Costs, EngineCost, LinearIteration, Overheads, PublishCost, TrainerCost
from asyncrl_cli.plan.fit import EngineFit, Request, TrainerFit, fit_engine, fit_trainer
from asyncrl_cli.plan.lengths import GroupLengths, RolloutLength
from asyncrl_cli.records.generation import EngineRequest
from asyncrl_cli.records.groups import BufferSettings

STEPS = 30
"""The most steps that are measured: the last ones that can be."""
LEAST_STEPS = 3

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Observed:
    """What the measured steps of a run were like; the names are those of ``simulator.Outcome``."""

    steps: int
    step_s: float
    trainer: Mapping[str, float]
    engines_idle: float | None
    staleness: Counter[int]

    @property
    def mean_staleness(self) -> float:
        """In versions."""
        return sum(age * number for age, number in self.staleness.items()) / max(1, self.staleness.total())


@dataclass(frozen=True, slots=True)
class Calibration:
    """A run's lengths and costs.

    Attributes:
        engine: None where the journal has no engine requests. A simulated rollout then takes as long as the recorded
            one, whatever runs beside it.
        concurrency: the most rollouts that ran at once.
    """

    settings: BufferSettings
    groups: tuple[GroupLengths, ...]
    costs: Costs
    engine: EngineFit | None
    trainer: TrainerFit
    observed: Observed
    concurrency: int


def calibrate(connection: sqlite3.Connection, shared_host: bool) -> Calibration:
    """Measure a run. ``shared_host``: trainer and engines share processors.

    Raises ``ValueError`` when too little of it is recorded.
    """
    settings = progress(connection).settings
    spans = list(step_spans(connection, settings.publish_every))
    if not spans:
        raise ValueError("no step is trained yet")
    evaluations = joined(evaluation_spans(connection))
    chosen = _undisturbed(connection, spans, evaluations, settings)[-STEPS:]
    # The steps to which costs are fitted.
    fitted = chosen
    if evaluations:
        fitted = [span for span in _undisturbed(connection, spans, (), settings) if span.step >= chosen[0].step]
    first = first_group(connection, chosen[0].step)
    lives = list(group_spans(connection, first))
    requests = requests_since(connection, lives[0].admitted_at if lives else 0.0)
    training = [(span.taken_at, span.trained_until) for span in spans]
    groups = _lengths(connection, chosen, first, requests)
    engine = _engine(connection, requests, fitted, training, shared_host)
    trainer = fit_trainer(
        [span.trained_until - span.taken_at for span in fitted],
        [span.metrics.get("tokens/trained", 0.0) for span in fitted],
    )
    begun = {span.step: before.ended_at for before, span in pairwise(spans)}
    observed = _observed(connection, begun, chosen, engine is not None)
    beside = engine.beside_trainer if engine is not None else 0.0
    alone = _Alone(beside, observed.engines_idle or 0.0, training)
    return Calibration(
        settings,
        groups,
        Costs(
            _engine_cost(engine),
            _trainer_cost(trainer, chosen, groups, settings, beside, _busy_beside(fitted, requests)),
            _publish(chosen, alone, settings.max_staleness > 0),
            _overheads(connection, begun, chosen, requests, lives, alone),
        ),
        engine,
        trainer,
        observed,
        _most_at_once(lives, settings.group_size),
    )


def joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of the intervals: those that overlap are one, and all are sorted."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _undisturbed(
    connection: sqlite3.Connection, spans: Sequence[StepSpan], evaluations: Spans, settings: BufferSettings
) -> list[StepSpan]:
    """The steps from whose begin to whose end there was no start, checkpoint or one of these evaluations."""
    starts = [(start.at, start.at) for start in Start.read(connection)]
    saved = [(one.at - one.seconds, one.at) for one in Checkpoint.read(connection)]
    disturbed = joined([*starts, *saved, *evaluations])
    full = (settings.max_staleness + 2) * settings.publish_every  # steps until the buffer is full
    found = []
    at = 0
    for number, (before, span) in enumerate(pairwise(spans), start=1):
        begin, end = before.ended_at, span.ended_at
        while at < len(disturbed) and disturbed[at][1] < begin:
            at += 1
        if (at == len(disturbed) or disturbed[at][0] > end) and (number >= full or len(spans) < 3 * full):
            found.append(span)
    if len(found) < LEAST_STEPS:
        raise ValueError(
            f"only {len(found)} of {len(spans)} steps can be measured: the others have an evaluation, a checkpoint or "
            "a start in them"
        )
    return found


def _lengths(
    connection: sqlite3.Connection, chosen: Sequence[StepSpan], first: int, requests: Sequence[EngineRequest]
) -> tuple[GroupLengths, ...]:
    """The groups of the measured steps and those that were rejected among them, in the order of their admission."""
    steps = {span.step for span in chosen}
    served = _seconds_at_engines(requests)
    episodic = {_rollout(request) for request in requests if "/" in request.request_id}
    groups: dict[int, list[RolloutLength]] = defaultdict(list)
    rejected: set[int] = set()
    last = 0
    for one in rollout_lengths(connection, first):
        if one.step in steps:
            last = one.group_id
        elif one.state == "taken":
            continue
        else:
            rejected.add(one.group_id)
        name = f"{one.group_id}-{one.rollout_index}"
        outside = 0.0
        if name in episodic or not served:
            outside = max(0.0, one.recorded_at - one.admitted_at - served.get(name, 0.0))
        groups[one.group_id].append(RolloutLength(one.prompt_tokens, one.tokens if served else 0, outside))
    found = tuple(
        GroupLengths(tuple(rollouts), group_id in rejected) for group_id, rollouts in groups.items() if group_id <= last
    )
    if all(group.rejected for group in found):
        raise ValueError("no group of the measured steps has finished")
    return found


def _seconds_at_engines(requests: Iterable[EngineRequest]) -> dict[str, float]:
    """The seconds that each rollout was at engines."""
    seconds: dict[str, float] = defaultdict(float)
    for request in requests:
        seconds[_rollout(request)] += request.ended_at - request.begun_at
    return seconds


def _running(request: EngineRequest) -> tuple[float, float]:
    """From when to when vLLM had it; if it was lost or cancelled, from when to when its engine had it."""
    if request.running_from is None or request.running_until is None:
        return request.begun_at, request.ended_at
    return request.running_from, request.running_until


def _rollout(request: EngineRequest) -> str:
    return request.request_id.split("/", 1)[0]


def _engine(
    connection: sqlite3.Connection,
    requests: Sequence[EngineRequest],
    chosen: Sequence[StepSpan],
    training: Spans,
    shared_host: bool,
) -> EngineFit | None:
    """None where no engine requests are recorded."""
    if not requests:
        return None
    begun, over = chosen[0].taken_at, chosen[-1].ended_at
    of_engine: dict[str, list[Request]] = defaultdict(list)
    for one in requests:
        begin, end = _running(one)
        request = Request(begin, end, float(one.tokens), one.context_tokens)
        # It is known when vLLM had it, and all of its tokens.
        sound = one.running_from is not None and one.ending in ("stop", "length", "aborted") and one.tokens > 0
        sound = sound and not one.request_id.startswith(EVALUATION)
        of_engine[one.engine].append(replace(request, fitted=begun <= begin and end <= over and sound))
    pauses = pauses_since(connection, requests[0].begun_at)
    return fit_engine(
        list(of_engine.values()),
        [joined(pauses.get(engine, ())) for engine in of_engine],
        training,
        shared_host,
    )


@dataclass(frozen=True, slots=True)
class _Alone:
    """How long other work would have taken if trainer and engines had not run on its processors: the inverse of what
    the simulator does to it."""

    beside: float  # ``EngineCost.beside_trainer``; 0 where they have other processors
    idle: float  # share of their time in which engines had no request
    training: Spans

    def __call__(self, begin: float, end: float) -> float:
        """Seconds of the work from ``begin`` to ``end``."""
        if end <= begin:
            return 0.0
        trained = sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self.training if since < end)
        engines = 1 + self.beside * (1 - self.idle)
        return (end - begin - trained) / engines + trained / (engines + self.beside)


def _engine_cost(engine: EngineFit | None) -> EngineCost:
    if engine is None:
        return EngineCost(LinearIteration(0.0, 0.0))
    iteration = LinearIteration(engine.fixed_s, engine.per_sequence_s)
    return EngineCost(iteration, engine.per_context_token_s, beside_trainer=engine.beside_trainer)


def _trainer_cost(
    trainer: TrainerFit,
    chosen: Sequence[StepSpan],
    groups: Sequence[GroupLengths],
    settings: BufferSettings,
    beside: float,
    busy: float,
) -> TrainerCost:
    """``busy``: the share of the training in which engines had requests."""
    tokens = fmean(span.metrics.get("tokens/trained", 0.0) for span in chosen)
    kept = [group for group in groups if not group.rejected]
    in_batch = sum(group.tokens for group in kept) / len(kept) * settings.groups_per_step
    # The measured steps were mostly trained while engines were busy. With idle engines they would be shorter. By how
    # much is assumed to be the same as for engines: a run shows the trainer too rarely in both situations.
    alone = 1 - busy + busy / (1 + beside)
    return TrainerCost(
        trainer.per_step_s * alone,
        trainer.per_token_s * alone,
        tokens / in_batch if tokens and in_batch else 1.0,
        beside_engines=beside,
    )


def _busy_beside(chosen: Sequence[StepSpan], requests: Sequence[EngineRequest]) -> float:
    """The share of the steps' training in which an engine had a request."""
    busy = joined(map(_running, requests))
    trained = sum(span.trained_until - span.taken_at for span in chosen)
    both = sum(
        max(0.0, min(span.trained_until, end) - max(span.taken_at, begin)) for span in chosen for begin, end in busy
    )
    return both / trained if trained else 0.0


def _publish(chosen: Sequence[StepSpan], alone: _Alone, overlaps: bool) -> PublishCost:
    """Means over the measured steps that published. ``overlaps``: the trainer continues while engines load, so it was
    kept only for its own part of the publish (decision 0062)."""
    held, delivered, stalls = [], [], []
    for span in chosen:
        if span.publish is not None:
            begun, ended = span.publish.begun_at, span.publish.ended_at
            kept_s = span.ended_at - span.trained_until
            # Without the time that it waited for the last publish, which is simulated.
            own_s = kept_s - span.metrics.get("time/publish_wait_s", 0.0)
            if not overlaps:
                own_s = span.metrics.get("publish/write_s", own_s)
            free = min(begun + own_s, ended)
            held.append(alone(begun, free))
            delivered.append(alone(free, ended))
            stalls.append(span.publish.stall_s)
    if not held:
        return PublishCost()
    return PublishCost(fmean(held), fmean(delivered), min(fmean(stalls), fmean(delivered) or fmean(stalls)))


def _overheads(
    connection: sqlite3.Connection,
    begun: Mapping[int, float],
    chosen: Sequence[StepSpan],
    requests: Sequence[EngineRequest],
    lives: Sequence[GroupSpan],
    alone: _Alone,
) -> Overheads:
    """Means over the groups of the measured steps. ``begun``: when each step began, which is when the one before it
    ended."""
    ended = last_groups(connection)
    free = [
        alone(max(begun[span.step], ended.get(span.step, (None, None))[0] or 0.0), span.taken_at) for span in chosen
    ]
    first: dict[str, float] = {}  # by rollout
    last: dict[int, float] = {}
    delivered: list[float] = []
    steps = {span.step for span in chosen}
    measured = {group.group_id for group in lives if group.step in steps}
    for one in requests:
        if not one.request_id.startswith(EVALUATION):
            group = int(one.request_id.split("-", 1)[0])
            begin, end = _running(one)
            first[_rollout(one)] = min(first.get(_rollout(one), begin), begin)
            last[group] = max(last.get(group, one.ended_at), one.ended_at)
            if group in measured and "/" not in one.request_id and one.ending in ("stop", "length"):
                delivered.append(max(0.0, one.ended_at - end))
    of_steps = [group for group in lives if group.step in steps and group.group_id in last and group.ended_at]
    admitted = {group.group_id: group.admitted_at for group in of_steps}
    begins = ((int(name.split("-", 1)[0]), begin) for name, begin in first.items())
    starts = [alone(admitted[group_id], begin) for group_id, begin in begins if group_id in admitted]
    settles = [alone(last[group.group_id], group.ended_at or 0.0) for group in of_steps]
    means = (fmean(seconds) if seconds else 0.0 for seconds in (starts, settles, free, delivered))
    return Overheads(*means)


def _observed(
    connection: sqlite3.Connection, begun: Mapping[int, float], chosen: Sequence[StepSpan], with_engines: bool
) -> Observed:
    """``begun``: as in ``_overheads``. ``with_engines``: whether a simulation knows what engines do."""
    spent: defaultdict[str, float] = defaultdict(float)
    idle = idle_of = 0.0
    for span in chosen:
        spent["training"] += span.trained_until - span.taken_at
        spent["publishing"] += max(0.0, span.ended_at - span.trained_until)
        spent["waiting"] += max(0.0, span.taken_at - begun[span.step])
        if "share/engines_busy" in span.metrics:
            window = span.metrics.get("time/step_s", 1.0)
            idle += window * max(
                0.0, 1 - span.metrics["share/engines_busy"] - span.metrics.get("share/engines_paused", 0.0)
            )
            idle_of += window
    return Observed(
        steps=len(chosen),
        step_s=sum(spent.values()) / len(chosen),
        trainer=dict(spent),
        engines_idle=idle / idle_of if idle_of and with_engines else None,
        staleness=staleness_of(connection, {span.step: span.version for span in chosen}),
    )


def _most_at_once(lives: Iterable[GroupSpan], group_size: int) -> int:
    changes = []
    for group in lives:
        changes.append((group.admitted_at, 1))
        if group.ended_at is not None:
            changes.append((group.ended_at, -1))
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return max(1, most) * group_size
