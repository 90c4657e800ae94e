"""The driver's end of the buffer: calls that survive the buffer's death.

A call that died with its actor is made again on a new one, which has read the journal. Every call may be repeated
(``buffer.durable``), so the caller sees one answer. Before that, ``on_reopen`` learns where the journal stands:
groups that were admitted without anyone hearing of it are in there. ``budget`` counts the deaths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncrl_cli.orchestrator.restart_budget import RestartBudget
from asyncrl_cli.records.groups import Opening
from asyncrl_cli.system.remote import ActorDied, wait_for

NAME = "buffer"


class BufferClient:
    """Calls methods of ``buffer.actor.Buffer`` by name."""

    def __init__(self, make_actor: Callable[[], Any], limit_s: float) -> None:
        """``limit_s``: seconds that one call may take."""
        self._make_actor = make_actor
        self._limit_s = limit_s
        self._actor = make_actor()
        self._lock = asyncio.Lock()
        self._opened = asyncio.Event()
        self.budget: RestartBudget | None = None
        self.on_reopen: Callable[[Opening], None] = lambda _: None

    async def open(self, kind: str, note: str, base: dict[str, Any] | None) -> Opening:
        """Open the journal for this driver. Raises ``JournalError``, and ``ActorDied`` after some deaths."""
        for last in (False, False, True):
            try:
                opening: Opening = await wait_for(self._actor.open.remote(kind, note, base), NAME, self._limit_s)
                break
            except ActorDied:
                if last:
                    raise
                self._actor = self._make_actor()
        self._opened.set()
        return opening

    async def call(self, method: str, *arguments: Any) -> Any:
        """The answer of ``method``, which waits for ``open``. Raises ``JournalError``, and ``RunError`` after too many
        deaths."""
        await self._opened.wait()
        while True:
            actor = self._actor
            try:
                return await wait_for(getattr(actor, method).remote(*arguments), NAME, self._limit_s)
            except ActorDied as died:
                await self._replace(actor, died)

    async def _replace(self, dead: Any, died: ActorDied) -> None:
        async with self._lock:
            if self._actor is not dead:
                return
            actor = self._make_actor()
            try:
                opening = await wait_for(actor.open.remote("restart"), NAME, self._limit_s)
            except ActorDied:
                opening = None
            self._actor = actor
            if opening is not None:
                self.on_reopen(opening)
        if self.budget is not None:
            await self.budget.spend("buffer", NAME, died.message)
