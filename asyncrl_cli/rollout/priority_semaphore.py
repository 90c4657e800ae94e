"""A semaphore for an engine's slots: a limited number of requests run, and the others wait by priority."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count

from asyncrl_cli.records.generation import Segment


class Aborted(Exception):
    """A request was aborted on command. This is not a failure: the caller continues from its tokens.

    ``segments``: the tokens generated after its prefix.
    """

    def __init__(self, segments: list[Segment]) -> None:
        super().__init__("the request was aborted")
        self.segments = segments


class PrioritySemaphore:
    """A semaphore that waiters enter by priority: the lowest first, and among equals in the order of arrival."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[None]:
        """Hold a slot during the block. Raises ``Aborted`` if ``abort_waiters`` is called before there is one."""
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    def abort_waiters(self) -> None:
        """Raise ``Aborted`` in all waiters; holders of a slot keep it."""
        waiting, self._waiting = self._waiting, []
        for _, _, slot in waiting:
            if not slot.done():
                slot.set_exception(Aborted([]))

    async def _acquire(self, priority: int) -> None:
        if self._free:
            self._free -= 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (priority, next(self._order), slot))
        try:
            await slot
        except asyncio.CancelledError:
            # Cancelled in the same event-loop turn that gave it the slot: pass the slot on, or it is lost.
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            _, _, slot = heappop(self._waiting)
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1
