"""What a run's journal says of lengths and costs, and what its steps took, to compare a simulation with.

Measured are the last steps without an evaluation, a checkpoint or a start in them, which no simulation has. Steps are
counted from 0 here, as in the journal; times are in seconds.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from asyncrl_cli.journal.events import Checkpoint, Evaluation, Start
from asyncrl_cli.journal.progress import progress
from asyncrl_cli.journal.step_timeline import HELD, StepSpan, engine_requests, last_groups, step_spans
from asyncrl_cli.plan.costs import Costs, EngineCost, LinearIteration, Overheads, PublishCost, TrainerCost
from asyncrl_cli.plan.fit import EngineFit, Request, TrainerFit, fit_engine, fit_trainer
from asyncrl_cli.plan.lengths import GroupLengths, RolloutLength
from asyncrl_cli.records.generation import EngineRequest
from asyncrl_cli.records.groups import BufferSettings

STEPS = 30
"""Steps that are measured: the last ones that can be."""
LEAST_STEPS = 3
EVALUATION = "eval"
"""What the ids of an evaluation's requests begin with."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the measured steps of a run were like; the names are those of ``simulator.Outcome``."""

    steps: int
    step_s: float
    trainer: Mapping[str, float]
    engines_idle: float | None
    staleness: Counter[int]
    trained_tokens: float

    @property
    def mean_staleness(self) -> float:
        """In versions."""
        return sum(age * number for age, number in self.staleness.items()) / max(1, self.staleness.total())


@dataclass(frozen=True, slots=True)
class Calibration:
    """A run's lengths and costs. ``engine`` is None where the journal has no engine requests: a rollout then takes as
    long as it took, whatever runs beside it."""

    settings: BufferSettings
    groups: tuple[GroupLengths, ...]
    costs: Costs
    engine: EngineFit | None
    trainer: TrainerFit
    observed: Observed
    concurrency: int  # most rollouts that ran at once


def calibrate(connection: sqlite3.Connection, shared_host: bool) -> Calibration:
    """Measure a run. ``shared_host``: trainer and engines share processors.

    Raises ``ValueError`` when too little of it is recorded.
    """
    where = progress(connection)
    spans = list(step_spans(connection, where.settings.publish_every))
    requests = list(engine_requests(connection))
    if not spans:
        raise ValueError("no step is trained yet")
    chosen = _measured(connection, spans, requests, where.settings)
    lengths = _lengths(connection, chosen, where.settings, requests)
    training = [(span.taken_at, span.trained_until) for span in spans]
    engine = _engine(connection, requests, chosen, training, shared_host)
    tokens = [span.metrics.get("tokens/trained", 0.0) for span in chosen]
    trainer = fit_trainer([span.trained_until - span.taken_at for span in chosen], tokens)
    observed = _observed(connection, spans, chosen)
    in_batches = sum(group.tokens for group in lengths if not group.rejected)
    batches = sum(not group.rejected for group in lengths) / where.settings.groups_per_step
    trained_share = fmean(tokens) / (in_batches / batches) if in_batches and any(tokens) else 1.0
    beside = engine.beside_trainer if engine is not None else 0.0
    idle = observed.engines_idle or 0.0
    alone = idle + (1 - idle) / (1 + beside)
    costs = Costs(
        EngineCost(LinearIteration(1e-9, 0.0))
        if engine is None
        else EngineCost(
            LinearIteration(engine.fixed_s, engine.per_sequence_s), engine.per_context_token_s, beside_trainer=beside
        ),
        # What is measured is mostly beside busy engines. Alone it would be shorter, by as much as engines are alone:
        # an assumption, as a run shows the trainer in both situations too rarely.
        TrainerCost(trainer.per_step_s * alone, trainer.per_token_s * alone, trained_share, beside_engines=beside),
        _publish(chosen),
        _overheads(connection, spans, chosen, requests),
    )
    return Calibration(
        where.settings, lengths, costs, engine, trainer, observed, _most_at_once(connection, where.settings.group_size)
    )


def _measured(
    connection: sqlite3.Connection,
    spans: Sequence[StepSpan],
    requests: Sequence[EngineRequest],
    settings: BufferSettings,
) -> list[StepSpan]:
    """The last steps in whose windows nothing was that a simulation does not have."""
    disturbed = [(start.at, start.at) for start in Start.read(connection)]
    disturbed += [(saved.at - saved.seconds, saved.at) for saved in Checkpoint.read(connection)]
    of_evaluations = [one for one in requests if one.request_id.startswith(EVALUATION)]
    disturbed += [(one.begun_at, one.ended_at) for one in of_evaluations]
    disturbed = _joined(disturbed)
    full = (settings.max_staleness + 2) * settings.publish_every  # steps until the buffer is full
    found = []
    at = 0
    for number, (before, span) in enumerate(pairwise(spans)):
        begin, end = before.ended_at, span.ended_at
        while at < len(disturbed) and disturbed[at][1] < begin:
            at += 1
        if (at == len(disturbed) or disturbed[at][0] > end) and (number + 1 >= full or len(spans) < 3 * full):
            found.append(span)
    if len(found) < LEAST_STEPS:
        raise ValueError(
            f"only {len(found)} steps can be measured: of {len(spans)}, the others have an evaluation, a checkpoint or "
            "a start in them"
        )
    return found[-STEPS:]


def _joined(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _lengths(
    connection: sqlite3.Connection,
    chosen: Sequence[StepSpan],
    settings: BufferSettings,
    requests: Sequence[EngineRequest],
) -> tuple[GroupLengths, ...]:
    """The groups of the measured steps and those that were rejected among them, in the order of their admission."""
    steps = {span.step for span in chosen}
    rows = connection.execute(
        "SELECT g.id, g.state, g.step, length(g.prompt_ids) / 4, g.admitted_at, r.tokens, r.recorded_at "
        "FROM groups g JOIN rollouts r ON r.group_id = g.id WHERE g.state IN ('taken', 'rejected') "
        "ORDER BY g.id, r.rollout_index"
    )
    served: dict[str, float] = defaultdict(float)  # seconds that engines had a rollout
    for request in requests:
        served[request.request_id.split("/", 1)[0]] += request.ended_at - request.begun_at
    episodic = {request.request_id.split("/", 1)[0] for request in requests if "/" in request.request_id}
    groups: dict[int, list[RolloutLength]] = {}
    rejected: set[int] = set()
    first = last = None
    for group_id, state, step, prompt, admitted_at, tokens, recorded_at in rows:
        if step in steps:
            first, last = (group_id if first is None else first), group_id
        elif state == "taken":
            continue
        if state == "rejected":
            rejected.add(group_id)
        name = f"{group_id}-{len(groups.get(group_id, ()))}"
        outside = max(0.0, recorded_at - admitted_at - served.get(name, 0.0)) if name in episodic or not served else 0.0
        groups.setdefault(group_id, []).append(RolloutLength(prompt, tokens if served else 0, outside))
    if first is None or last is None:
        raise ValueError("no group has finished")
    return tuple(
        GroupLengths(tuple(rollouts), group_id in rejected)
        for group_id, rollouts in groups.items()
        if first <= group_id <= last
    )


def _engine(
    connection: sqlite3.Connection,
    requests: Sequence[EngineRequest],
    chosen: Sequence[StepSpan],
    training: Sequence[tuple[float, float]],
    shared_host: bool,
) -> EngineFit | None:
    """None where no engine requests are recorded."""
    if not requests:
        return None
    evaluated = [evaluation.mean_length for evaluation in Evaluation.read(connection)]
    of_rollout = {
        f"{group_id}-{index}": (tokens, prompt)
        for group_id, index, tokens, prompt in connection.execute(
            "SELECT r.group_id, r.rollout_index, r.tokens, length(g.prompt_ids) / 4 "
            "FROM rollouts r JOIN groups g ON g.id = r.group_id"
        )
    }
    total: dict[str, float] = defaultdict(float)
    for request in requests:
        total[request.request_id.split("/", 1)[0]] += request.ended_at - request.begun_at
    begun, over = chosen[0].taken_at - 1.0, chosen[-1].ended_at
    of_engine: dict[str, list[Request]] = defaultdict(list)
    wanted: dict[str, list[bool]] = defaultdict(list)
    evaluations = _joined([(one.begun_at, one.ended_at) for one in requests if one.request_id.startswith(EVALUATION)])
    for one in requests:
        name = one.request_id.split("/", 1)[0]
        tokens, prompt = of_rollout.get(name, (fmean(evaluated) if evaluated else 0.0, 0))
        lasting = one.ended_at - one.begun_at
        of_engine[one.engine].append(
            Request(one.begun_at, one.ended_at, tokens * lasting / (total[name] or 1.0), prompt)
        )
        alone = not any(begin < one.ended_at and one.begun_at < end for begin, end in evaluations)
        wanted[one.engine].append(begun <= one.begun_at and one.ended_at <= over and alone and name in of_rollout)
    stalls = [
        (at - stall_s, at) for at, stall_s in connection.execute("SELECT at, stall_s FROM publishes WHERE stall_s > 0")
    ]
    engines = sorted(of_engine)
    return fit_engine(
        [of_engine[engine] for engine in engines],
        [wanted[engine] for engine in engines],
        _joined(stalls),
        training,
        shared_host,
    )


def _publish(chosen: Sequence[StepSpan]) -> PublishCost:
    """Means over the measured steps that published. Earlier releases waited for all of a publish (decision 0062)."""
    published = [span for span in chosen if span.publish is not None]
    if not published:
        return PublishCost()
    seconds, stalls, held = [], [], []
    for span in published:
        assert span.publish is not None
        whole = span.publish.ended_at - span.publish.begun_at
        seconds.append(whole)
        stalls.append(span.publish.stall_s)
        held.append(min(whole, span.metrics.get("publish/write_s") or span.metrics.get(HELD, whole)))
    return PublishCost(fmean(held), max(0.0, fmean(seconds) - fmean(held)), fmean(stalls))


def _overheads(
    connection: sqlite3.Connection,
    spans: Sequence[StepSpan],
    chosen: Sequence[StepSpan],
    requests: Sequence[EngineRequest],
) -> Overheads:
    ended = last_groups(connection)
    before = {span.step: earlier.ended_at for earlier, span in pairwise(spans)}
    free = []
    for span in chosen:
        complete = max(before[span.step], ended.get(span.step, (None, None))[0] or 0.0)
        free.append(max(0.0, span.taken_at - complete))
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for one in requests:
        if not one.request_id.startswith(EVALUATION):
            group = int(one.request_id.split("-", 1)[0])
            first[group] = min(first.get(group, one.begun_at), one.begun_at)
            last[group] = max(last.get(group, one.ended_at), one.ended_at)
    steps = {span.step for span in chosen}
    starts, settles = [], []
    for group, step, admitted_at, ended_at in connection.execute(
        "SELECT id, step, admitted_at, ended_at FROM groups WHERE ended_at IS NOT NULL AND state = 'taken'"
    ):
        if step in steps and group in first:
            starts.append(max(0.0, first[group] - admitted_at))
            settles.append(max(0.0, ended_at - last[group]))
    return Overheads(fmean(starts) if starts else 0.0, fmean(settles) if settles else 0.0, fmean(free))


def _observed(connection: sqlite3.Connection, spans: Sequence[StepSpan], chosen: Sequence[StepSpan]) -> Observed:
    before = {span.step: earlier.ended_at for earlier, span in pairwise(spans)}
    spent: defaultdict[str, float] = defaultdict(float)
    for span in chosen:
        spent["training"] += span.trained_until - span.taken_at
        spent["publishing"] += max(0.0, span.ended_at - span.trained_until)
        spent["waiting"] += max(0.0, span.taken_at - before[span.step])
    seconds = sum(spent.values())
    idle = [
        (
            1 - span.metrics["share/engines_busy"] - span.metrics.get("share/engines_paused", 0.0),
            span.metrics["time/step_s"],
        )
        for span in chosen
        if "share/engines_busy" in span.metrics
    ]
    steps = {span.step: span.version for span in chosen}
    staleness = Counter(
        steps[step] - version
        for step, version in connection.execute("SELECT step, version FROM groups WHERE step IS NOT NULL")
        if step in steps
    )
    (tokens,) = connection.execute(
        "SELECT coalesce(sum(r.tokens), 0) FROM rollouts r JOIN groups g ON g.id = r.group_id "
        f"WHERE g.step IN ({', '.join(map(str, steps))})"
    ).fetchone()
    weight = sum(window for _, window in idle)
    return Observed(
        steps=len(chosen),
        step_s=seconds / len(chosen),
        trainer=dict(spent),
        engines_idle=sum(max(0.0, share) * window for share, window in idle) / weight if weight else None,
        staleness=staleness,
        trained_tokens=tokens / (seconds or 1.0),
    )


def _most_at_once(connection: sqlite3.Connection, group_size: int) -> int:
    running = most = 0
    changes = []
    for admitted_at, ended_at in connection.execute("SELECT admitted_at, ended_at FROM groups"):
        changes.append((admitted_at, 1))
        if ended_at is not None:
            changes.append((ended_at, -1))
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return max(1, most) * group_size
