"""The Ray actor that has episodes played, apart from engines, trainer and driver.

It runs nothing of the user's itself, so it always answers; agents and environments run in a process that it replaces
when they cost it (``episode_owner``). Episodes under suspicion get processes apart.

Invariant: of a process that is gone no descendant lives, also none that left its session: they all come to the actor,
which adopts orphans.
"""

from __future__ import annotations

import asyncio
import os
from itertools import count
from pathlib import Path

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.system.logs import redirect_output
from asyncrl_cli.system.process_tree import adopt_orphans, descendants, kill_descendants
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.workers.episode_messages import Retry
from asyncrl_cli.workers.episode_owner import BLOCKED_S, EpisodeProcess, Played
from asyncrl_cli.workers.scoring import RewardFailure


class Runner:
    """Plays as many episodes at a time as it is asked to."""

    def __init__(self, name: str, spec: TaskSpec, search_path: str, log_dir: str, blocked_s: float = BLOCKED_S) -> None:
        redirect_output(log_dir, name)
        adopt_orphans()
        self._spec = spec
        self._search_path = Path(search_path)
        self._blocked_s = blocked_s
        self._others = [process.pid for process in descendants([os.getpid()])]
        self._processes: list[EpisodeProcess] = []
        self._idle: list[EpisodeProcess] = []  # of those that play one episode at a time
        self._common: EpisodeProcess | None = None
        self._starting = asyncio.Lock()
        self._numbers = count()
        self._playing: dict[str, asyncio.Task[Played]] = {}

    async def start(self) -> str:
        """Have the task loaded; returns what the user calls it. Raises ``TaskError``."""
        return (await self._shared()).name

    async def play(self, key: str, prompt: Prompt, access: ModelAccess, apart: bool) -> Played:
        """Play one episode, in a process that it has to itself if it shall be ``apart``. ``key`` is its own.

        Raises ``TaskError`` when the task can no longer be loaded.
        """
        playing = self._playing[key] = asyncio.create_task(self._play(prompt, access, apart))
        try:
            return await playing
        except asyncio.CancelledError:
            return Played(RewardFailure("it was cancelled"))
        finally:
            del self._playing[key]

    async def cancel(self, keys: list[str]) -> None:
        """Stop these episodes, where they are being played."""
        for key in keys:
            if (playing := self._playing.get(key)) is not None:
                playing.cancel()

    async def stop(self) -> None:
        """End all processes, with everything that came from them."""
        for process in list(self._processes):
            process.close("the run ends")

    async def _play(self, prompt: Prompt, access: ModelAccess, apart: bool) -> Played:
        process = await (self._own() if apart else self._shared())
        try:
            played = await process.play(next(self._numbers), prompt, access)
        except asyncio.CancelledError:
            process.retired = process.retired or apart
            raise
        process.retire_when_idle()
        if not apart:
            return played
        if not process.retired:
            self._idle.append(process)
        # Who ends a process of its own has no other to blame.
        return Played(played.score, Retry.RESTART) if played.retry is Retry.ISOLATED else played

    async def _shared(self) -> EpisodeProcess:
        async with self._starting:
            if self._common is None or self._common.retired:
                self._common = await self._start()
            return self._common

    async def _own(self) -> EpisodeProcess:
        while self._idle:
            if not (process := self._idle.pop()).retired:
                return process
        return await self._start()

    async def _start(self) -> EpisodeProcess:
        process = EpisodeProcess(self._spec, self._search_path, self._blocked_s, self._sweep)
        self._processes.append(process)
        await process.start()
        return process

    def _sweep(self) -> None:
        """Kill whatever came from processes that are gone."""
        self._processes = [process for process in self._processes if not process.closed]
        kill_descendants([*self._others, *(process.pid for process in self._processes)])
