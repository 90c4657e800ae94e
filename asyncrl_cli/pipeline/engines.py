"""Keeps engines serving: an engine that is lost is started again, alone, while the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl_cli.pipeline.dispatcher import Dispatcher, EngineLost, EngineState
from asyncrl_cli.pipeline.faults import Faults
from asyncrl_cli.pipeline.publisher import Publisher
from asyncrl_cli.runs.directory import RunError


class EngineKeeper:
    """Serves and restarts the engines of one dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        publisher: Publisher,
        faults: Faults,
        skeleton: Path,
        on_serving: Callable[[], None],
    ) -> None:
        """``on_serving`` hears that an engine has begun to serve."""
        self._dispatcher = dispatcher
        self._publisher = publisher
        self._faults = faults
        self._skeleton = skeleton
        self._on_serving = on_serving

    async def keep(self, engine: EngineState) -> None:
        """Serve with an engine, through its deaths, for ever. Raises ``RunError`` when there are too many."""
        while True:
            try:
                if not engine.serving:
                    await self._bring_up(engine)
                await self._dispatcher.collect(engine)
            except EngineLost as lost:
                await self._restart(engine, str(lost))

    async def _bring_up(self, engine: EngineState) -> None:
        def serve() -> None:
            engine.serving = True

        try:
            await self._publisher.bring_up((engine.name, engine.process.actor), serve)
        except RunError as error:
            raise EngineLost(error.message) from error
        await self._dispatcher.flush()
        self._on_serving()

    async def _restart(self, engine: EngineState, cause: str) -> None:
        while True:
            self._dispatcher.take_back(engine)
            await self._faults.restarting("engine", engine.name, cause)
            await self._dispatcher.flush()
            try:
                await engine.process.replace(self._skeleton)
            except RunError as error:
                cause = error.message
            else:
                return
