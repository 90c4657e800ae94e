"""The places of an engine: so many requests run at once, and the others wait by priority."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count

from asyncrl_cli.records.generation import Segment


class Aborted(Exception):
    """A request was ended on demand. It is no failure: whoever asked goes on from its tokens.

    ``segments`` are the tokens generated of it, after its prefix; without any it goes on as it was.
    """

    def __init__(self, segments: list[Segment]) -> None:
        super().__init__("the request was aborted")
        self.segments = segments


class Slots:
    """A semaphore whose waiters come in by priority: the lowest first, among equals the first that came."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def one(self, priority: int) -> AsyncIterator[None]:
        """Have a place for the length of the block. Raises ``Aborted`` when turned away first."""
        await self._take(priority)
        try:
            yield
        finally:
            self._give()

    def turn_away(self) -> None:
        """Whoever waits gets ``Aborted``; those who have a place keep it."""
        waiting, self._waiting = self._waiting, []
        for _, _, place in waiting:
            if not place.done():
                place.set_exception(Aborted([]))

    async def _take(self, priority: int) -> None:
        if self._free:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (priority, next(self._order), place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._give()  # it came too late
            raise

    def _give(self) -> None:
        while self._waiting:
            _, _, place = heappop(self._waiting)
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
