"""Trainer and engines take turns on the GPUs that they share, if nothing is generated while the trainer trains.

Invariant: during the trainer's turn every engine sleeps, or its process has ended. So engines start, load weights and
prove them only during their own turn (``EngineKeeper``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.open_requests import EngineState
from asyncrl_cli.system.remote import wait_for


class GpuTurns:
    """Puts engines to sleep for the trainer's steps.

    Attributes:
        engines: set while it is the engines' turn.
    """

    def __init__(self, client: GenerationClient, sleeping: bool, limit_s: float) -> None:
        """``sleeping``: whether engines sleep during the trainer's turn. ``limit_s``: seconds that an engine may take
        to fall asleep."""
        self.engines = asyncio.Event()
        self.engines.set()
        self._client = client
        self._sleeping = sleeping
        self._limit_s = limit_s

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator[None]:
        """The trainer's turn. An engine that cannot fall asleep is ended; its keeper starts another after the turn."""
        if not self._sleeping:
            yield
            return
        self.engines.clear()
        engines = list(self._client.engines)
        try:
            await asyncio.gather(*(self._put_to_sleep(engine) for engine in engines))
            yield
        finally:
            await asyncio.gather(*(self._call(engine, engine.process.actor, "wake_up") for engine in engines))
            self.engines.set()

    async def _put_to_sleep(self, engine: EngineState) -> None:
        # An engine that is starting must finish first, because vLLM measures the GPU's free memory during a start.
        await self._call(engine, await engine.process.running(), "sleep")

    async def _call(self, engine: EngineState, actor: Any, method: str) -> None:
        if actor is None or actor is not engine.process.actor:
            return
        try:
            await wait_for(getattr(actor, method).remote(), engine.name, self._limit_s)
        except UserError as error:
            if engine.serving:
                self._client.mark_dead(engine.name, f"it did not {method.replace('_', ' ')}: {error.message}")
            else:
                engine.process.kill()
