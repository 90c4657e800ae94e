"""The actor that scores responses, in a number of worker processes: each with a number of rewards at a time.

A reward whose process ended is tried once more with a process to itself: another reward may have ended it. A slot (a
process, and those that replace it) takes on nothing else until all that it lost is settled.

Invariant: a response costs two processes at most, and none loses its reward for what another did to a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.tasks.mix import reward_limit_s, task_name
from asyncrl_cli.workers.actor import WorkerActor
from asyncrl_cli.workers.messages import Work
from asyncrl_cli.workers.process import ProcessLost, WorkerProcess
from asyncrl_cli.workers.scoring import Response


class RewardActor(WorkerActor):
    """Scores as many responses at a time as its processes take; others wait their turn.

    Plain and async rewards of a mix have a pool each, so that neither delays the other.
    """

    async def start(self) -> None:
        """Load the task in all processes. Raises ``TaskError``."""
        first = await self.start_process(None)
        loaded = first.loaded
        self._async_rewards = loaded.async_rewards
        self._pools = {
            work: RewardPool(self.spec, work, self.start_process, first if work is loaded.work else None)
            for work in sorted(map(self._work, loaded.names))
        }
        await asyncio.gather(*(pool.start() for pool in self._pools.values()))

    async def score(self, responses: list[Response]) -> list[Scored | RewardFailure]:
        """What every response scores, in order. Raises ``TaskError`` when the task can no longer be loaded."""
        return list(await asyncio.gather(*map(self._score, responses)))

    async def _score(self, response: Response) -> Scored | RewardFailure:
        name = task_name(response[0]) if self.spec.mix else ""
        return await self._pools[self._work(name)].score(response)

    def _work(self, name: str) -> Work:
        return Work.ASYNC if name in self._async_rewards else Work.PLAIN


class _Slot:
    def __init__(self, process: WorkerProcess | None) -> None:
        self.process = process
        self.running = 0
        self.lost = 0
        self.starting = asyncio.Lock()


class RewardPool:
    """The processes for one kind of rewards."""

    def __init__(
        self,
        spec: TaskSpec,
        work: Work,
        start_process: Callable[[Work], Awaitable[WorkerProcess]],
        first: WorkerProcess | None,
    ) -> None:
        """``first`` is a process to begin with."""
        self._spec = spec
        self._work = work
        self._start_process = start_process
        self._at_once = spec.reward_concurrency if work is Work.ASYNC else 1
        self._slots = [_Slot(first if index == 0 else None) for index in range(spec.reward_workers)]
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Have all processes load the task. Raises ``TaskError``."""
        await asyncio.gather(*map(self._process, self._slots))

    async def score(self, response: Response) -> Scored | RewardFailure:
        """The reward of one response, when its turn has come. Raises ``TaskError``."""

        def free() -> _Slot | None:
            usable = (slot for slot in self._slots if not slot.lost and slot.running < self._at_once)
            return min(usable, key=lambda slot: slot.running, default=None)

        slot = await self._take(free)
        try:
            return await self._ask(slot, response)
        except ProcessLost:
            # Before any other response takes the slot: what was lost is settled first, one by one.
            slot.lost += 1
        try:
            await self._take(lambda: None if slot.running else slot)
            return await self._ask(slot, response)
        except ProcessLost as lost:
            assert slot.process is not None
            name = slot.process.name_for(response[0])
            return RewardFailure(f"{name} failed twice on prompt {response[0].uid!r}: {lost}")
        finally:
            slot.lost -= 1
            await self._notify()

    async def _take(self, choose: Callable[[], _Slot | None]) -> _Slot:
        """A turn in a slot, as soon as ``choose`` finds one."""
        async with self._changed:
            while (slot := choose()) is None:
                await self._changed.wait()
            slot.running += 1
            return slot

    async def _ask(self, slot: _Slot, response: Response) -> Scored | RewardFailure:
        try:
            process = await self._process(slot)
            return await process.score(response, reward_limit_s(self._spec, response[0]))
        finally:
            slot.running -= 1
            await self._notify()

    async def _process(self, slot: _Slot) -> WorkerProcess:
        """The slot's process, a new one if it has lost its own."""
        async with slot.starting:
            if slot.process is None or not slot.process.usable:
                if slot.process is not None:
                    slot.process.close("it was replaced")
                slot.process = await self._start_process(self._work)
            return slot.process

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
