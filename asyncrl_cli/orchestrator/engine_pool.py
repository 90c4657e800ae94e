"""Adds and removes engines while the run continues.

The pool requests missing engines from Ray in the background, so nothing waits for them. A new engine loads and proves
the current weights before it serves. An engine leaves because its node is gone, or because somebody asks: Ray's drain
notice for its node, or SIGTERM to its process. Before an engine that was asked leaves, its requests move to other
engines with all their tokens. Then the pool requests another engine.

Invariants: at most ``target`` engines stay. An engine that leaves gets no more requests
(``GenerationClient.withdraw``). An engine that is lost with its node does not count as a restart (decision 0039).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator import nodes
from asyncrl_cli.orchestrator.engines import EngineKeeper, EngineProcess, Weights
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.open_requests import EngineState
from asyncrl_cli.system.supervised_actor import RestartBudget

LOOK_S = 1.0
"""Seconds between two checks of draining nodes and of missing engines."""
LEAVE_S = 30.0
"""Seconds that an engine may take to return its requests. Preemption notices often give no more."""
RETRY_S, LONGEST_RETRY_S = 15.0, 600.0
"""First and longest delay in seconds after a failed attempt to add an engine; the delay doubles with each failure."""
SIGTERM = "its process got SIGTERM"


@dataclass(slots=True, eq=False)
class _Member:
    name: str
    engine: EngineState | None = None  # once it has started
    task: asyncio.Task[None] | None = None
    leaving: str = ""  # the reason, if it leaves
    shortage: str = ""  # the resources that Ray lacks to start it


class EnginePool:
    """Keeps ``target`` engines."""

    def __init__(
        self,
        target: int,
        *,
        make: Callable[[str], EngineProcess],
        client: GenerationClient,
        weights: Weights,
        buffer: Buffer,
        budget: RestartBudget,
        reporter: Reporter,
        gpu_turn: asyncio.Event | None = None,
    ) -> None:
        """The client's engines have started, and are called ``engine-0``, ``engine-1``, ... ``make(name)`` makes
        another engine without starting it."""
        self._target = target
        self._make = make
        self._client = client
        self._keeper = EngineKeeper(client, weights, gpu_turn=gpu_turn, joined=self._joined, why_left=self._why_left)
        self._buffer = buffer
        self._budget = budget
        self._reporter = reporter
        self._members = {engine.name: _Member(engine.name, engine) for engine in client.engines}
        self._tasks = asyncio.TaskGroup()
        self._changed = asyncio.Event()
        self._reported_counts = (-1, -1, "")
        self._reported_shortage = False
        self._retry_s = RETRY_S  # after the next failure
        self._retry_at = 0.0

    async def run(self) -> None:
        """Never ends. Raises ``RunError`` after too many restarts of engines."""
        async with self._tasks:
            for member in self._members.values():
                member.task = self._tasks.create_task(self._keep(member))
            while True:
                self._changed.clear()
                self._request_missing()
                await self._leave_on_notice()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()

    def shortage(self) -> str:
        """A text about the missing engines if no engine serves; empty otherwise."""
        if self._client.serving():
            return ""
        return "; ".join(filter(None, ("no engine serves", self._first_shortage())))

    def _request_missing(self) -> None:
        if time.monotonic() >= self._retry_at:
            staying = sum(not member.leaving for member in self._members.values())
            # An engine that leaves keeps its name until it has ended: two must not share a log file.
            free_names = (name for index in count() if (name := f"engine-{index}") not in self._members)
            for name in islice(free_names, self._target - staying):
                self._members[name] = member = _Member(name)
                member.task = self._tasks.create_task(self._join(member))
        counts = (len(self._client.serving()), self._target, self._first_shortage())
        if counts != self._reported_counts:
            self._reported_counts = counts
            self._reporter.engines(*counts)

    async def _leave_on_notice(self) -> None:
        draining = await asyncio.to_thread(nodes.draining_nodes)
        for member in list(self._members.values()):
            if member.engine is not None:
                if deadline := draining.get(member.engine.process.node):
                    self._leave(member, f"its node is being drained{deadline}")
                elif member.engine.asked_to_leave:
                    self._leave(member, SIGTERM)

    def _first_shortage(self) -> str:
        return next((member.shortage for member in self._members.values() if member.shortage), "")

    # -- joining

    async def _join(self, member: _Member) -> None:
        def report_shortage(text: str) -> None:
            member.shortage = text
            if not self._reported_shortage:
                self._reported_shortage = True
                self._reporter.warn(text)

        process = self._make(member.name)
        try:
            await process.join(report_shortage)
        except UserError as error:  # the other engines serve, so the run continues without it (decision 0039)
            self._forget(member)
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            await self._budget.note("engine", member.name, f"it could not join: {error.message}")
            return
        member.shortage = ""
        member.engine = self._client.add(process)
        await self._keep(member)

    def _joined(self, engine: EngineState) -> None:
        self._reported_shortage, self._retry_s = False, RETRY_S
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
        member = self._members[engine.name]

        def why() -> str:
            return member.leaving or (SIGTERM if engine.asked_to_leave else "") or nodes.why_gone(engine.process.node)

        return await nodes.why_lost(why, unreachable)

    def _leave(self, member: _Member, reason: str) -> None:
        if not member.leaving:
            member.leaving = reason  # before the withdrawal: ``_why_left`` must not have it restarted
            self._tasks.create_task(self._withdraw(member))

    async def _withdraw(self, member: _Member) -> None:
        assert member.engine is not None and member.task is not None
        self._reporter.warn(f"{member.name} leaves: {member.leaving}")
        await self._client.withdraw(member.engine, LEAVE_S)
        member.task.cancel()
        await asyncio.wait([member.task])
        await self._end(member, member.engine)

    async def _end(self, member: _Member, engine: EngineState) -> None:
        """End an engine, and free its name. In this order: a new engine must not get the name while this one runs."""
        self._client.remove(engine)
        await engine.process.end()
        self._forget(member)
        await self._buffer.engine_changed(member.name, "leave", member.leaving)

    def _forget(self, member: _Member) -> None:
        del self._members[member.name]
        self._changed.set()
