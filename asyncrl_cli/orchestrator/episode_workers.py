"""The actors that run episodes as one: slots for episodes, and actors that are replaced when they are lost.

The actor handles what agents and environments do. When it is lost itself, its episodes are to be continued.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure
from asyncrl_cli.spec.inputs import EpisodeSpec
from asyncrl_cli.system.remote import ActorLost, wait_for
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.workers.messages import Played, Retry
from asyncrl_cli.workers.process import START_S

APART = 2
"""Processes of one worker in which episodes under suspicion are played, one at a time in each."""
ACTOR_S = 60.0
"""Seconds that Ray may take for an actor's process or an answer's way, beside what the actor does itself."""
STOP_S = 5.0
"""Seconds in which a worker must have ended its processes; what is left dies with the cluster."""

Play = Callable[[str, Prompt, ModelAccess], Coroutine[Any, Any, Played]]
"""Plays one episode under a key of its own; cancelling this stops it. Raises ``UserError`` when the task cannot be
loaded any more, or a worker was lost too often."""


class EpisodeWorker:
    """One worker. ``episodes`` counts those that it has now."""

    def __init__(self, name: str, make_actor: Callable[[str], Any], budget: RestartBudget) -> None:
        self.episodes = 0
        self._name = name
        self._actor = SupervisedActor("episode-worker", name, partial(make_actor, name), self._start, budget)

    async def start(self) -> None:
        """Have an actor that has loaded the task. Raises ``UserError`` when it cannot be loaded."""
        await self._actor.running()

    async def _start(self, actor: Any) -> None:
        await wait_for(actor.start.remote(), self._name, START_S + ACTOR_S)

    async def play(self, apart: bool, limit_s: float, key: str, prompt: Prompt, access: ModelAccess) -> Played:
        """See ``Play``."""

        async def play(actor: Any) -> Played:
            try:
                played: Played = await wait_for(actor.play.remote(key, prompt, access, apart), self._name, limit_s)
            except asyncio.CancelledError:
                actor.cancel.remote([key])
                raise
            return played

        try:
            return await self._actor.call(play)
        except ActorLost as lost:
            return Played(RewardFailure(f"{self._name}: {lost.message}"), Retry.RESUME)

    async def stop(self) -> None:
        """End its processes."""
        if self._actor.started:
            with suppress(RunError):
                await wait_for(self._actor.actor.stop.remote(), self._name, STOP_S)


class EpisodeWorkers:
    """All workers of one task. ``make_actor(name)`` asks Ray for one's actor."""

    def __init__(
        self, spec: EpisodeSpec, make_actor: Callable[[str], Any], budget: RestartBudget, name: str = "episode-worker"
    ) -> None:
        self._workers = [EpisodeWorker(f"{name}-{index}", make_actor, budget) for index in range(spec.workers)]
        self._slots = asyncio.Semaphore(spec.workers * spec.concurrency)
        self._isolated = asyncio.Semaphore(spec.workers * APART)
        self._limit_s = spec.timeout_s + START_S + ACTOR_S

    async def start(self) -> None:
        """Have the task loaded everywhere. Raises ``UserError`` when it cannot be."""
        await asyncio.gather(*(worker.start() for worker in self._workers))

    @asynccontextmanager
    async def slot(self, apart: bool) -> AsyncIterator[Play]:
        """Room for one episode, once there is some; ``apart`` from others in a process of its own."""
        async with self._isolated if apart else self._slots:
            worker = min(self._workers, key=lambda worker: worker.episodes)
            worker.episodes += 1
            try:
                yield partial(worker.play, apart, self._limit_s)
            finally:
                worker.episodes -= 1

    async def stop(self) -> None:
        """End all processes, in bounded time."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))
