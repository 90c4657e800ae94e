"""Faults that the run survives: each is recorded, and too many of one kind end the run with the first cause."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from asyncrl_cli.runs.directory import RunError

Part = Literal["engine", "trainer", "buffer", "scorer", "runner", "gateway"]


class Faults:
    """Counts restarts by the kind of part."""

    def __init__(
        self, max_restarts: int, record: Callable[[str, str, str], Awaitable[None]], warn: Callable[[str], None]
    ) -> None:
        """``record(kind, part, message)`` makes a fault durable, ``warn(text)`` shows it."""
        self._max_restarts = max_restarts
        self._record = record
        self._warn = warn
        self._restarts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    async def restarting(self, kind: Part, name: str, cause: str) -> None:
        """The part ``name`` failed and is about to be started again. Raises ``RunError`` when that is one too many."""
        count = self._restarts[kind] = self._restarts.get(kind, 0) + 1
        first = self._first.setdefault(kind, f"{name}: {cause}")
        self._warn(f"{name}: {cause}; restart {count} of at most {self._max_restarts}")
        await self._record(kind, name, cause)
        if count > self._max_restarts:
            raise RunError(
                f"restarted {count - 1} times, and it failed again; the first cause: {first}",
                place=name,
                mend=f"Mend that cause (logs/{name}.log says more), or raise pipeline.max_restarts",
            )

    async def note(self, kind: str, name: str, message: str) -> None:
        """Something went wrong that needs no restart."""
        self._warn(f"{name}: {message}")
        await self._record(kind, name, message)
