"""Keeps engines serving: an engine that is lost is started again, alone, while the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.rollout.client import EngineLost, EngineState, GenerationClient


class Weights(Protocol):
    """Where engines have their weights from: a ``Publisher``, or the folder that they start on."""

    async def bring_up(self, engine: EngineState) -> None:
        """Have a new engine get its weights, and serve. Raises ``RunError`` when it cannot."""
        ...


class EngineKeeper:
    """Serves and restarts the engines of one client."""

    def __init__(self, client: GenerationClient, weights: Weights, on_serving: Callable[[], None]) -> None:
        """``on_serving`` hears that an engine has begun to serve."""
        self._client = client
        self._weights = weights
        self._on_serving = on_serving

    async def keep(self, engine: EngineState) -> None:
        """Serve with an engine, through its deaths. Ends with ``RunError`` alone: when there are too many."""
        while True:
            try:
                if not engine.serving:
                    await self._weights.bring_up(engine)
                    self._on_serving()
                await self._client.collect(engine)
            except (EngineLost, RunError) as lost:
                cause = lost.message if isinstance(lost, RunError) else str(lost)
            # Its requests first: other engines go on with them while this one starts (decision 0015).
            self._client.reclaim(engine)
            await engine.process.lose(engine.process.actor, cause)
            await engine.process.running()
