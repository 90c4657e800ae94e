"""A pool of the actors that run episodes: it assigns slots to episodes, and replaces actors that are lost.

An actor handles failures of agents and environments. When the actor itself is lost, its episodes are continued on
another one.
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

ISOLATED = 2
"""Processes of one worker for isolated episodes, which may have killed their process before; each plays one episode at
a time."""
ACTOR_S = 60.0
"""Seconds that Ray may take to start an actor's process or to transfer an answer, besides the actor's own time."""
STOP_S = 5.0
"""Seconds that a worker has to end its processes; remaining ones end with the cluster."""

Play = Callable[[str, Prompt, ModelAccess], Coroutine[Any, Any, Played]]
"""Plays one episode, identified by a unique key; cancelling the call stops the episode. Raises ``UserError`` when the
task can no longer be loaded, or a worker was lost too often."""


class EpisodeWorker:
    """One worker. ``episodes`` is the number of episodes that it plays now."""

    def __init__(self, name: str, make_actor: Callable[[str], Any], budget: RestartBudget) -> None:
        self.episodes = 0
        self._name = name
        self._actor = SupervisedActor("episode-worker", name, partial(make_actor, name), self._start, budget)

    async def start(self) -> None:
        """Start the actor and load the task in it. Raises ``UserError`` when the task cannot be loaded."""
        await self._actor.running()

    async def _start(self, actor: Any) -> None:
        await wait_for(actor.start.remote(), self._name, START_S + ACTOR_S)

    async def play(self, isolated: bool, limit_s: float, key: str, prompt: Prompt, access: ModelAccess) -> Played:
        """See ``Play``."""

        async def play(actor: Any) -> Played:
            try:
                played: Played = await wait_for(actor.play.remote(key, prompt, access, isolated), self._name, limit_s)
            except asyncio.CancelledError:
                actor.cancel.remote([key])
                raise
            return played

        try:
            return await self._actor.call(play)
        except ActorLost as lost:
            return Played(RewardFailure(f"{self._name}: {lost.message}"), Retry.RESUME)

    async def stop(self) -> None:
        """End the worker's processes."""
        if self._actor.started:
            with suppress(RunError):
                await wait_for(self._actor.actor.stop.remote(), self._name, STOP_S)


class EpisodeWorkers:
    """All workers of one task. ``make_actor(name)`` creates the Ray actor of one worker; ``name`` is the prefix of the
    workers' names."""

    def __init__(self, spec: EpisodeSpec, make_actor: Callable[[str], Any], budget: RestartBudget, name: str) -> None:
        self._workers = [EpisodeWorker(f"{name}-{index}", make_actor, budget) for index in range(spec.workers)]
        self._slots = asyncio.Semaphore(spec.workers * spec.concurrency)
        self._isolated = asyncio.Semaphore(spec.workers * ISOLATED)
        self._limit_s = spec.timeout_s + START_S + ACTOR_S

    async def start(self) -> None:
        """Start all workers and load the task in them. Raises ``UserError`` when it cannot be loaded."""
        await asyncio.gather(*(worker.start() for worker in self._workers))

    @asynccontextmanager
    async def slot(self, isolated: bool) -> AsyncIterator[Play]:
        """A slot for one episode; waits until one is free. ``isolated``: in a process without other episodes."""
        async with self._isolated if isolated else self._slots:
            worker = min(self._workers, key=lambda worker: worker.episodes)
            worker.episodes += 1
            try:
                yield partial(worker.play, isolated, self._limit_s)
            finally:
                worker.episodes -= 1

    async def stop(self) -> None:
        """End all processes, in bounded time."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))
