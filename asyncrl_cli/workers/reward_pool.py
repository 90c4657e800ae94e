"""Reward processes that share the work: so many of them, each with so many rewards at a time.

A reward whose process ended is tried once more, with a process to itself: whoever ended it, it may have been none of
this one's doing. A worker (a process, and what replaces it) takes on nothing else until all that it lost is settled.

Invariant: a response costs two processes at most, and none loses its reward for what another did to a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.mix import reward_limit_s
from asyncrl_cli.workers.reward_process import ProcessEnded, RewardProcess
from asyncrl_cli.workers.scoring import Response, RewardFailure, Scored


class _Worker:
    def __init__(self, process: RewardProcess | None) -> None:
        self.process = process
        self.running = 0
        self.lost = 0
        self.starting = asyncio.Lock()


class RewardPool:
    """Scores for one loop. All methods raise ``TaskError`` when the task cannot be loaded (any more)."""

    def __init__(self, spec: TaskSpec, search_path: Path, together: bool, first: RewardProcess | None = None) -> None:
        """``together``: for async rewards, several at a time in each process. ``first`` is a process to begin with."""
        self._spec = spec
        self._search_path = search_path
        self._together = together
        self._slots = spec.reward_concurrency if together else 1
        self._workers = [_Worker(first if index == 0 else None) for index in range(spec.reward_workers)]
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Have all processes load the task."""
        await asyncio.gather(*(self._process(worker) for worker in self._workers))

    async def score(self, response: Response) -> Scored | RewardFailure:
        """The reward of one response, when its turn has come."""

        def free() -> _Worker | None:
            usable = (worker for worker in self._workers if not worker.lost and worker.running < self._slots)
            return min(usable, key=lambda worker: worker.running, default=None)

        worker = await self._take(free)
        try:
            return await self._ask(worker, response)
        except ProcessEnded:
            worker.lost += 1
        try:
            await self._take(lambda: None if worker.running else worker)
            return await self._ask(worker, response)
        except ProcessEnded as ended:
            assert worker.process is not None
            name = worker.process.name_for(response)
            return RewardFailure(f"{name} ended its process twice ({ended}) on prompt {response[0].uid!r}")
        finally:
            worker.lost -= 1
            await self._notify()

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            if worker.process is not None:
                worker.process.close()

    async def _take(self, choose: Callable[[], _Worker | None]) -> _Worker:
        """A place at a worker, as soon as ``choose`` finds one."""
        async with self._changed:
            while (worker := choose()) is None:
                await self._changed.wait()
            worker.running += 1
            return worker

    async def _ask(self, worker: _Worker, response: Response) -> Scored | RewardFailure:
        try:
            process = await self._process(worker)
            return await process.score(response, reward_limit_s(self._spec, response[0]))
        finally:
            worker.running -= 1
            await self._notify()

    async def _process(self, worker: _Worker) -> RewardProcess:
        """The worker's process, a new one if it has lost its own."""
        async with worker.starting:
            if worker.process is None or not worker.process.alive:
                if worker.process is not None:
                    worker.process.close()
                worker.process = await RewardProcess.start(self._spec, self._search_path, self._together)
            return worker.process

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
