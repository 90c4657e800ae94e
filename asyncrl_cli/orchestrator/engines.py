"""Starts, serves with and restarts engines: a lost engine restarts alone, while the others continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import RunError, UserError
from asyncrl_cli.orchestrator.placement import PlacementGroup
from asyncrl_cli.records.generation import EngineRequest
from asyncrl_cli.rollout.client import EngineLost, GenerationClient
from asyncrl_cli.rollout.open_requests import EngineState
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import START_TIMEOUT_S, ActorLost, Unreachable, wait_for
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor

STOP_S = 5.0
"""Seconds that an engine may take to stop its processes before it is killed."""


class EngineProcess(SupervisedActor):
    """One engine's actor, through its restarts."""

    node = ""
    """Ray's node id, once it has started."""

    def __init__(
        self,
        spec: ExperimentSpec,
        name: str,
        make: Callable[[], Any],
        *,
        folder: Awaitable[Path],
        budget: RestartBudget,
        group: PlacementGroup,
        shares_group: bool = False,
        version: int | None = None,
    ) -> None:
        """``make()`` creates an actor in ``group``. ``folder``: the model's folder, only a stub if the engine gets its
        weights by publishing; ``version``: the version of the weights in the folder, or None for a stub.
        ``shares_group``: the group outlives the engine."""
        super().__init__("engine", name, make, self._bring_up, budget)
        self._group = group
        self._shares_group = shares_group
        self._spec = spec
        self._folder = asyncio.ensure_future(folder)
        self._version = version
        self._warn = budget.warn
        self._cache_bytes: int | None = None  # KV cache measured by the first start, if the engine shares its GPU
        group.ask()

    async def room(self) -> None:
        """Wait until Ray has room for the engine. A restart waits without a limit: other engines generate."""
        await self._group.wait_for_room(self._warn, None if self.node else START_TIMEOUT_S)

    async def join(self, waits: Callable[[str], None]) -> None:
        """Start once, in a run that can do without it. Room is waited for without a limit, because an autoscaler may
        see the request. ``waits`` gets a text about the missing resources.

        If the call is cancelled or raises ``UserError``, nothing of the engine remains.
        """
        try:
            await self._group.wait_for_room(waits, limit_s=None)
            await self.start_once()
        except BaseException:
            self.release()
            raise

    async def _bring_up(self, actor: Any) -> None:
        """Start the engine. The first start raises a ``UserError``: a mistake in the settings would recur. At a restart
        the settings are known to work, so any error counts as a loss and another process is started."""
        try:
            preloading = wait_for(actor.preload.remote(), self.name, START_TIMEOUT_S)
            pid = await self._group.first_answer(preloading, self._warn)
            # On another host, the pid could belong to any process here.
            self.pid = pid if self._spec.cluster.address is None else None
            start = actor.start.remote(str(await asyncio.shield(self._folder)), self._version, self._cache_bytes)
            self.node, self._cache_bytes = await wait_for(start, self.name, START_TIMEOUT_S)
        except RunError as error:
            if self.node and not isinstance(error, ActorLost):
                raise ActorLost(error.message, location=self.name) from error
            raise

    async def stop(self) -> None:
        """Let an engine on GPUs stop its processes. ``release`` kills processes that do not stop, and CPU engines."""
        # Stopping takes vLLM three seconds. On CPUs it leaves nothing behind when it is killed (decision 0044).
        if self.actor is not None and self._spec.rollout.gpus_per_engine:
            await wait_for(self.actor.stop.remote(), self.name, STOP_S)

    def release(self) -> None:
        """Kill the process, and release its resources."""
        super().release()
        if not self._shares_group:
            self._group.remove()

    async def end(self) -> None:
        """End the engine for good, in bounded time."""
        with suppress(RunError):
            await self.stop()
        self.release()


def client_of(
    spec: ExperimentSpec,
    engines: Sequence[EngineProcess],
    decode: Callable[[Any], str],
    on_progress: Callable[[], None] = lambda: None,
    on_engine_request: Callable[[EngineRequest], None] = lambda _: None,
) -> GenerationClient:
    """A client for these engines with the spec's limits. For the other arguments see ``GenerationClient``."""
    rollout = spec.rollout
    return GenerationClient(
        engines,
        slots=rollout.running_rollouts,
        retries=rollout.retries,
        hang_s=rollout.hang_seconds,
        decode=decode,
        on_progress=on_progress,
        on_engine_request=on_engine_request,
    )


BringUp = Callable[[EngineState], Awaitable[None]]
"""Gives a new engine its weights, and has it serve. Raises ``RunError`` if it fails."""


class GpuTurns:
    """Lets trainer and engines take turns on shared GPUs, if nothing is generated while the trainer trains.

    Invariant: during the trainer's turn every engine sleeps or its process has ended, because both together do not fit
    into the GPU's memory. So engines start, load and prove weights only during their own turn (``keep_engine``).
    """

    def __init__(self, client: GenerationClient, sleeping: bool, limit_s: float) -> None:
        """``sleeping``: True if engines sleep during the trainer's turn. ``limit_s``: seconds that an engine may take
        to fall asleep."""
        self.engines = asyncio.Event()
        """Set while it is the engines' turn."""
        self.engines.set()
        self._client = client
        self._sleeping = sleeping
        self._limit_s = limit_s

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator[None]:
        """The trainer's turn. An engine that does not fall asleep is killed; its keeper restarts it after the turn."""
        if not self._sleeping:
            yield
            return

        async def put_to_sleep(engine: EngineState) -> None:
            # An engine that is starting must finish first: vLLM measures the GPU's free memory during a start.
            await self._call(engine, await engine.process.running(), "sleep")

        self.engines.clear()
        engines = list(self._client.engines)
        try:
            await asyncio.gather(*map(put_to_sleep, engines))
            yield
        finally:
            await asyncio.gather(*(self._call(engine, engine.process.actor, "wake_up") for engine in engines))
            self.engines.set()

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


async def _never_left(engine: EngineState, unreachable: bool) -> str:
    return ""


async def keep_engine(
    engine: EngineState,
    client: GenerationClient,
    bring_up: BringUp,
    *,
    gpu_turn: asyncio.Event,
    why_left: Callable[[EngineState, bool], Awaitable[str]] = _never_left,
) -> str:
    """Serve with an engine and restart it until it leaves; returns why it left. Raises ``RunError`` after too many
    restarts.

    ``gpu_turn`` is set while engines may use their GPUs. ``why_left(engine, unreachable)`` returns why a lost engine is
    not restarted, or an empty text if it is. ``unreachable``: its process may still be alive.
    """
    while True:
        try:
            if not engine.serving:
                await gpu_turn.wait()
                await bring_up(engine)
            await client.collect(engine)
            continue  # withdrawn: it serves again when its host has the weights
        except (EngineLost, RunError) as lost:
            cause = lost.message if isinstance(lost, RunError) else str(lost)
            reasons = (lost, lost.__cause__)
        # Its requests first: a restart takes long, and other engines continue them now (decision 0005).
        client.reclaim(engine)
        if why := await why_left(engine, any(isinstance(reason, Unreachable) for reason in reasons)):
            return why
        await engine.process.lose(engine.process.actor, cause)
        await gpu_turn.wait()
        await engine.process.running()
