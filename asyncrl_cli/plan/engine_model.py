"""A simulated engine. Between two events it generates at a known rate, so tokens need no events.

Each iteration adds one token to every sequence, so a sequence ends when the engine's count of iterations has grown by
its length. The time of m iterations follows from the number n of sequences and their context C, which grows by n tokens
per iteration.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from asyncrl_cli.plan.costs import EngineCost, iterations_in, seconds_of


@dataclass(slots=True, eq=False)
class Sequence:
    """A rollout on an engine."""

    group: int  # its id in the simulation
    context: int  # tokens at its start
    tokens_left: float  # tokens still to sample
    outside_s: float = 0.0  # as in ``RolloutLength``
    ends: float = 0.0  # the engine's iteration at which it has all its tokens
    started: float = 0.0  # the engine's iteration at which it started


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """An engine. While it loads weights, its ``clock_s`` is ahead of the simulation's clock."""

    cost: EngineCost
    slots: int
    clock_s: float = 0.0
    iterations: float = 0.0
    context: float = 0.0
    running: dict[int, Sequence] = field(default_factory=dict)  # in the order of their starts
    waiting: deque[Sequence] = field(default_factory=deque)
    stamp: int = 0  # events with an older stamp are ignored
    beside_trainer: bool = False
    halted: bool = False
    idle_s: float = 0.0
    stalled_s: float = 0.0
    tokens: float = 0.0
    occupied: float = 0.0  # integral of the running sequences over time
    _ends: list[tuple[float, int]] = field(default_factory=list)
    _next_key: int = 0

    @property
    def load(self) -> int:
        """Number of running and waiting sequences."""
        return len(self.running) + len(self.waiting)

    def advance(self, until_s: float) -> None:
        """Generate until ``until_s``."""
        seconds = until_s - self.clock_s
        if seconds <= 0:
            return
        self.clock_s = until_s
        sequence_count = len(self.running)
        if not sequence_count or self.halted:
            self.idle_s += seconds
            return
        self.occupied += sequence_count * seconds
        base, growth = self._rates(sequence_count)
        self._generate(iterations_in(base, growth, seconds))

    def next_end(self) -> float:
        """Return the time at which the first sequence ends, if nothing changes until then."""
        self._skip_gone()
        if not self._ends or self.halted:
            return inf
        base, growth = self._rates(len(self.running))
        return self.clock_s + seconds_of(base, growth, max(0.0, self._ends[0][0] - self.iterations))

    def pop_ended(self) -> list[Sequence]:
        """Remove and return the sequences that end at the time of ``next_end``."""
        ended_sequences = []
        self._skip_gone()
        if self._ends:
            self._generate(max(0.0, self._ends[0][0] - self.iterations))  # removes the rounding error of ``advance``
        while self._ends and self._ends[0][0] <= self.iterations + 1e-9:
            sequence = self.running.pop(heappop(self._ends)[1])
            self.context -= sequence.context + (self.iterations - sequence.started)
            ended_sequences.append(sequence)
            self._skip_gone()
        if not self.running:
            self.context = 0.0
        return ended_sequences

    def add(self, sequence: Sequence) -> None:
        """Start a sequence, or let it wait for a slot. Call ``advance`` first."""
        if self.halted or len(self.running) >= self.slots:
            self.waiting.append(sequence)
        else:
            self._start(sequence)

    def admit_waiting(self) -> None:
        """Start waiting sequences while there are free slots."""
        while self.waiting and not self.halted and len(self.running) < self.slots:
            self._start(self.waiting.popleft())

    def stall(self, seconds: float) -> None:
        """Generate nothing for ``seconds``, starting at ``clock_s``."""
        if self.running:
            self.stalled_s += seconds
        else:
            self.idle_s += seconds
        self.clock_s += seconds

    def remove_group(self, group: int) -> None:
        """Cancel the sequences of a group."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence.group != group)
        for key in [key for key, sequence in self.running.items() if sequence.group == group]:
            sequence = self.running.pop(key)
            self.context -= sequence.context + (self.iterations - sequence.started)

    def _start(self, sequence: Sequence) -> None:
        self._next_key += 1
        sequence.started = self.iterations
        sequence.ends = self.iterations + sequence.tokens_left
        self.running[self._next_key] = sequence
        self.context += sequence.context
        heappush(self._ends, (sequence.ends, self._next_key))

    def _generate(self, iterations: float) -> None:
        sequence_count = len(self.running)
        self.iterations += iterations
        self.context += sequence_count * iterations
        self.tokens += sequence_count * iterations

    def _rates(self, sequence_count: int) -> tuple[float, float]:
        base = self.cost.fixed_s + self.cost.per_sequence_s * sequence_count
        per_token = self.cost.per_context_token_s
        slower = 1 + self.cost.beside_trainer if self.beside_trainer else 1.0
        return (base + per_token * self.context) * slower, per_token * sequence_count * slower

    def _skip_gone(self) -> None:
        while self._ends and self._ends[0][1] not in self.running:
            heappop(self._ends)
