"""How long the trainer would have waited with another staleness bound: the run once more, event by event.

The real ``Ledger`` decides what is admitted and what a batch takes; the recorded times give the durations of
groups and steps. So the simulation has no rules of its own, and its assumptions are about times alone:

* a group takes as long as the recorded group with its admission index, under whichever version, and is rejected if
  that one was; after the record's end, the record is repeated;
* as many groups run at once as ever did;
* training, publishing and checkpoints take as long as they did, step by step; what follows the trainer's own part of
  a publish happens beside its next batch, where the ledger has one.

How fast engines are when another number of groups runs at once is not recorded. Two assumptions enclose it
(``Engines``): with ``spare`` capacity a group takes as long as it did, whatever runs beside it; ``saturated`` engines
do no more work in a second than they did, and the groups that run share it evenly. Neither is a proven limit.

Simulating the recorded bound as well shows how far that is from what happened. Pure: no clock, no I/O. Times are in
seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from statistics import median
from typing import Literal, get_args

from asyncrl_cli.buffer.batches import Batch
from asyncrl_cli.buffer.ledger import Ledger
from asyncrl_cli.journal.step_timeline import BatchTimes, Recording
from asyncrl_cli.records.groups import BufferSettings

# -- what the simulation goes by


Engines = Literal["spare", "saturated"]
"""What is assumed of the engines (module docstring)."""
ENGINES: tuple[Engines, ...] = get_args(Engines)


@dataclass(frozen=True, slots=True)
class Attempt:
    """How long a group runs, and whether it is rejected then. ``work_s`` is its part of the engines' time: what they
    would have taken for this group alone, if groups that run at once share the engines evenly."""

    seconds: float
    rejected: bool = False
    work_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """What a step takes: training, the trainer's part of publishing, and what else keeps it from asking for the next
    batch. ``deliver_s``: how long it takes then until all engines serve the version."""

    train_s: float
    publish_s: float = 0.0
    other_s: float = 0.0
    deliver_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Durations in order, the groups that run at once, and how long the trainer waited in the record."""

    settings: BufferSettings
    attempts: Sequence[Attempt]
    steps: Sequence[Step]
    concurrency: int
    waited_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated run: its bound, how long the trainer waited for batches, how long all of it took, and how stale the
    groups were that it trained (versions)."""

    max_staleness: int
    waited_s: float
    seconds: float
    mean_staleness: float
    most_staleness: int


def newest(recording: Recording, groups: int) -> Recording:
    """The newest steps of a long run, as many as so many ``groups`` fill, as if the run had begun with them."""
    steps = max(1, groups // recording.settings.groups_per_step)
    if steps >= len(recording.batches):
        return recording
    begun = recording.batches[-steps - 1].taken_at
    return replace(
        recording,
        settings=replace(recording.settings, total_steps=steps),
        groups=[group for group in recording.groups if group.admitted_at >= begun],
        batches=recording.batches[-steps:],
    )


def workload(recording: Recording) -> Workload:
    """The durations of a record. The time during which the run was not alive is excluded.

    A group that still runs counts as if it took as long as the median group, or as it did so far if that is longer.
    Raises ``ValueError`` without a trained batch, and without a finished group.
    """
    if not recording.batches:
        raise ValueError("no step is trained yet")
    if all(group.ended_at is None or group.rejected for group in recording.groups):
        raise ValueError("no group has finished")
    up = _uptime(recording)
    signs = [group.ended_at or group.admitted_at for group in recording.groups]
    last = max(*signs, recording.batches[-1].trained_at)
    spans = [(up(group.admitted_at), up(group.ended_at or last)) for group in recording.groups]
    typical = median(
        end - begin for (begin, end), group in zip(spans, recording.groups, strict=True) if group.ended_at is not None
    )
    works = _works(spans)
    typical_work = median(
        work for work, group in zip(works, recording.groups, strict=True) if group.ended_at is not None
    )
    attempts = [
        Attempt(end - begin, group.rejected, work)
        if group.ended_at is not None
        else Attempt(max(typical, end - begin), group.rejected, max(typical_work, work))
        for (begin, end), work, group in zip(spans, works, recording.groups, strict=True)
    ]
    begun = spans[0][0]
    steps: list[Step] = []
    waited = 0.0
    ready = begun  # when the trainer asks for the next batch
    for at, batch in enumerate(recording.batches):
        taken = up(batch.taken_at)
        gap = max(0.0, taken - ready)
        if at and _any_between(recording.starts, recording.batches[at - 1].trained_at, batch.taken_at):
            # After a restart the trainer catches up first: it is not waiting for groups.
            steps[-1] = replace(steps[-1], other_s=steps[-1].other_s + gap)
        elif at:
            saving = min(recording.batches[at - 1].save_s, gap)
            steps[-1] = replace(steps[-1], other_s=steps[-1].other_s + saving)
            waited += gap - saving
        else:
            waited += gap
        steps.append(_step(batch, up))
        ready = taken + steps[-1].train_s + steps[-1].publish_s + steps[-1].other_s
    return Workload(recording.settings, attempts, steps, _most_at_once(spans), waited, ready - begun)


def simulate(work: Workload, max_staleness: int, engines: Engines = "spare") -> Outcome:
    """The same work under a bound of ``max_staleness`` versions."""
    return _Simulation(work, max_staleness, engines).run()


def times_relative(work: Workload, bounds: Iterable[int]) -> dict[int, tuple[float, float]]:
    """For each of these bounds the run's time, divided by its time under the recorded one: the lowest and the highest
    of what the assumptions on engines give."""
    base = {engines: simulate(work, work.settings.max_staleness, engines).seconds or 1.0 for engines in ENGINES}
    ratios = {
        bound: [simulate(work, bound, engines).seconds / base[engines] for engines in ENGINES] for bound in bounds
    }
    return {bound: (min(both), max(both)) for bound, both in ratios.items()}


class _Simulation:
    """A clock, the groups that run (earliest end first), and the ledger.

    Groups end by the progress that each of them makes. It goes with the clock where engines have capacity to spare, and
    is divided among the groups that run where they have none.
    """

    def __init__(self, work: Workload, max_staleness: int, engines: Engines) -> None:
        self._work = work
        self._shared = engines == "saturated"
        self._progress = 0.0
        self._ledger = Ledger(replace(work.settings, max_staleness=max_staleness))
        self._now = 0.0
        self._started = 0
        self._ends: list[tuple[float, int, bool]] = []
        self._running: set[int] = set()  # without those that were requeued
        self._served_at: float | None = None  # when the publish in flight ends

    def run(self) -> Outcome:
        waited = 0.0
        staleness: list[int] = []
        self._fill()
        for step in self._work.steps:
            asked = self._now
            batch = self._next_batch()
            waited += self._now - asked
            staleness += batch.staleness
            self._ledger.take(batch)
            self._fill()
            self._pass(step.train_s)
            if self._ledger.step % self._ledger.settings.publish_every == 0:
                if self._served_at is not None:
                    self._pass(self._served_at - self._now)
                self._pass(step.publish_s)
                self._served_at = self._now + step.deliver_s
                self._pass(0.0)
            self._pass(step.other_s)
        if self._served_at is not None:
            self._pass(self._served_at - self._now)
        return Outcome(
            self._ledger.settings.max_staleness, waited, self._now, sum(staleness) / len(staleness), max(staleness)
        )

    def _next_batch(self) -> Batch:
        while not isinstance(upcoming := self._ledger.next_batch(), Batch):
            overdue = self._ledger.overdue()
            for group_id in overdue:
                self._running.discard(group_id)
                self._start(self._ledger.requeue(group_id).group_id)
            if not overdue:
                self._next_event()
        return upcoming

    def _pass(self, seconds: float) -> None:
        """Let time go by, with all that ends meanwhile."""
        until = self._now + seconds
        while self._next_at() <= until:
            self._next_event()
        self._progress += (until - self._now) / self._slowdown()
        self._now = until

    def _slowdown(self) -> int:
        return max(1, len(self._running)) if self._shared else 1

    def _time_of(self, progress: float) -> float:
        return self._now + (progress - self._progress) * self._slowdown()

    def _next_at(self) -> float:
        ends = self._time_of(self._ends[0][0]) if self._ends else inf
        return ends if self._served_at is None else min(ends, self._served_at)

    def _next_event(self) -> None:
        if self._served_at is None or self._next_at() < self._served_at:
            self._end_first()
            return
        self._progress += (self._served_at - self._now) / self._slowdown()
        self._now, self._served_at = self._served_at, None
        self._ledger.publish()
        self._fill()

    def _end_first(self) -> None:
        end, group_id, rejected = heappop(self._ends)
        if group_id not in self._running:
            return
        self._now, self._progress = self._time_of(end), end
        self._running.remove(group_id)
        if rejected:
            self._ledger.reject(group_id, "rejected")
        else:
            self._ledger.finish(group_id)
        self._fill()

    def _fill(self) -> None:
        while self._ledger.room() and len(self._running) < self._work.concurrency:
            self._start(self._ledger.admit().group_id)

    def _start(self, group_id: int) -> None:
        attempt = self._work.attempts[self._started % len(self._work.attempts)]
        self._started += 1
        self._running.add(group_id)
        needed = attempt.work_s if self._shared else attempt.seconds
        heappush(self._ends, (self._progress + needed, group_id, attempt.rejected))


# -- from times to durations


def _step(batch: BatchTimes, up: Callable[[float], float]) -> Step:
    """``trained`` may be recorded before or after ``published``; the time between is in ``other_s``."""
    taken, trained = up(batch.taken_at), up(batch.trained_at)
    if batch.held_s is not None:
        held = min(batch.held_s, trained - taken)
        delivered = trained if batch.published_at is None else up(batch.published_at)
        return Step(trained - taken - held, held, deliver_s=max(0.0, delivered - trained))
    if batch.published_at is None or up(batch.published_at) > trained:
        return Step(trained - taken, batch.publish_s)
    published = up(batch.published_at)
    training = max(0.0, published - batch.publish_s - taken)
    return Step(training, min(batch.publish_s, trained - taken), trained - published)


def _uptime(recording: Recording) -> Callable[[float], float]:
    """Unix time to time without the gaps round each start after the first, from the last sign of life to the next."""
    gaps: list[tuple[float, float]] = []
    for start in recording.starts[1:]:
        at = bisect_left(recording.moments, start)
        if 0 < at < len(recording.moments):
            gaps.append((recording.moments[at - 1], recording.moments[at]))
    gaps = sorted(set(gaps))

    def up(moment: float) -> float:
        return moment - sum(min(end, moment) - begin for begin, end in gaps if begin < moment)

    return up


def _any_between(moments: Sequence[float], begin: float, end: float) -> bool:
    return any(begin < moment < end for moment in moments)


def _works(spans: Sequence[tuple[float, float]]) -> list[float]:
    """The integral of 1 / (spans that hold) over each span."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    shared = {changes[0][0]: 0.0}  # the integral up to each change
    running, total = 0, 0.0
    for (at, change), (following, _) in pairwise(changes):
        running += change
        total += (following - at) / running if running else 0.0
        shared[following] = total
    return [shared[end] - shared[begin] for begin, end in spans]


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans that hold at one moment, at least 1; one that ends where another begins is over."""
    running, most = 0, 1  # spans may all have no length
    for _, change in sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]):
        running += change
        most = max(most, running)
    return most
