"""Keeps engines serving: an engine that is lost is started again, alone, while the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.publisher import Engine
from asyncrl_cli.orchestrator.restart_budget import RestartBudget
from asyncrl_cli.rollout.client import EngineLost, EngineState, GenerationClient


class Weights(Protocol):
    """Where engines have their weights from: a ``Publisher``, or the folder that they start on."""

    async def bring_up(self, engine: Engine, serve: Callable[[], None]) -> None:
        """Have a new engine get its weights, and call ``serve()``. Raises ``RunError`` when it cannot."""
        ...


class EngineKeeper:
    """Serves and restarts the engines of one client."""

    def __init__(
        self,
        client: GenerationClient,
        weights: Weights,
        budget: RestartBudget,
        model_stub: Path,
        on_serving: Callable[[], None],
    ) -> None:
        """``model_stub`` is the folder that engines start on. ``on_serving`` hears that one has begun to serve."""
        self._client = client
        self._weights = weights
        self._budget = budget
        self._model_stub = model_stub
        self._on_serving = on_serving

    async def keep(self, engine: EngineState) -> None:
        """Serve with an engine, through its deaths, for ever. Raises ``RunError`` when there are too many."""
        while True:
            try:
                if not engine.serving:
                    await self._bring_up(engine)
                await self._client.collect(engine)
            except EngineLost as lost:
                await self._restart(engine, str(lost))

    async def _bring_up(self, engine: EngineState) -> None:
        def serve() -> None:
            engine.serving = True

        try:
            await self._weights.bring_up((engine.name, engine.process.actor), serve)
        except RunError as error:
            raise EngineLost(error.message) from error
        self._on_serving()

    async def _restart(self, engine: EngineState, cause: str) -> None:
        while True:
            self._client.reclaim(engine)
            await self._budget.spend("engine", engine.name, cause)
            try:
                await engine.process.replace(self._model_stub)
            except RunError as error:
                cause = error.message
            else:
                return
