"""Restarts lost actors. Too many recent restarts end the run (decision 0014)."""

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
from asyncrl_cli.system.remote import ActorLost, wait_for_head

ActorKind = Literal["engine", "trainer", "scorer", "episode-worker", "gateway", "host-agent"]

WINDOW_S = 6 * 3600.0
"""Seconds over which restarts are counted. An attempt takes at most 10 minutes, so a part that never starts ends the
run; a part that fails rarely does not."""
Answer = TypeVar("Answer")


async def not_recorded(fault_kind: str, name: str, message: str) -> None:
    """Record no fault, for commands without a journal."""


class RestartBudget:
    """Counts recent restarts by kind of part."""

    def __init__(
        self,
        max_restarts: int,
        record: Callable[[str, str, str], Awaitable[None]],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``record(kind, part, message)`` makes a fault durable, ``warn(text)`` shows it; ``clock()`` is in seconds."""
        self._max_restarts = max_restarts
        self._record = record
        self.warn: Callable[[str], None] = lambda text: warn(hide(text))
        self._clock = clock
        self._restarts: dict[str, list[tuple[float, str]]] = defaultdict(list)  # time and cause, by kind

    async def spend(self, actor_kind: ActorKind, name: str, cause: str) -> None:
        """Count a failure of the part ``name`` before its restart. Raises ``RunError`` if there were too many."""
        now_s, hours = self._clock(), f"{WINDOW_S / 3600:g} hours"
        recent_failures = [failure for failure in self._restarts[actor_kind] if failure[0] > now_s - WINDOW_S]
        self._restarts[actor_kind] = recent_failures = [*recent_failures, (now_s, f"{name}: {cause}")]
        count, (_, first_cause) = len(recent_failures), recent_failures[0]
        self.warn(f"{name}: {cause}; restart {count} of at most {self._max_restarts} in {hours}")
        await self._record(actor_kind, name, cause)
        if count <= self._max_restarts:
            return
        raise RunError(
            f"restarted {count - 1} times in {hours}, and it failed again; the first cause: {first_cause}",
            location=name,
            hint=f"fix the cause (see logs/{name}.log), or raise pipeline.max_restarts",
        )

    async def note(self, fault_kind: str, name: str, message: str) -> None:
        """Record a fault that needs no restart."""
        self.warn(f"{name}: {message}")
        await self._record(fault_kind, name, message)


class SupervisedActor:
    """One Ray actor, through its restarts.

    Invariants: ``running`` and ``call`` use only an actor that has started. If several callers lose the same actor, it
    is killed and counted once.

    Attributes:
        actor: the current actor, perhaps not started yet; None if the next one is not requested yet.
        pid: its process, if known and on this machine; ``kill`` kills it directly, even if it is stopped.
        started: True if ``actor`` can be called.
    """

    def __init__(
        self,
        actor_kind: ActorKind,
        name: str,
        make: Callable[[], Any],
        start: Callable[[Any], Awaitable[object]],
        budget: RestartBudget,
    ) -> None:
        """``make()`` creates an actor; ``start(actor)`` returns when it can be called. If either raises ``ActorLost``,
        another actor is started; other exceptions are raised to the caller. ``name`` is also the log file's name."""
        self.name = name
        self.actor: Any = None
        self.pid: int | None = None
        self.started = False
        self._actor_kind = actor_kind
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
        """The current actor, started if necessary. An actor that is lost during its start is replaced.

        Raises the other errors of ``start``, and ``RunError`` after too many restarts.
        """
        while True:
            async with self._starting:  # concurrent callers wait for the same start
                if self.started:
                    return self.actor
                actor = self.actor
                try:
                    await self.room()
                    await wait_for_head()
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

    async def call(self, request: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """The result of ``request(actor)``. If the actor is lost, it is killed and counted, and the error is raised;
        the next call starts another."""
        actor = await self.running()
        try:
            return await request(actor)
        except ActorLost as lost:
            await self.lose(actor, lost.message)
            raise

    async def lose(self, actor: Any, cause: str) -> None:
        """Kill and count a lost actor. Raises ``RunError`` after too many restarts."""
        if actor is self.actor:  # otherwise another caller has counted it
            self._drop()
            await self._budget.spend(self._actor_kind, self.name, cause)

    async def start_once(self) -> None:
        """Start the actor without a retry. An error kills the actor and is raised; it is not counted."""
        async with self._starting:
            try:
                await self.room()
                await wait_for_head()
                self.ask()
                await self._start(self.actor)
            except BaseException:
                self._drop()
                raise
            self.started = True

    def release(self) -> None:
        """Kill the actor because it is no longer needed; this is not counted."""
        self._drop()

    def kill(self) -> None:
        """Kill the process, even if it hangs. Later calls find the actor lost."""
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
