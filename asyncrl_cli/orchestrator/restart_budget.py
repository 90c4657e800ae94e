"""Faults that the run survives: each is recorded, and too many of one kind lately end the run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Literal

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.secrets import hide

Part = Literal["engine", "trainer", "buffer", "scorer", "runner", "gateway"]


WINDOW_S = 6 * 3600.0
"""Seconds over which restarts are counted. One takes 10 minutes at most, so a part that never comes up ends the run."""


class RestartBudget:
    """Counts recent restarts by the kind of part."""

    def __init__(
        self,
        max_restarts: int,
        record: Callable[[str, str, str], Awaitable[None]],
        warn: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``record(kind, part, message)`` makes a fault durable, ``warn(text)`` shows it; ``now()`` is in seconds."""
        self._max_restarts = max_restarts
        self._record = record
        self.warn: Callable[[str], None] = lambda text: warn(hide(text))
        self._now = now
        self._restarts: dict[str, list[tuple[float, str]]] = defaultdict(list)  # by kind: when, and what it was

    async def spend(self, kind: Part, name: str, cause: str) -> None:
        """The part ``name`` failed and is about to be started again. Raises ``RunError`` when that is one too many."""
        now, hours = self._now(), f"{WINDOW_S / 3600:g} hours"
        recent = [one for one in self._restarts[kind] if one[0] > now - WINDOW_S]
        self._restarts[kind] = recent = [*recent, (now, f"{name}: {cause}")]
        count, (_, first) = len(recent), recent[0]
        self.warn(f"{name}: {cause}; restart {count} of at most {self._max_restarts} in {hours}")
        await self._record(kind, name, cause)
        if count > self._max_restarts:
            raise RunError(
                f"restarted {count - 1} times in {hours}, and it failed again; the first cause: {first}",
                location=name,
                hint=f"fix the cause (logs/{name}.log says more), or raise pipeline.max_restarts",
            )

    async def note(self, kind: str, name: str, message: str) -> None:
        """Something went wrong that needs no restart."""
        self.warn(f"{name}: {message}")
        await self._record(kind, name, message)
