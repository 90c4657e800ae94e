"""Measures how an engine spends its time, and on how many requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl_cli.records.generation import EngineActivity


class Occupancy:
    """Integrates the number of requests over time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self.requests = 0
        self._sequence_s = 0.0

    def add(self, requests: int) -> None:
        """Change the number of requests by ``requests``, which may be negative."""
        time_s = self._clock()
        self._sequence_s += self.requests * (time_s - self._since)
        self._since = time_s
        self.requests += requests

    def take(self) -> float:
        """Return the integral since the last call: requests times seconds."""
        self.add(0)
        sequence_s, self._sequence_s = self._sequence_s, 0.0
        return sequence_s


class ActivityClock:
    """Adds up an engine's activity between two reports.

    Silence is the time since the last sign of life: a new token, the first rollout after idleness, or the end of an
    update. Rollouts that wait for a weight version are not silent. Tokens and waiting rollouts are counted when a
    report is read, so a reported silence is too short by up to the time between two reports (and too long by as much
    when rollouts are cancelled or begin to generate in it).

    Wall time starts with the first rollout: an engine that is still starting is not idle.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = self._busy_from = self._alive_at = clock()
        self._mark: float | None = None
        self._busy = self._updating = False
        self._busy_s = self._paused_s = 0.0
        self._ended_tokens = self._sampled = 0

    def set_busy(self, busy: bool) -> None:
        """Note whether the engine has rollouts to generate."""
        time_s = self._clock()
        if self._busy:
            self._busy_s += time_s - self._since
        elif busy:
            self._busy_from = self._alive_at = time_s
            if self._mark is None:
                self._mark = time_s
        self._since, self._busy = time_s, busy

    def add_ended(self, tokens: int) -> None:
        """Count an ended rollout's ``tokens`` that this engine generated."""
        self._ended_tokens += tokens

    def begin_update(self) -> None:
        """The engine is paused to load weights; until ``end_update`` it is not silent."""
        self._updating = True

    def end_update(self, stall_s: float = 0.0) -> None:
        """The engine generates again, after ``stall_s`` seconds."""
        self._updating, self._alive_at = False, self._clock()
        if self._busy:  # an idle engine loses no time
            self._paused_s += min(stall_s, self._alive_at - self._busy_from)

    def take_activity(self, sampled: int, generating: bool = True) -> EngineActivity:
        """Report, and start over. ``generating``: False if all rollouts wait.

        ``sampled``: tokens generated so far; it falls when a running rollout is cancelled, which is not a sign of life.
        """
        self.set_busy(self._busy)
        time_s = self._clock()
        if sampled > self._sampled or not generating:
            self._alive_at = time_s
        self._sampled = sampled
        silent_s = time_s - self._alive_at if self._busy and not self._updating else 0.0
        wall_s = 0.0
        if self._mark is not None:
            wall_s, self._mark = time_s - self._mark, time_s
        activity = EngineActivity(
            generated_tokens=self._ended_tokens,
            busy_s=self._busy_s,
            paused_s=self._paused_s,
            wall_s=wall_s,
            silent_s=silent_s,
        )
        self._busy_s, self._paused_s, self._ended_tokens = 0.0, 0.0, 0
        return activity
