"""An actor that is kept running: it is restarted when it is lost, and too many recent restarts end the run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.system.remote import ActorLost

Part = Literal["engine", "trainer", "scorer", "episode-worker", "gateway", "host-agent"]

WINDOW_S = 6 * 3600.0
"""Seconds over which restarts are counted. A restart takes at most 10 minutes, so a part that never starts ends the
run."""
Answer = TypeVar("Answer")


async def not_recorded(kind: str, part: str, message: str) -> None:
    """Records no fault: for commands that write no journal."""


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
        """Count a failure of the part ``name``, which will be restarted. Raises ``RunError`` if there were too many."""
        now, hours = self._now(), f"{WINDOW_S / 3600:g} hours"
        recent = [one for one in self._restarts[kind] if one[0] > now - WINDOW_S]
        self._restarts[kind] = recent = [*recent, (now, f"{name}: {cause}")]
        count, (_, first) = len(recent), recent[0]
        self.warn(f"{name}: {cause}; restart {count} of at most {self._max_restarts} in {hours}")
        await self._record(kind, name, cause)
        if count <= self._max_restarts:
            return
        raise RunError(
            f"restarted {count - 1} times in {hours}, and it failed again; the first cause: {first}",
            location=name,
            hint=f"fix the cause (see logs/{name}.log), or raise pipeline.max_restarts",
        )

    async def note(self, kind: str, name: str, message: str) -> None:
        """Record a fault that needs no restart."""
        self.warn(f"{name}: {message}")
        await self._record(kind, name, message)


class SupervisedActor:
    """One Ray actor, and the actors that replace it.

    Invariants: ``running`` and ``call`` never use an actor that has not started; if several callers lose the same
    actor, it is ended and counted once.

    Attributes:
        actor: the present one, asked of Ray; None when the next has yet to be asked for.
        pid: of its process, if that is known and on this machine. ``kill`` ends that, too: it may be stopped.
        started: whether ``actor`` can be called.
    """

    def __init__(
        self,
        part: Part,
        name: str,
        make: Callable[[], Any],
        start: Callable[[Any], Awaitable[object]],
        budget: RestartBudget,
    ) -> None:
        """``make()`` creates an actor, ``start(actor)`` returns when it can be called. After an ``ActorLost`` of
        either, another actor is started; other exceptions are raised to the caller. ``name``: also of the log file."""
        self.name = name
        self.actor: Any = None
        self.pid: int | None = None
        self.started = False
        self._part = part
        self._make = make
        self._start = start
        self._budget = budget
        self._starting = asyncio.Lock()

    def ask(self) -> None:
        """Create an actor if there is none: its process starts in parallel with others."""
        if self.actor is None:
            self.actor = self._make()

    async def room(self) -> None:
        """Wait until there is room for an actor. Only engines need room; the others have no resources in Ray."""

    async def running(self) -> Any:
        """The present actor. Starts it if necessary, and again as long as it is lost during the start.

        Raises the other errors of ``start``, and ``RunError`` after too many restarts.
        """
        while True:
            async with self._starting:
                if self.started:
                    return self.actor
                actor = self.actor
                try:
                    await self.room()
                    self.ask()
                    actor = self.actor
                    await self._start(actor)
                except ActorLost as error:
                    lost = error
                except BaseException:
                    self._drop()
                    raise
                else:
                    self.started = True
                    return actor
            await self.lose(actor, lost.message)

    async def call(self, work: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """The result of ``work(actor)``. A loss of the actor is raised once it is ended and counted; the next call
        starts another."""
        actor = await self.running()
        try:
            return await work(actor)
        except ActorLost as lost:
            await self.lose(actor, lost.message)
            raise

    async def lose(self, actor: Any, cause: str) -> None:
        """Note that ``actor`` is lost. Raises ``RunError`` after too many restarts."""
        if actor is self.actor:
            self._drop()
            await self._budget.spend(self._part, self.name, cause)

    async def start_once(self) -> None:
        """Start the present actor. Any error ends the actor and is raised; nothing is counted."""
        async with self._starting:
            try:
                await self.room()
                self.ask()
                await self._start(self.actor)
            except BaseException:
                self._drop()
                raise
            self.started = True

    def release(self) -> None:
        """End the present actor, which is no longer needed; nothing is counted."""
        self._drop()

    def kill(self) -> None:
        """End the present process, even if it hangs; later calls find the actor lost."""
        import ray

        pid, self.pid = self.pid, None
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.actor is not None:
            ray.kill(self.actor)

    def _drop(self) -> None:
        self.kill()
        self.actor, self.started = None, False
