"""Adds and removes engines while the run continues.

The pool has a target number of engines (``wanted``) within the spec's bounds. It requests missing engines from Ray in
the background, so nothing waits for them. A new engine loads and proves the current weights before it serves. An engine
leaves because its node is gone, or on request (``asyncrl scale``, Ray's drain notice for its node, SIGTERM to its
process); before it leaves on request, its requests move to other engines with all their tokens.

Invariants: after each check at most ``wanted`` engines remain. An engine that leaves gets no more requests
(``GenerationClient.withdraw``). An engine that is lost with its node does not count as a restart (decision 0039).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator.engines import EngineKeeper, EngineProcess, Weights
from asyncrl_cli.orchestrator.nodes import draining_nodes, why_gone, why_lost
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.open_requests import EngineState
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.scaling import answer_request, wanted_engines
from asyncrl_cli.system.supervised_actor import RestartBudget

LOOK_S = 1.0
"""Seconds between two checks of draining nodes and of the wanted number of engines."""
LEAVE_S = 30.0
"""Seconds that an engine may take to return its requests. Preemption notices often give no more."""
RETRY_S, LONGEST_RETRY_S = 15.0, 600.0
"""First and longest delay in seconds after a failed attempt to add an engine; the delay doubles with each failure."""
SIGTERM = "its process got SIGTERM"


class Phase(StrEnum):
    """An engine's phase between its request and its end."""

    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"


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
            return Phase.LEAVING
        return Phase.SERVING if self.engine is not None and self.engine.serving else Phase.JOINING


def changes(wanted: int, phases: Mapping[int, Phase]) -> tuple[list[int], list[int]]:
    """Return the numbers of the engines to request and of the engines to remove, to reach ``wanted``.

    ``phases`` has each engine's phase by its number. New engines get the lowest free numbers. Engines that do not serve
    yet leave first, which costs nothing; among equals, the highest numbers leave first.
    """
    staying = [number for number, phase in phases.items() if phase != Phase.LEAVING]
    if len(staying) <= wanted:
        free = (number for number in range(len(phases) + wanted) if number not in phases)
        return [next(free) for _ in range(wanted - len(staying))], []
    dispensable = sorted(staying, key=lambda number: (phases[number] == Phase.SERVING, -number))
    return [], dispensable[: len(staying) - wanted]


class EnginePool:
    """Keeps as many engines as are wanted."""

    def __init__(
        self,
        bounds: tuple[int, int],
        run: RunDirectory,
        *,
        make: Callable[[str], EngineProcess],
        client: GenerationClient,
        weights: Weights,
        buffer: Buffer,
        budget: RestartBudget,
        reporter: Reporter,
        gpu_turn: asyncio.Event | None = None,
        draining: Callable[[], Mapping[str, str]] = draining_nodes,
        why_gone: Callable[[str], str] = why_gone,
    ) -> None:
        """``bounds``: the smallest and the largest number of engines. The client's engines have started, and have the
        numbers 0, 1, ... ``make(name)`` makes another engine without starting it. ``draining`` and ``why_gone`` ask
        Ray, and may block."""
        self.bounds = bounds
        # An earlier driver may have been asked for another number.
        self.wanted = wanted_engines(run, bounds) or bounds[1]
        self._run = run
        self._make = make
        self._client = client
        self._keeper = EngineKeeper(client, weights, gpu_turn=gpu_turn, joined=self._joined, why_left=self._why_left)
        self._buffer = buffer
        self._budget = budget
        self._reporter = reporter
        self._draining = draining
        self._why_gone = why_gone
        self._members: dict[int, _Member] = {
            number: _Member(engine.name, engine) for number, engine in enumerate(client.engines)
        }
        self._tasks = asyncio.TaskGroup()
        self._changed = asyncio.Event()
        self._counts = (-1, -1, "")
        self._said_waiting = False
        self._retry_s = RETRY_S  # after the next failure
        self._retry_at = 0.0

    async def run(self) -> None:
        """Never ends. Raises ``RunError`` after too many restarts of engines."""
        async with self._tasks:
            for member in self._members.values():
                member.task = self._tasks.create_task(self._keep(member))
            while True:
                self._changed.clear()
                self._adjust()
                await self._leave_on_notice()
                # A full disk must not end the run. Without an answer, `asyncrl scale` reports the failure.
                with suppress(OSError):
                    if accepted := await asyncio.to_thread(answer_request, self._run, self.bounds):
                        self.want(accepted)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()

    def want(self, count: int) -> None:
        """Set the target number of engines. The caller checks the bounds."""
        self.wanted = count
        self._changed.set()

    def missing(self) -> str:
        """A text about the missing engines if no engine serves; empty otherwise."""
        if self._client.serving():
            return ""
        return "; ".join(filter(None, ("no engine serves", self._waits_for())))

    # -- deciding

    def _adjust(self) -> None:
        joins, leaves = changes(self.wanted, {number: one.phase for number, one in self._members.items()})
        if time.monotonic() >= self._retry_at:
            for number in joins:
                self._members[number] = member = _Member(f"engine-{number}")
                member.task = self._tasks.create_task(self._join(member))
        for number in leaves:
            self._leave(self._members[number], f"scaled to {self.wanted}")
        counts = (len(self._client.serving()), self.wanted, self._waits_for())
        if counts != self._counts:
            self._counts = counts
            self._reporter.engines(*counts)

    async def _leave_on_notice(self) -> None:
        draining = await asyncio.to_thread(self._draining)
        for member in list(self._members.values()):
            if member.engine is not None:
                if until := draining.get(member.engine.process.node):
                    self._leave(member, f"its node is being drained{until}")
                elif member.engine.asked_to_leave:
                    self._leave(member, SIGTERM)

    def _waits_for(self) -> str:
        return next((one.waits_for for one in self._members.values() if one.waits_for and not one.leaving), "")

    # -- joining

    async def _join(self, member: _Member) -> None:
        def waits(text: str) -> None:
            member.waits_for = text
            if not self._said_waiting:
                self._said_waiting = True
                self._reporter.warn(text)

        process = self._make(member.name)
        try:
            await process.join(waits)
        except UserError as error:  # the other engines serve, so the run continues without it (decision 0039)
            self._forget(member)
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            await self._budget.note("engine", member.name, f"it could not join: {error.message}")
            return
        member.waits_for = ""
        member.engine = self._client.add(process)
        await self._keep(member)

    def _joined(self, engine: EngineState) -> None:
        self._said_waiting, self._retry_s = False, RETRY_S
        self._tasks.create_task(self._buffer.engine_changed(engine.name, "join", ""))
        self._client.room.set()
        self._changed.set()

    # -- leaving

    async def _keep(self, member: _Member) -> None:
        assert member.engine is not None
        reason = await self._keeper.keep(member.engine)
        if not member.leaving:
            member.leaving = reason
            self._reporter.warn(f"{member.name} is lost: {reason}")
            await self._end(member, member.engine)

    async def _why_left(self, engine: EngineState, unreachable: bool) -> str:
        member = next((one for one in self._members.values() if one.engine is engine), None)

        def why() -> str:
            leaving = SIGTERM if engine.asked_to_leave else "" if member is None else member.leaving
            return leaving or self._why_gone(engine.process.node)

        return await why_lost(why, unreachable)

    def _leave(self, member: _Member, reason: str) -> None:
        if not member.leaving:
            member.leaving = reason  # before the withdrawal: ``_why_left`` must not have it restarted
            self._tasks.create_task(self._withdraw(member))

    async def _withdraw(self, member: _Member) -> None:
        engine = member.engine
        if engine is not None:
            self._reporter.warn(f"{member.name} leaves: {member.leaving}")
            await self._client.withdraw(engine, LEAVE_S)
        if member.task is not None:
            member.task.cancel()
            await asyncio.wait([member.task])
        if engine is not None:
            await self._end(member, engine)
        else:
            self._forget(member)

    async def _end(self, member: _Member, engine: EngineState) -> None:
        """End an engine, and free its number. In this order: a new engine must not get the number while it runs."""
        self._client.remove(engine)
        await engine.process.end()
        self._forget(member)
        await self._buffer.engine_changed(member.name, "leave", member.leaving)

    def _forget(self, member: _Member) -> None:
        self._members = {number: one for number, one in self._members.items() if one is not member}
        self._changed.set()
