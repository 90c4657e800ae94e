"""Adds and removes engines while the run continues.

The pool requests missing engines from Ray in the background, so nothing waits for them. A new engine loads and proves
the current weights before it serves. An engine leaves when its node is gone: its requests continue on other engines
from the tokens that it reported, and the pool requests another engine.

Invariants: there are at most ``target`` engines. An engine that is lost with its node does not count as a restart
(decision 0039).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator import nodes
from asyncrl_cli.orchestrator.engines import BringUp, EngineProcess, keep_engine
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.open_requests import EngineState
from asyncrl_cli.system.supervised_actor import RestartBudget

LOOK_S = 1.0
"""Seconds between two checks for missing engines."""
RETRY_S, LONGEST_RETRY_S = 15.0, 600.0
"""First and longest delay in seconds after a failed attempt to add an engine; the delay doubles with each failure."""


@dataclass(slots=True, eq=False)
class EnginePool:
    """Keeps ``target`` engines. The client's engines have started, and are called ``engine-0``, ``engine-1``, ..."""

    target: int
    make: Callable[[str], EngineProcess]
    """Makes an engine with this name without starting it."""
    client: GenerationClient
    bring_up: BringUp
    buffer: Buffer
    budget: RestartBudget
    reporter: Reporter
    gpu_turn: asyncio.Event
    """As in ``keep_engine``."""
    _shortages: dict[str, str] = field(init=False)
    """What Ray lacks to start an engine, by the names that are in use; empty if it has started."""
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reported_counts: tuple[int, int, str] = (-1, -1, "")
    _reported_shortage: bool = False
    _retry_s: float = field(default_factory=lambda: RETRY_S)  # after the next failure
    _retry_at: float = 0.0

    def __post_init__(self) -> None:
        self._shortages = {engine.name: "" for engine in self.client.engines}

    async def run(self) -> None:
        """Never ends. Raises ``RunError`` after too many restarts of engines."""
        async with self._tasks:
            for engine in self.client.engines:
                self._tasks.create_task(self._keep(engine))
            while True:
                self._changed.clear()
                self._request_missing()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()

    def shortage(self) -> str:
        """A text about the missing engines if no engine serves; empty otherwise."""
        if self.client.serving():
            return ""
        return "; ".join(filter(None, ("no engine serves", self._first_shortage())))

    def _request_missing(self) -> None:
        if time.monotonic() >= self._retry_at:
            free_names = (name for index in count() if (name := f"engine-{index}") not in self._shortages)
            for name in islice(free_names, self.target - len(self._shortages)):
                self._shortages[name] = ""
                self._tasks.create_task(self._join(name))
        counts = (len(self.client.serving()), self.target, self._first_shortage())
        if counts != self._reported_counts:
            self._reported_counts = counts
            self.reporter.engines(*counts)

    def _first_shortage(self) -> str:
        return next(filter(None, self._shortages.values()), "")

    async def _join(self, name: str) -> None:
        def report_shortage(text: str) -> None:
            self._shortages[name] = text
            if not self._reported_shortage:
                self._reported_shortage = True
                self.reporter.warn(text)

        process = self.make(name)
        try:
            await process.join(report_shortage)
        except UserError as error:  # the other engines serve, so the run continues without it (decision 0039)
            self._free(name)
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            await self.budget.note("engine", name, f"it could not join: {error.message}")
            return
        self._shortages[name] = ""
        await self._keep(self.client.add(process))

    async def _bring_up(self, engine: EngineState) -> None:
        await self.bring_up(engine)
        self._reported_shortage, self._retry_s = False, RETRY_S
        self.buffer.engine_changed(engine.name, "join", "")
        self.client.room.set()
        self._changed.set()

    async def _keep(self, engine: EngineState) -> None:
        reason = await keep_engine(engine, self.client, self._bring_up, gpu_turn=self.gpu_turn, why_left=_why_left)
        self.reporter.warn(f"{engine.name} is lost: {reason}")
        self.client.remove(engine)
        await engine.process.end()
        self._free(engine.name)  # only now: two engines must not share a log file
        self.buffer.engine_changed(engine.name, "leave", reason)

    def _free(self, name: str) -> None:
        del self._shortages[name]
        self._changed.set()


async def _why_left(engine: EngineState, unreachable: bool) -> str:
    return await nodes.why_lost(lambda: nodes.why_gone(engine.process.node), unreachable)
