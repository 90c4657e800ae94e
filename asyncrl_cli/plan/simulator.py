"""Simulates a run, event by event. The real ``Ledger`` decides about admissions and batches, and costs give the times.

``asyncrl plan`` and the report's advice call ``simulate``. It follows the
orchestrator's rules: groups start while the ledger has room and engines have places. A batch is taken and trained, and
a version is written if one is due. Engines load it while the trainer takes its next batch, with at most one publish in
flight (decision 0038). Evaluations, checkpoints and faults are not simulated. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from operator import attrgetter
from typing import Literal

from asyncrl_cli.journal.ledger import Batch, Ledger
from asyncrl_cli.plan.costs import Costs
from asyncrl_cli.plan.engine_model import Sequence, SimulatedEngine
from asyncrl_cli.plan.lengths import Groups
from asyncrl_cli.records.groups import BufferSettings

SLICES = 4
"""Number of parts of work that trainer and engines slow down, because they may start or end between two parts."""

WeightUpdate = Literal["keep", "recompute", "drain"]


@dataclass(frozen=True, slots=True)
class Scenario:
    settings: BufferSettings  # for the ledger; ``total_steps`` is replaced by the number of simulated steps
    groups: Groups
    costs: Costs
    engines: int = 1
    slots: int = 256  # sequences that an engine runs in parallel
    weight_update: WeightUpdate = "keep"
    partial_rollouts: bool = False  # engines stop when a batch is complete, and continue with the new weights


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The simulated steps, without the first ones, which fill the buffer."""

    steps: int
    step_s: float  # mean seconds of a step
    # The trainer's seconds by activity: ``training``, ``publishing`` (its own part), ``other``; or by the reason of a
    # wait: ``groups`` (fewer had finished than a batch needs), ``missing`` (groups that were due), ``publish`` (engines
    # were loading).
    trainer: dict[str, float]
    engines_idle: float  # share of the engines' time without a request
    engines_stalled: float  # share of the engines' time with requests, but loading weights
    running: float  # mean number of running sequences per engine
    staleness: Counter[int]  # number of trained groups by staleness in versions
    generated_tokens: float  # response tokens per second
    trained_tokens: float  # response tokens in batches per second

    def share(self, *activities: str) -> float:
        """Return these parts' share of the trainer's time."""
        total = sum(self.trainer.values())
        return sum(self.trainer.get(activity, 0.0) for activity in activities) / total if total else 0.0


def simulate(scenario: Scenario, steps: int = 30, warm_up: int | None = None) -> SimulationResult:
    """Simulate ``warm_up`` steps, which do not count, and then ``steps`` steps. By default, warm-up fills the buffer.

    Raises ``ValueError`` if all engines together have fewer slots than a group has rollouts.
    """
    return Simulation(scenario, steps, warm_up).run()


class Simulation:
    """A clock, the engines, the trainer and the ledger."""

    def __init__(self, scenario: Scenario, steps: int, warm_up: int | None = None) -> None:
        settings = scenario.settings
        if scenario.engines * scenario.slots < settings.group_size:
            raise ValueError("the engines have no places for one group")
        if warm_up is None:
            warm_up = (settings.max_staleness + 2) * settings.publish_every + 2
        self._scenario = scenario
        self._costs = scenario.costs
        self._steps, self._warm_up = steps, warm_up
        # More steps than are simulated: the ledger stops admitting groups some steps before the last one.
        total = steps + warm_up + (settings.max_staleness + 2) * settings.publish_every
        self.ledger = Ledger(replace(settings, total_steps=total))
        self._every = settings.publish_every
        self._clock_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()
        self._engines = [SimulatedEngine(self._costs.engine, scenario.slots) for _ in range(scenario.engines)]
        self._places = scenario.engines * scenario.slots
        self._open = 0  # rollouts that have not ended
        self._rollouts_left: dict[int, int] = {}  # by group, the rollouts that have not ended
        self._lengths: dict[int, int] = {}  # by group, the index in the scenario's groups
        self._started = 0
        self._training = False
        self._publishing = False
        self._draining = 0
        self._waiting = False
        self._training_left_s = 0.0  # rest of the trainer's step: seconds with idle engines
        self._training_since = 0.0
        self._training_stamp = 0
        self._engines_busy = False
        self._trainer: Iterator[float | None] = iter(())
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._staleness: Counter[int] = Counter()
        self._tokens = 0
        self._step_ends: list[float] = []

    def run(self) -> SimulationResult:
        self._trainer = self._train()
        self._admit()
        self._resume_trainer()
        while self._events and len(self._step_ends) < self._steps + self._warm_up:
            self._clock_s, _, action, arguments = heappop(self._events)
            action(*arguments)
        start_time = self._step_ends[self._warm_up - 1] if self._warm_up else 0.0
        seconds = self._clock_s - start_time
        for engine in self._engines:
            engine.advance(self._clock_s)
        wall = seconds * len(self._engines) or 1.0
        return SimulationResult(
            steps=self._steps,
            step_s=seconds / self._steps,
            trainer=dict(self._spent),
            engines_idle=sum(engine.idle_s for engine in self._engines) / wall,
            engines_stalled=sum(engine.stalled_s for engine in self._engines) / wall,
            running=sum(engine.occupied for engine in self._engines) / wall,
            staleness=self._staleness,
            generated_tokens=sum(engine.tokens for engine in self._engines) / (seconds or 1.0),
            trained_tokens=self._tokens / (seconds or 1.0),
        )

    # -- the trainer: a generator that yields seconds of work, or None to wait

    def _train(self) -> Iterator[float | None]:
        costs = self._costs
        for step in range(self._steps + self._warm_up):
            batch = yield from self._next_batch()
            lengths = [self._scenario.groups[self._lengths.pop(group_id)] for group_id in batch.group_ids]
            self.ledger.take(batch)
            self._staleness.update(batch.staleness)
            self._tokens += sum(rollout.response for group in lengths for rollout in group.rollouts)
            if self._scenario.partial_rollouts:
                self._halt(True)
            self._admit()
            tokens = sum(group.tokens for group in lengths)
            yield from self._train_batch(costs.trainer.seconds(tokens))
            if (step + 1) % self._every == 0:
                yield from self._publish()
            if self._scenario.partial_rollouts:
                self._halt(False)
            yield from self._occupy_trainer("other", costs.overheads.step_s)
            self._step_ends.append(self._clock_s)
            if step + 1 == self._warm_up:
                self._forget()

    def _next_batch(self) -> Generator[float | None, None, Batch]:
        while not isinstance(upcoming := self.ledger.next_batch(), Batch):
            if overdue := self.ledger.overdue():
                for group_id in overdue:
                    self._requeue(group_id)
            else:
                yield from self._wait(upcoming.blocker)
        return upcoming

    def _publish(self) -> Iterator[float | None]:
        costs = self._costs.publish
        while self._publishing:
            yield from self._wait("publish")
        yield from self._occupy_trainer("publishing", costs.held_s)
        self._publishing = True
        self._in_background(max(0.0, costs.deliver_s - costs.stall_s), self._load)
        # With staleness 0 there is no batch before engines serve the weights, so the loop waits here.
        while self._publishing and (self._scenario.partial_rollouts or self.ledger.settings.max_staleness == 0):
            yield from self._wait("publish")

    def _train_batch(self, alone_s: float) -> Iterator[float | None]:
        """Train a batch. It takes longer while engines generate on the same processors."""
        start_time = self._clock_s
        self._training_left_s, self._training_since = alone_s, self._clock_s
        self._training = True
        self._beside(True)
        self._schedule_training()
        yield None
        self._beside(False)
        self._spent["training"] += self._clock_s - start_time

    def _schedule_training(self) -> None:
        self._engines_busy = any(engine.running for engine in self._engines)
        self._training_stamp += 1
        self._call_at(self._clock_s + self._training_left_s * self._slowdown(), self._trained, self._training_stamp)

    def _slowdown(self) -> float:
        return 1 + self._costs.trainer.beside_engines * self._engines_busy

    def _trained(self, stamp: int) -> None:
        if stamp == self._training_stamp:
            self._training = False
            self._resume_trainer()

    def _note_busy(self) -> None:
        """During training, change the trainer's speed if engines have become busy or idle."""
        if not self._training or not self._costs.trainer.beside_engines:
            return
        if any(engine.running for engine in self._engines) != self._engines_busy:
            self._training_left_s -= (self._clock_s - self._training_since) / self._slowdown()
            self._training_since = self._clock_s
            self._schedule_training()

    def _occupy_trainer(self, activity: str, seconds: float) -> Iterator[float | None]:
        if seconds <= 0:
            return
        seconds *= self._contention()
        self._spent[activity] += seconds
        yield seconds

    def _wait(self, reason: str) -> Iterator[float | None]:
        start_time = self._clock_s
        yield None
        if self._clock_s > start_time:
            self._spent[reason] += self._clock_s - start_time

    def _resume_trainer(self) -> None:
        seconds = next(self._trainer, inf)
        self._waiting = seconds is None
        if seconds is not None and seconds != inf:
            self._call_at(self._clock_s + seconds, self._resume_trainer)

    def _changed(self) -> None:
        """The ledger has changed, so a waiting trainer checks its condition again."""
        if self._waiting and not self._training:
            self._resume_trainer()

    def _forget(self) -> None:
        self._spent.clear()
        self._staleness.clear()
        self._tokens = 0
        for engine in self._engines:
            engine.advance(self._clock_s)
            engine.idle_s = engine.stalled_s = engine.tokens = engine.occupied = 0.0

    # -- groups

    def _admit(self) -> None:
        size = self._scenario.settings.group_size
        while self._places - self._open >= size and self.ledger.room():
            self._begin(self.ledger.admit().group_id)

    def _begin(self, group_id: int) -> None:
        groups = self._scenario.groups
        self._lengths[group_id] = self._started % len(groups)
        self._started += 1
        rollouts = groups[self._lengths[group_id]].rollouts
        self._rollouts_left[group_id] = len(rollouts)
        self._open += len(rollouts)
        if (start_s := self._costs.overheads.start_s) > 0:
            self._in_background(start_s, self._request, group_id)
        else:
            self._request(group_id)

    def _request(self, group_id: int) -> None:
        if group_id not in self._rollouts_left:  # it was requeued
            return
        # All rollouts of a group go to one engine while it has free slots.
        engine = min(self._engines, key=attrgetter("load"))
        engine.advance(self._clock_s)
        for length in self._scenario.groups[self._lengths[group_id]].rollouts:
            sequence = Sequence(
                group_id, context=length.prompt, tokens_left=float(length.response), outside_s=length.outside_s
            )
            if not length.response:
                self._call_at(self._clock_s + length.outside_s, self._end_rollout, group_id)
                continue
            if engine.load >= engine.slots:
                self._schedule(engine)
                engine = min(self._engines, key=attrgetter("load"))
                engine.advance(self._clock_s)
            if self._draining:
                engine.waiting.append(sequence)
            else:
                engine.add(sequence)
        self._schedule(engine)

    def _end_rollout(self, group_id: int) -> None:
        if group_id not in self._rollouts_left:
            return
        self._open -= 1
        self._rollouts_left[group_id] -= 1
        if not self._rollouts_left[group_id]:
            del self._rollouts_left[group_id]
            self._in_background(self._costs.overheads.settle_s, self._finish, group_id)
        self._admit()

    def _finish(self, group_id: int) -> None:
        if group_id not in self._lengths:
            return
        if self._scenario.groups[self._lengths[group_id]].rejected:
            del self._lengths[group_id]
            self.ledger.reject(group_id, "rejected")
        else:
            self.ledger.finish(group_id)
        self._admit()
        self._changed()

    def _requeue(self, group_id: int) -> None:
        entry = self.ledger.requeue(group_id)
        self._open -= self._rollouts_left.pop(group_id, 0)
        del self._lengths[group_id]
        for engine in self._engines:
            engine.advance(self._clock_s)
            engine.remove_group(group_id)
            self._schedule(engine)
        self._begin(entry.group_id)

    # -- engines

    def _schedule(self, engine: SimulatedEngine) -> None:
        """The engine has changed, so its next event is scheduled again. The new stamp cancels the old event."""
        engine.stamp += 1
        self._note_busy()
        if (end := engine.next_end()) < inf:
            self._call_at(end, self._engine_event, engine, engine.stamp)

    def _engine_event(self, engine: SimulatedEngine, stamp: int) -> None:
        if stamp != engine.stamp:
            return
        engine.advance(self._clock_s)
        ended_sequences = engine.pop_ended()
        if self._draining:
            self._drained(engine)
        else:
            engine.admit_waiting()
        for sequence in ended_sequences:
            if later_s := sequence.outside_s + self._costs.overheads.deliver_s:
                self._call_at(self._clock_s + later_s, self._end_rollout, sequence.group)
            else:
                self._end_rollout(sequence.group)
        self._schedule(engine)

    def _beside(self, training: bool) -> None:
        if not self._costs.engine.beside_trainer:
            return
        for engine in self._engines:
            engine.advance(self._clock_s)
            engine.beside_trainer = training
            self._schedule(engine)

    def _halt(self, halted: bool) -> None:
        for engine in self._engines:
            engine.advance(self._clock_s)
            engine.halted = halted
            if not halted:
                engine.admit_waiting()
            self._schedule(engine)

    def _load(self) -> None:
        """A version is at the engines' hosts, and they load it: now, or with ``drain`` after their rollouts."""
        if self._scenario.weight_update == "drain":
            self._draining = len(self._engines)
            for engine in self._engines:
                self._drained(engine)
            return
        stall_s = self._costs.publish.stall_s
        for engine in self._engines:
            engine.advance(self._clock_s)
            engine.stall(stall_s)
            self._schedule(engine)
        self._call_at(self._clock_s + stall_s, self._served)

    def _drained(self, engine: SimulatedEngine) -> None:
        """With ``drain``, an engine loads when it has no rollout; all serve the version when the last has loaded it."""
        if engine.running:
            return
        engine.advance(self._clock_s)
        engine.stall(self._costs.publish.stall_s)
        self._draining -= 1
        if not self._draining:
            self._call_at(self._clock_s + self._costs.publish.stall_s, self._served)

    def _served(self) -> None:
        self._publishing = False
        self.ledger.publish()
        for engine in self._engines:
            if engine.waiting:
                engine.advance(self._clock_s)
                engine.admit_waiting()
                self._schedule(engine)
        self._admit()
        self._changed()

    def _contention(self) -> float:
        """Factor on the time of other work, which competes with trainer and engines on a CPU host."""
        beside = self._costs.engine.beside_trainer
        return 1 + beside * (self._training + any(engine.running for engine in self._engines)) if beside else 1.0

    def _in_background(
        self, seconds: float, action: Callable[..., None], *arguments: object, slices: int = SLICES
    ) -> None:
        """Call ``action`` after work of ``seconds``, slowed down by contention. Contention may change, so each slice of
        the work is scheduled separately."""
        if not self._costs.engine.beside_trainer or slices == 1 or not seconds:
            self._call_at(self._clock_s + seconds * self._contention(), action, *arguments)
            return
        remaining_s = seconds * (slices - 1) / slices
        follow = partial(self._in_background, remaining_s, action, *arguments, slices=slices - 1)
        self._call_at(self._clock_s + seconds / slices * self._contention(), follow)

    def _call_at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        # The counter breaks ties in the order of scheduling, because actions cannot be compared.
        heappush(self._events, (time, next(self._order), action, arguments))
