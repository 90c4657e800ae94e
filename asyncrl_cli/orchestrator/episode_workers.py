"""The worker actors as one: places for episodes, and what can befall the actors.

The actor sees to what agents and environments do. Here is what can befall the actor itself: it is killed, or it does
not answer. Then it is replaced, and its episodes are to be played on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.restart_budget import RestartBudget
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import EpisodeSpec
from asyncrl_cli.system.remote import ActorDied, NoAnswer, wait_for
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.workers.messages import Played, Retry
from asyncrl_cli.workers.process import START_S
from asyncrl_cli.workers.scoring import RewardFailure

APART = 2
"""Processes of one worker in which episodes under suspicion are played, one at a time in each."""
ACTOR_S = 60.0
"""Seconds that Ray may take for an actor's process or an answer's way, beside what the actor does itself."""
STOP_S = 5.0
"""Seconds in which a worker must have ended its processes; what is left dies with the cluster."""


class EpisodeWorker:
    """One worker: its present actor, and those before."""

    def __init__(self, name: str, make_actor: Callable[[str], Any], budget: RestartBudget) -> None:
        self.name = name
        self.episodes = 0
        self._make_actor = make_actor
        self._budget = budget
        self._actor: Any = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Have an actor that has loaded the task. Raises ``UserError`` when it cannot be loaded."""
        async with self._starting:
            while self._actor is None:
                actor = self._make_actor(self.name)
                try:
                    await wait_for(actor.start.remote(), self.name, START_S + ACTOR_S)
                except (ActorDied, NoAnswer) as lost:
                    await self._lose(actor, lost)
                else:
                    self._actor = actor

    async def play(self, key: str, prompt: Prompt, access: ModelAccess, apart: bool, limit_s: float) -> Played:
        """Play one episode; cancelling this stops it. ``key`` is its own."""
        await self.start()
        actor = self._actor
        try:
            played: Played = await wait_for(actor.play.remote(key, prompt, access, apart), self.name, limit_s)
        except (ActorDied, NoAnswer) as lost:
            if self._actor is actor:  # the first to notice
                self._actor = None
                await self._lose(actor, lost)
            return Played(RewardFailure(f"{self.name}: {lost.message}"), Retry.RESUME)
        except asyncio.CancelledError:
            actor.cancel.remote([key])
            raise
        return played

    async def stop(self) -> None:
        """End its processes."""
        if self._actor is not None:
            with suppress(RunError):
                await wait_for(self._actor.stop.remote(), self.name, STOP_S)

    async def _lose(self, actor: Any, lost: RunError) -> None:
        import ray

        ray.kill(actor)
        await self._budget.spend("runner", self.name, lost.message)


class EpisodeWorkers:
    """All workers of one task. ``make_actor(name)`` asks Ray for one's actor."""

    def __init__(
        self, spec: EpisodeSpec, make_actor: Callable[[str], Any], budget: RestartBudget, name: str = "runner"
    ) -> None:
        self._workers = [EpisodeWorker(f"{name}-{index}", make_actor, budget) for index in range(spec.workers)]
        self._places = asyncio.Semaphore(spec.workers * spec.concurrency)
        self._apart = asyncio.Semaphore(spec.workers * APART)
        self._limit_s = spec.timeout_s + START_S + ACTOR_S

    async def start(self) -> None:
        """Have the task loaded everywhere. Raises ``UserError`` when it cannot be."""
        await asyncio.gather(*(worker.start() for worker in self._workers))

    @asynccontextmanager
    async def place(self, apart: bool) -> AsyncIterator[Place]:
        """A place for one episode, once there is one; ``apart`` from others in a process of its own."""
        async with self._apart if apart else self._places:
            worker = min(self._workers, key=lambda worker: worker.episodes)
            worker.episodes += 1
            try:
                yield Place(worker, apart, self._limit_s)
            finally:
                worker.episodes -= 1

    async def stop(self) -> None:
        """End all processes, in bounded time."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))


class Place:
    """Where one episode is played."""

    def __init__(self, worker: EpisodeWorker, apart: bool, limit_s: float) -> None:
        self._worker = worker
        self._apart = apart
        self._limit_s = limit_s

    async def play(self, key: str, prompt: Prompt, access: ModelAccess) -> Played:
        """Play it; raises ``UserError`` when the task cannot be loaded any more, or a worker died too often."""
        return await self._worker.play(key, prompt, access, self._apart, self._limit_s)
