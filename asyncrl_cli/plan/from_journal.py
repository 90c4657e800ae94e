"""Measures a run's lengths and costs from its journal, and the steps for comparison with a simulation.

These are the last steps without an evaluation, a checkpoint or a start, because a simulation has none. Costs are also
fitted to steps with an evaluation, because its requests are ordinary work of the engines. Steps are counted from 0
here, as in the journal; times are in seconds.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from asyncrl_cli.journal.history import (
    StepSpan,
    checkpoints,
    engine_requests,
    evaluation_spans,
    first_group,
    group_spans,
    last_scores,
    pauses_since,
    rollout_times,
    staleness_of,
    starts,
    step_spans,
)
from asyncrl_cli.journal.progress import progress
from asyncrl_cli.plan.costs import Costs, EngineCost, Overheads, PublishCost, TrainerCost
from asyncrl_cli.plan.fit import EngineFit, RequestTiming, TrainerFit, fit_engine, fit_trainer
from asyncrl_cli.plan.lengths import GroupLengths, RolloutLength
from asyncrl_cli.records.generation import EVALUATION, EngineRequest
from asyncrl_cli.records.groups import BufferSettings

STEPS = 30
"""Largest number of measured steps; the last suitable steps are used."""
LEAST_STEPS = 3

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Observed:
    """The measured steps of a run, with the names of ``simulator.Outcome``."""

    steps: int
    step_s: float
    trainer: Mapping[str, float]
    engines_idle: float | None
    staleness: Counter[int]


@dataclass(frozen=True, slots=True)
class Calibration:
    """A run's lengths and costs."""

    settings: BufferSettings
    groups: tuple[GroupLengths, ...]
    costs: Costs
    # None if the journal has no engine requests. A simulated rollout then takes as long as it took in the run.
    engine: EngineFit | None
    trainer: TrainerFit
    observed: Observed
    concurrency: int  # largest number of rollouts that ran at the same time


def calibrate(connection: sqlite3.Connection, shared_host: bool) -> Calibration:
    """Measure a run. ``shared_host``: trainer and engines share processors.

    Raises ``ValueError`` if the journal has too few steps.
    """
    return _Measurement(connection).calibration(shared_host)


def joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of the intervals, sorted. Overlapping intervals become one."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


class _Measurement:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._settings = progress(connection).settings
        self._spans = list(step_spans(connection, self._settings.publish_every))
        if not self._spans:
            raise ValueError("no step is trained yet")
        evaluations = joined(evaluation_spans(connection))
        self._measured_steps = self._undisturbed(evaluations)[-STEPS:]
        self._fitted = self._measured_steps  # costs are fitted to these steps
        if evaluations:
            self._fitted = [span for span in self._undisturbed(()) if span.step >= self._measured_steps[0].step]
        self._first_group = first_group(connection, self._measured_steps[0].step)
        self._lives = list(group_spans(connection, self._first_group))
        self._requests = list(engine_requests(connection, self._lives[0].admitted_at if self._lives else 0.0))
        self._steps = {span.step for span in self._measured_steps}
        self._step_starts = {span.step: previous.free_at for previous, span in pairwise(self._spans)}
        self._training = [(span.batch_taken_at, span.trained_until) for span in self._spans]

    def calibration(self, shared_host: bool) -> Calibration:
        groups = self._lengths()
        engine = self._engine(shared_host) if self._requests else None
        trainer = fit_trainer(
            [span.trained_until - span.batch_taken_at for span in self._fitted],
            [span.metrics.get("tokens/trained", 0.0) for span in self._fitted],
        )
        observed = self._observed(with_engines=engine is not None)
        beside = engine.beside_trainer if engine is not None else 0.0
        alone = _Alone(beside, observed.engines_idle or 0.0, self._training)
        engine_cost = EngineCost(0.0, 0.0)
        if engine is not None:
            engine_cost = EngineCost(engine.fixed_s, engine.per_sequence_s, engine.per_context_token_s, beside)
        return Calibration(
            settings=self._settings,
            groups=groups,
            costs=Costs(
                engine=engine_cost,
                trainer=self._trainer_cost(trainer, groups, beside),
                publish=self._publish(alone),
                overheads=self._overheads(alone),
            ),
            engine=engine,
            trainer=trainer,
            observed=observed,
            concurrency=self._most_groups_at_once() * self._settings.group_size,
        )

    def _undisturbed(self, evaluations: Spans) -> list[StepSpan]:
        """The steps without a start, a checkpoint's stall or one of these evaluations."""
        settings, spans = self._settings, self._spans
        process_starts = [(start.at, start.at) for start in starts(self._connection)]
        save_starts = [(save.at - save.seconds, save.stall_s) for save in checkpoints(self._connection)]
        saved = [(start, start + stall_s) for start, stall_s in save_starts]
        disturbed = joined([*process_starts, *saved, *evaluations])
        filling_steps = (settings.max_staleness + 2) * settings.publish_every  # steps until the buffer is full
        undisturbed_steps = []
        disturbance_index = 0
        for step_count, (previous, span) in enumerate(pairwise(spans), start=1):
            while disturbance_index < len(disturbed) and disturbed[disturbance_index][1] < previous.free_at:
                disturbance_index += 1
            is_undisturbed = disturbance_index == len(disturbed) or disturbed[disturbance_index][0] > span.free_at
            if is_undisturbed and (step_count >= filling_steps or len(spans) < 3 * filling_steps):
                undisturbed_steps.append(span)
        if len(undisturbed_steps) < LEAST_STEPS:
            raise ValueError(
                f"only {len(undisturbed_steps)} of {len(spans)} steps can be measured: an evaluation, a checkpoint or "
                "a start disturbed the others"
            )
        return undisturbed_steps

    def _lengths(self) -> tuple[GroupLengths, ...]:
        """The groups of the measured steps, and groups rejected in between, in the order of their admission."""
        served: dict[str, float] = defaultdict(float)  # seconds that a rollout spent on engines
        for request in self._requests:
            served[_rollout(request)] += request.ended_at - request.begun_at
        episodic = {_rollout(request) for request in self._requests if "/" in request.request_id}
        groups: dict[int, list[RolloutLength]] = defaultdict(list)
        rejected: set[int] = set()
        last_group_id = 0
        for rollout in rollout_times(self._connection, self._first_group):
            if rollout.step in self._steps:
                last_group_id = rollout.group_id
            elif rollout.state == "rejected":
                rejected.add(rollout.group_id)
            else:
                continue
            name = f"{rollout.group_id}-{rollout.rollout_index}"
            outside = 0.0
            if name in episodic or not served:
                outside = max(0.0, rollout.recorded_at - rollout.admitted_at - served.get(name, 0.0))
            groups[rollout.group_id].append(
                RolloutLength(rollout.prompt_tokens, rollout.tokens if served else 0, outside)
            )
        groups_in_order = tuple(
            GroupLengths(tuple(rollouts), group_id in rejected)
            for group_id, rollouts in groups.items()
            if group_id <= last_group_id
        )
        if all(group.rejected for group in groups_in_order):
            raise ValueError("no group of the measured steps has finished")
        return groups_in_order

    def _engine(self, shared_host: bool) -> EngineFit:
        first_time, last_time = self._fitted[0].batch_taken_at, self._fitted[-1].free_at
        requests_by_engine: dict[str, list[RequestTiming]] = defaultdict(list)
        for record in self._requests:
            begin, end = _running(record)
            # Fit only requests with known times in vLLM and all tokens known.
            is_fitted = (
                record.running_from is not None and record.ending in ("stop", "length", "aborted") and record.tokens > 0
            )
            is_fitted = (
                is_fitted and not record.request_id.startswith(EVALUATION) and first_time <= begin and end <= last_time
            )
            request = RequestTiming(
                begin, end, tokens=float(record.tokens), prompt=record.context_tokens, fitted=is_fitted
            )
            requests_by_engine[record.engine].append(request)
        pauses = pauses_since(self._connection, self._requests[0].begun_at)
        stalls = [joined(pauses.get(engine, ())) for engine in requests_by_engine]
        return fit_engine(list(requests_by_engine.values()), stalls, training=self._training, shared_host=shared_host)

    def _trainer_cost(self, trainer: TrainerFit, groups: Sequence[GroupLengths], beside: float) -> TrainerCost:
        tokens = fmean(span.metrics.get("tokens/trained", 0.0) for span in self._measured_steps)
        finished_groups = [group for group in groups if not group.rejected]
        in_batch = (
            sum(group.tokens for group in finished_groups) / len(finished_groups) * self._settings.groups_per_step
        )
        busy = joined(map(_running, self._requests))
        training_s = sum(span.trained_until - span.batch_taken_at for span in self._fitted)
        overlap_s = sum(_overlap((span.batch_taken_at, span.trained_until), busy) for span in self._fitted)
        share = (
            overlap_s / training_s if training_s else 0.0
        )  # share of the training time during which engines had requests
        # The measured steps were mostly trained while engines were busy. With idle engines they would be shorter. The
        # difference is assumed to be the same as for engines, because a run rarely shows the trainer in both states.
        alone = 1 - share + share / (1 + beside)
        return TrainerCost(
            per_step_s=trainer.per_step_s * alone,
            per_token_s=trainer.per_token_s * alone,
            trained_share=tokens / in_batch if tokens and in_batch else 1.0,
            beside_engines=beside,
        )

    def _publish(self, alone: _Alone) -> PublishCost:
        """Means over the measured steps that published. With staleness, the trainer continues while engines load, so
        only its own part of the publish counts for it (decision 0038)."""
        held_s, delivered, stalls = [], [], []
        for span in self._measured_steps:
            if span.publish is not None:
                publish_start, publish_end = span.publish.started_at, span.publish.finished_at
                # Without the wait for the previous publish, because that wait is simulated.
                own_s = span.free_at - span.trained_until - span.metrics.get("time/publish_wait_s", 0.0)
                if not self._settings.max_staleness:
                    own_s = span.metrics.get("publish/write_s", own_s)
                trainer_free_at = min(publish_start + own_s, publish_end)
                held_s.append(alone(publish_start, trainer_free_at))
                delivered.append(alone(trainer_free_at, publish_end))
                stalls.append(span.publish.stall_s)
        if not held_s:
            return PublishCost()
        return PublishCost(fmean(held_s), fmean(delivered), min(fmean(stalls), fmean(delivered) or fmean(stalls)))

    def _overheads(self, alone: _Alone) -> Overheads:
        last_scored = last_scores(self._connection)
        between_steps = [
            alone(max(self._step_starts[span.step], last_scored.get(span.step) or 0.0), span.batch_taken_at)
            for span in self._measured_steps
        ]
        first_starts: dict[str, float] = {}  # by rollout
        last_ends: dict[int, float] = {}
        delivered: list[float] = []
        measured_groups = {group.group_id for group in self._lives if group.step in self._steps}
        for request in self._requests:
            if not request.request_id.startswith(EVALUATION):
                group = int(request.request_id.split("-", 1)[0])
                begin, end = _running(request)
                first_starts[_rollout(request)] = min(first_starts.get(_rollout(request), begin), begin)
                last_ends[group] = max(last_ends.get(group, request.ended_at), request.ended_at)
                if group in measured_groups and "/" not in request.request_id and request.ending in ("stop", "length"):
                    delivered.append(max(0.0, request.ended_at - end))
        of_steps = [
            request
            for request in self._lives
            if request.group_id in measured_groups and request.group_id in last_ends and request.finished_at
        ]
        admitted = {group.group_id: group.admitted_at for group in of_steps}
        begins = ((int(name.split("-", 1)[0]), begin) for name, begin in first_starts.items())
        starts = [alone(admitted[group_id], begin) for group_id, begin in begins if group_id in admitted]
        settles = [alone(last_ends[group.group_id], group.finished_at or 0.0) for group in of_steps]
        return Overheads(
            start_s=_mean(starts), settle_s=_mean(settles), step_s=_mean(between_steps), deliver_s=_mean(delivered)
        )

    def _observed(self, with_engines: bool) -> Observed:
        """``with_engines``: the simulation models the engines' work."""
        spent: defaultdict[str, float] = defaultdict(float)
        idle = idle_of = 0.0
        for span in self._measured_steps:
            spent["training"] += span.trained_until - span.batch_taken_at
            spent["publishing"] += max(0.0, span.free_at - span.trained_until)
            spent["waiting"] += max(0.0, span.batch_taken_at - self._step_starts[span.step])
            if "share/engines_busy" in span.metrics:
                window = span.metrics.get("time/step_s", 1.0)
                paused = span.metrics.get("share/engines_paused", 0.0)
                idle += window * max(0.0, 1 - span.metrics["share/engines_busy"] - paused)
                idle_of += window
        return Observed(
            steps=len(self._measured_steps),
            step_s=sum(spent.values()) / len(self._measured_steps),
            trainer=dict(spent),
            engines_idle=idle / idle_of if idle_of and with_engines else None,
            staleness=staleness_of(self._connection, {span.step: span.version for span in self._measured_steps}),
        )

    def _most_groups_at_once(self) -> int:
        changes = [(group.admitted_at, 1) for group in self._lives]
        changes += [(group.finished_at, -1) for group in self._lives if group.finished_at is not None]
        return max([1, *accumulate(change for _, change in sorted(changes))])


def _running(request: EngineRequest) -> tuple[float, float]:
    """The request's begin and end in vLLM; if it was lost or cancelled, its begin and end on the engine."""
    if request.running_from is None or request.running_until is None:
        return request.begun_at, request.ended_at
    return request.running_from, request.running_until


def _rollout(request: EngineRequest) -> str:
    return request.request_id.split("/", 1)[0]


def _mean(seconds: Sequence[float]) -> float:
    return fmean(seconds) if seconds else 0.0


def _overlap(span: tuple[float, float], other_spans: Spans) -> float:
    """Seconds of the span that are in the other spans, which do not overlap each other."""
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in other_spans if begin < span[1])


@dataclass(frozen=True, slots=True)
class _Alone:
    """Estimates the duration of other work without trainer and engines on the same processors: the inverse of the
    simulator's contention."""

    beside: float  # ``EngineCost.beside_trainer``; 0 if they have other processors
    idle: float  # share of the time during which engines had no request
    training: Spans

    def __call__(self, begin: float, end: float) -> float:
        if end <= begin:
            return 0.0
        trained = _overlap((begin, end), self.training)
        engines = 1 + self.beside * (1 - self.idle)
        return (end - begin - trained) / engines + trained / (engines + self.beside)
