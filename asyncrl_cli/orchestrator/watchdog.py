"""Warns when a part of the run waits long, and ends the run when it waits too long (decision 0014).

Invariant: no wait without progress exceeds its limit by more than the interval between two checks. The error says who
waits for what, and since when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncrl_cli.core.errors import RunError

LONGEST_LOOK_S = 5.0
"""Longest time in seconds between two checks."""
DRIVER = "the driver"
"""The part that waits for the trainer and for engines."""
TRAINER = "the trainer"
"""The part that waits for rollouts."""
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Wait:
    """One wait of a part. ``extra_s``: seconds added to its limit."""

    who: str
    purpose: str
    extra_s: float
    since: float = field(default_factory=time.monotonic)
    warned: bool = False

    def progress(self) -> None:
        """Restart the clock."""
        self.since, self.warned = time.monotonic(), False

    def __str__(self) -> str:
        ago = time.monotonic() - self.since
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - ago))
        return f"{self.who} has waited for {self.purpose} since {clock} ({ago:.0f} s)"


class Watchdog:
    """Watches the waits of one run."""

    def __init__(
        self, limit_s: float, warn: Callable[[str], None], record: Callable[[Wait], Coroutine[Any, Any, None]]
    ) -> None:
        """After half of ``limit_s`` seconds, ``warn`` shows a wait and ``record`` makes it durable; after ``limit_s``
        seconds it ends the run."""
        self._limit_s = limit_s
        self._warn = warn
        self._record = record
        self._waits: list[Wait] = []

    @contextmanager
    def waiting(self, who: str, purpose: str, extra_s: float = 0.0) -> Iterator[Wait]:
        """Within the block, ``who`` waits for ``purpose``. ``extra_s`` extends the limit, for large models."""
        wait = Wait(who, purpose, extra_s)
        self._waits.append(wait)
        try:
            yield wait
        finally:
            self._waits.remove(wait)

    async def until(self, call: Awaitable[T], who: str, purpose: str, extra_s: float = 0.0) -> T:
        """The result of ``call``; ``who`` waits for it as in ``waiting``."""
        with self.waiting(who, purpose, extra_s):
            return await call

    def progress(self) -> None:
        """Tokens were generated or responses scored: restart the clocks of waits for rollouts."""
        for wait in self._waits:
            if wait.who == TRAINER:
                wait.progress()

    def caught_up(self) -> None:
        """A step was trained again: restart all clocks."""
        for wait in self._waits:
            wait.progress()

    async def watch(self) -> None:
        """Check the waits; never ends. Raises ``RunError`` when a wait exceeds its limit."""
        interval = min(LONGEST_LOOK_S, self._limit_s / 8)
        async with asyncio.TaskGroup() as recording:  # in tasks: a hanging record must not stop the checks
            while True:
                await asyncio.sleep(interval)
                checked_at = time.monotonic()
                for wait in sorted(self._waits, key=lambda wait: wait.since):
                    limit_s = self._limit_s + wait.extra_s
                    if checked_at - wait.since > limit_s:
                        other_waits = [str(other_wait) for other_wait in self._waits if other_wait is not wait]
                        raise RunError(
                            "; ".join([f"no progress: {wait}", *other_waits]),
                            location="pipeline",
                            hint="read that part's log in the run's logs folder, or raise pipeline.stall_minutes; "
                            "`asyncrl resume` continues from here",
                        )
                    if checked_at - wait.since > limit_s / 2 and not wait.warned:
                        wait.warned = True
                        self._warn(str(wait))
                        recording.create_task(self._record(wait))
