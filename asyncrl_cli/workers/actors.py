"""Ray actors that own the worker processes for user code: one actor for rewards, others for episodes.

The actors run no user code themselves, so they always answer. A reward or an episode that hangs or ends its process
costs a ``WorkerProcess``, which is replaced.

Invariants:

- No descendant outlives its worker process, not even one that left its session. The actor's process adopts orphans and
  kills them. In the driver, Ray's orphans would be among them (decision 0034).
- A response costs at most two processes, and no response loses its reward because another one ended a process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.system.logs import redirect_output
from asyncrl_cli.system.process_tree import adopt_orphans, descendants, kill_descendants
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.tasks.mix import reward_limit_s
from asyncrl_cli.workers.messages import Load, Played, Retry, Role
from asyncrl_cli.workers.process import ProcessLost, WorkerProcess
from asyncrl_cli.workers.scoring import Answer, Response

BLOCKED_S = 30.0
"""Seconds that an episode may block the event loop, and with it all other episodes."""


class WorkerActor:
    """Owns worker processes: the common part of the actors for rewards and for episodes."""

    def __init__(self, name: str, spec: TaskSpec, search_path: str, log_dir: str, blocked_s: float = BLOCKED_S) -> None:
        """``name``: name of the log file in ``log_dir``."""
        redirect_output(log_dir, name)
        adopt_orphans()
        self.spec = spec
        self._search_path = Path(search_path)
        self._blocked_s = blocked_s
        self._other_pids = [process.pid for process in descendants([os.getpid()])]
        self._processes: list[WorkerProcess] = []

    async def ping(self) -> None:
        """Answer, which shows that the actor is alive."""

    async def stop(self) -> None:
        """End all processes and their descendants."""
        for process in list(self._processes):
            process.close("the run ends")

    async def start_process(self, role: Role | None) -> WorkerProcess:
        """Start a process and have it load the task. Raises ``TaskError``."""
        process = WorkerProcess(
            Load(self.spec, search_path=self._search_path, role=role, blocked_s=self._blocked_s), self._kill_orphans
        )
        self._processes.append(process)
        await process.start()
        return process

    def _kill_orphans(self) -> None:
        """Kill descendants of processes that are gone."""
        self._processes = [process for process in self._processes if not process.closed]
        kill_descendants([*self._other_pids, *(process.pid for process in self._processes)])


class EpisodeActor(WorkerActor):
    """Plays episodes, any number at a time."""

    def __init__(self, *settings: Any, **options: Any) -> None:
        super().__init__(*settings, **options)
        self._common: WorkerProcess | None = None
        self._idle: list[WorkerProcess] = []
        """Idle processes that play one episode at a time."""
        self._starting = asyncio.Lock()
        self._playing: dict[str, asyncio.Task[Played]] = {}

    async def start(self) -> str:
        """Load the task; returns the user's name for it. Raises ``TaskError``."""
        return (await self._common_process()).task_info.names[""]

    async def play(self, key: str, prompt: Prompt, access: ModelAccess, isolated: bool) -> Played:
        """Play one episode; ``isolated``: without other episodes in its process. ``key`` is for ``cancel``.

        Raises ``TaskError`` if the task can no longer be loaded.
        """
        episode = self._play_isolated(prompt, access) if isolated else self._play(prompt, access)
        playing = self._playing[key] = asyncio.create_task(episode)
        try:
            return await playing
        except asyncio.CancelledError:
            return Played(RewardFailure("it was cancelled"))
        finally:
            del self._playing[key]

    async def cancel(self, keys: list[str]) -> None:
        """Stop the episodes that this actor plays."""
        for key in keys:
            if (playing := self._playing.get(key)) is not None:
                playing.cancel()

    async def _play(self, prompt: Prompt, access: ModelAccess) -> Played:
        process = await self._common_process()
        played = await process.play(prompt, access)
        process.close_if_idle()
        return played

    async def _play_isolated(self, prompt: Prompt, access: ModelAccess) -> Played:
        while self._idle and not self._idle[-1].usable:
            self._idle.pop()
        process = self._idle.pop() if self._idle else await self.start_process(Role.EPISODES)
        try:
            played = await process.play(prompt, access)
        except asyncio.CancelledError:
            process.retired = True
            raise
        process.close_if_idle()
        if process.usable:
            self._idle.append(process)
        # No other episode can have ended the process: this one did, so it starts again.
        return Played(played.score, Retry.RESTART) if played.retry is Retry.ISOLATED else played

    async def _common_process(self) -> WorkerProcess:
        async with self._starting:
            if self._common is None or self._common.retired:
                self._common = await self.start_process(Role.EPISODES)
            return self._common


class _Slot:
    def __init__(self, process: WorkerProcess | None) -> None:
        self.process = process
        self.running = 0
        self.lost = 0
        self.starting = asyncio.Lock()


class RewardActor(WorkerActor):
    """Scores as many responses at a time as its processes take; others wait."""

    async def start(self) -> None:
        """Start all processes and load the task in each. Raises ``TaskError``."""
        process = await self.start_process(None)
        self._role = process.task_info.role
        self._concurrency = self.spec.reward_concurrency if self._role is Role.ASYNC else 1
        self._slots = [_Slot(process if index == 0 else None) for index in range(self.spec.reward_workers)]
        self._changed = asyncio.Condition()
        await asyncio.gather(*map(self._process, self._slots))

    async def score(self, responses: list[Response]) -> list[Answer]:
        """Score responses; the answers are in their order. Raises ``TaskError`` if the task can no longer be loaded."""
        return list(await asyncio.gather(*map(self._score, responses)))

    async def _score(self, response: Response) -> Answer:
        """Score one response as soon as a process is free."""

        def free() -> _Slot | None:
            usable = (slot for slot in self._slots if not slot.lost and slot.running < self._concurrency)
            return min(usable, key=lambda slot: slot.running, default=None)

        slot = await self._take(free)
        try:
            return await self._ask(slot, response)
        except ProcessLost:
            # The slot takes no new responses until each lost one has been scored alone, which shows which one ended
            # the process.
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
        """Wait until ``choose`` finds a slot, and count a response in it."""
        async with self._changed:
            while (slot := choose()) is None:
                await self._changed.wait()
            slot.running += 1
            return slot

    async def _ask(self, slot: _Slot, response: Response) -> Answer:
        try:
            process = await self._process(slot)
            return await process.score(response, reward_limit_s(self.spec, response[0]))
        finally:
            slot.running -= 1
            await self._notify()

    async def _process(self, slot: _Slot) -> WorkerProcess:
        """The slot's process, started or replaced if necessary."""
        async with slot.starting:
            if slot.process is None or not slot.process.usable:
                if slot.process is not None:
                    slot.process.close("it was replaced")
                slot.process = await self.start_process(self._role)
            return slot.process

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
