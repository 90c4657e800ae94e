"""The actor that plays episodes: in one worker process, and isolated ones in processes of their own."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure
from asyncrl_cli.tasks.base import ModelAccess
from asyncrl_cli.workers.actor import WorkerActor
from asyncrl_cli.workers.messages import Played, Retry, Work
from asyncrl_cli.workers.process import WorkerProcess


class EpisodeActor(WorkerActor):
    """Plays as many episodes at a time as it is asked to."""

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._common: WorkerProcess | None = None
        self._idle: list[WorkerProcess] = []
        """Of those that play one episode at a time."""
        self._starting = asyncio.Lock()
        self._playing: dict[str, asyncio.Task[Played]] = {}

    async def start(self) -> str:
        """Have the task loaded; returns what the user calls it. Raises ``TaskError``."""
        return (await self._common_process()).loaded.names[""]

    async def play(self, key: str, prompt: Prompt, access: ModelAccess, isolated: bool) -> Played:
        """Play one episode, ``isolated`` in a process that it has to itself. ``key`` names it.

        Raises ``TaskError`` when the task can no longer be loaded.
        """
        work = self._play_isolated(prompt, access) if isolated else self._play(prompt, access)
        playing = self._playing[key] = asyncio.create_task(work)
        try:
            return await playing
        except asyncio.CancelledError:
            return Played(RewardFailure("it was cancelled"))
        finally:
            del self._playing[key]

    async def cancel(self, keys: list[str]) -> None:
        """Stop these episodes, those of them that are being played here."""
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
        process = self._idle.pop() if self._idle else await self.start_process(Work.EPISODES)
        try:
            played = await process.play(prompt, access)
        except asyncio.CancelledError:
            process.retired = True
            raise
        process.close_if_idle()
        if process.usable:
            self._idle.append(process)
        # There is no other episode that may have ended the process.
        return Played(played.score, Retry.RESTART) if played.retry is Retry.ISOLATED else played

    async def _common_process(self) -> WorkerProcess:
        async with self._starting:
            if self._common is None or self._common.retired:
                self._common = await self.start_process(Work.EPISODES)
            return self._common
