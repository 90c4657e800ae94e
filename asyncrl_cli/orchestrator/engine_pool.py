"""Engines that come and go while the run continues.

The pool has a target number of engines (``wanted``) within the bounds of the spec. Missing engines are requested from
Ray in the background, so nothing waits for them. A new engine begins to serve like every engine: it loads the current
weights and proves them. An engine leaves on request (``asyncrl scale``, a drain notice of Ray for its node, SIGTERM to
its process), after its requests have moved to other engines with all their tokens, or because its node is gone.

Invariants: after each look at most ``wanted`` engines remain. An engine that leaves gets no more requests
(``GenerationClient.withdraw``). The pool never changes a group's deadline: only the ledger bounds staleness
(journal/ledger.py). Decision 0040 explains why an engine that is lost with its node does not count as a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.orchestrator.engine_source import RayEngines, why_lost
from asyncrl_cli.orchestrator.engines import EngineKeeper
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.open_requests import EngineState

Change = Literal["join", "leave"]
Phase = Literal["joining", "serving", "leaving"]

LOOK_S = 1.0
"""Seconds between two looks at draining nodes and at how many engines are wanted."""
LEAVE_S = 30.0
"""Seconds that an engine may take to return its requests. Notices of preemption often give no more."""
RETRY_S, LONGEST_RETRY_S = 15.0, 600.0
"""Seconds between a failed attempt to add an engine and the next attempt; doubled after each failure."""


@dataclass(frozen=True, slots=True)
class PoolEvents:
    """Callbacks of the pool.

    Args:
        record: records a change durably: the engine's name, the change, and the reason.
        failed: records that an engine could not join: its name and the cause.
        notice: shows a text to the user.
        counted: is called on each change with the number of engines that serve, the number wanted, and what the missing
            ones wait for.
    """

    record: Callable[[str, Change, str], Coroutine[Any, Any, None]]
    failed: Callable[[str, str], Awaitable[None]]
    notice: Callable[[str], None]
    counted: Callable[[int, int, str], None]


@dataclass(slots=True, eq=False)
class _Member:
    name: str
    engine: EngineState | None = None  # once it has started
    task: asyncio.Task[None] | None = None
    leaving: str = ""  # the reason, if it leaves
    waits_for: str = ""  # what Ray lacks to start it

    @property
    def phase(self) -> Phase:
        if self.leaving:
            return "leaving"
        return "serving" if self.engine is not None and self.engine.serving else "joining"


def changes(wanted: int, phases: Mapping[int, Phase]) -> tuple[list[int], list[int]]:
    """The numbers of the engines to request, and of the engines that should leave, so that ``wanted`` remain.

    ``phases`` has the phase of each engine by its number. New engines get the lowest free numbers. Engines that do not
    serve yet leave first, which costs nothing; among equals, the highest numbers leave first.
    """
    staying = [number for number, phase in phases.items() if phase != "leaving"]
    if len(staying) <= wanted:
        free = (number for number in range(len(phases) + wanted) if number not in phases)
        return [next(free) for _ in range(wanted - len(staying))], []
    dispensable = sorted(staying, key=lambda number: (phases[number] == "serving", -number))
    return [], dispensable[: len(staying) - wanted]


class EnginePool:
    """Keeps the engines of a run."""

    def __init__(
        self,
        bounds: tuple[int, int],
        client: GenerationClient,
        keeper: EngineKeeper,
        source: RayEngines,
        events: PoolEvents,
    ) -> None:
        """``bounds``: the smallest and the largest number of engines. The first engines are started already, and the
        client has them as engine 0, 1, ..."""
        self.bounds = bounds
        self.wanted = bounds[1]
        self._client = client
        self._keeper = keeper
        self._source = source
        self._events = events
        self._members: dict[int, _Member] = {
            number: _Member(engine.name, engine) for number, engine in enumerate(client.engines)
        }
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._counts = (-1, -1, "")
        self._said_waiting = False
        self._retry_s = RETRY_S  # after the next failure
        self._retry_at = 0.0
        keeper.on_serving = self._joined
        keeper.why_left = self._why_left
        client.on_asked_to_leave = self._asked_to_leave

    async def run(self) -> None:
        """Keep as many engines as are wanted. Never ends; raises ``RunError`` after too many restarts of engines."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for member in self._members.values():
                member.task = tasks.create_task(self._keep(member))
            while True:
                self._changed.clear()
                self._adjust()
                await self._leave_draining_nodes()
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    def want(self, count: int) -> None:
        """Set the target number of engines. Raises ``ValueError`` if it is outside the bounds."""
        least, most = self.bounds
        if not least <= count <= most:
            raise ValueError(f"{count} is not between {least} and {most}")
        self.wanted = count
        self._changed.set()

    @property
    def serving(self) -> int:
        """How many engines serve."""
        return len(self._client.serving())

    def missing(self) -> str:
        """What the run waits for while no engine serves; empty otherwise."""
        return "" if self.serving else "; ".join(filter(None, ("no engine serves", self._waits_for())))

    # -- deciding

    def _adjust(self) -> None:
        joins, leaves = changes(self.wanted, {number: one.phase for number, one in self._members.items()})
        if time.monotonic() >= self._retry_at:
            for number in joins:
                self._members[number] = member = _Member(f"engine-{number}")
                member.task = self._spawn(self._join(member))
        for number in leaves:
            self._leave(self._members[number], f"scaled to {self.wanted}")
        counts = (self.serving, self.wanted, self._waits_for())
        if counts != self._counts:
            self._counts = counts
            self._events.counted(*counts)

    async def _leave_draining_nodes(self) -> None:
        draining = await asyncio.to_thread(self._source.draining)
        for member in list(self._members.values()):
            if member.engine is not None and (until := draining.get(member.engine.process.node)):
                self._leave(member, f"its node is being drained{until}")

    def _asked_to_leave(self, engine: EngineState) -> None:
        member = next((one for one in self._members.values() if one.engine is engine), None)
        if member is not None:
            self._leave(member, "its process got SIGTERM")

    def _waits_for(self) -> str:
        """What the first engine that has yet to be started waits for; empty when all have started."""
        return next((one.waits_for for one in self._members.values() if one.waits_for and not one.leaving), "")

    # -- joining

    async def _join(self, member: _Member) -> None:
        try:
            process = await self._source.hire(member.name, lambda waits: self._waits(member, waits))
        except UserError as error:  # the others serve: it must not end the run (decision 0040)
            self._forget(member)
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            await self._events.failed(member.name, f"it could not join: {error.message}")
            return
        member.waits_for = ""
        member.engine = self._client.add(process)
        await self._keep(member)

    def _waits(self, member: _Member, waits_for: str) -> None:
        member.waits_for = waits_for
        if not self._said_waiting:
            self._said_waiting = True
            self._events.notice(waits_for)

    def _joined(self, engine: EngineState) -> None:
        self._said_waiting, self._retry_s = False, RETRY_S
        self._spawn(self._events.record(engine.name, "join", ""))
        self._client.on_room()
        self._changed.set()

    # -- leaving

    async def _keep(self, member: _Member) -> None:
        assert member.engine is not None
        reason = await self._keeper.keep(member.engine)
        if not member.leaving:
            member.leaving = reason
            self._events.notice(f"{member.name} is lost: {reason}")
            await self._end(member)

    async def _why_left(self, engine: EngineState, unreachable: bool) -> str:
        member = next((one for one in self._members.values() if one.engine is engine), None)

        def leaving() -> str:
            return "" if member is None else member.leaving

        return leaving() or await why_lost(lambda: leaving() or self._source.why_gone(engine.process.node), unreachable)

    def _leave(self, member: _Member, reason: str) -> None:
        if not member.leaving:
            member.leaving = reason  # first: code that finds the engine lost must not restart it
            self._spawn(self._withdraw(member))

    async def _withdraw(self, member: _Member) -> None:
        if member.engine is not None:
            self._events.notice(f"{member.name} leaves: {member.leaving}")
            await self._client.withdraw(member.engine, LEAVE_S)
        if member.task is not None:
            member.task.cancel()
            await asyncio.wait([member.task])
        if member.engine is not None:
            await self._end(member)
        else:
            self._forget(member)

    async def _end(self, member: _Member) -> None:
        """End an engine completely; its number may be used again afterwards."""
        assert member.engine is not None
        self._client.remove(member.engine)
        await member.engine.process.dismiss()
        self._forget(member)
        await self._events.record(member.name, "leave", member.leaving)

    def _forget(self, member: _Member) -> None:
        self._members = {number: one for number, one in self._members.items() if one is not member}
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.create_task(work)
