"""How the actors of a run are made, and how they start together.

Starting takes each actor seconds, so everything that can start at once does: engines from the model's stub
while trainer rank 0 makes its weights.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.orchestrator.placement import engine_wants, placed, rank_wants
from asyncrl_cli.orchestrator.restart_budget import RestartBudget
from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.records.groups import BufferSettings
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import START_TIMEOUT_S, ActorDied, NoAnswer, wait_for

MANY = 100_000
"""Calls that a runner takes at a time: as many as it is asked."""


@dataclass(frozen=True, slots=True)
class ActorFactory:
    """Asks Ray for actors; a call returns at once. Names are those of the log files."""

    spec: ExperimentSpec
    run_path: Path
    search_path: Path
    log_folder: Path | None = None

    @property
    def _logs(self) -> str:
        return str(self.log_folder or self.run_path / "logs")

    def engine(self, name: str) -> Any:
        import ray

        from asyncrl_cli.rollout.engine_settings import engine_environment
        from asyncrl_cli.rollout.worker import RolloutWorker

        wants = engine_wants(self.spec)
        options = ray.remote(RolloutWorker).options(
            num_cpus=wants["CPU"],
            num_gpus=wants["GPU"],
            runtime_env={"env_vars": engine_environment(self.spec)},
        )
        return options.remote(name, self.spec, self._logs)

    def trainer(self, rank: int) -> Any:
        import ray

        from asyncrl_cli.train.deepspeed_engine import trainer_environment
        from asyncrl_cli.train.worker import TrainerWorker

        wants = rank_wants(self.spec)
        options = ray.remote(concurrency_groups={"watch": 1})(TrainerWorker).options(
            num_cpus=wants["CPU"],
            num_gpus=wants["GPU"],
            runtime_env={"env_vars": trainer_environment(self.spec)},
        )
        return options.remote(rank, self.spec, self._logs)

    def scorer(self, task: TaskSpec) -> Any:
        import ray

        from asyncrl_cli.workers.reward_actor import RewardActor

        return ray.remote(RewardActor).options(num_cpus=0).remote("scorer", task, str(self.search_path), self._logs)

    def runner(self, task: TaskSpec, name: str) -> Any:
        import ray

        from asyncrl_cli.workers.episode_actor import EpisodeActor

        # Where the driver is, there is the gateway. Calls are waited for here, and bounded here.
        options = ray.remote(EpisodeActor).options(num_cpus=0, scheduling_strategy=_here(), max_concurrency=MANY)
        return options.remote(name, task, str(self.search_path), self._logs)

    def gateway(self) -> Any:
        import ray

        from asyncrl_cli.gateway.actor import GatewayActor

        # Where the driver is, there are the runners.
        return ray.remote(GatewayActor).options(num_cpus=0, scheduling_strategy=_here()).remote(self._logs)

    def buffer(self) -> Any:
        import ray

        from asyncrl_cli.buffer.actor import Buffer

        # Where the driver is, there is the run's folder.
        options = ray.remote(Buffer).options(num_cpus=0, scheduling_strategy=_here())
        return options.remote(str(self.run_path / FILE), buffer_settings(self.spec), self._logs)


def _here() -> Any:
    """Schedules an actor on the driver's node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def buffer_settings(spec: ExperimentSpec) -> BufferSettings:
    """What the buffer needs to know of the spec."""
    pipeline = spec.pipeline
    return BufferSettings(
        groups_per_step=pipeline.groups_per_step,
        publish_every=pipeline.publish_every,
        max_staleness=pipeline.max_staleness,
        on_stale=pipeline.on_stale,
        total_steps=spec.stop.steps,
        group_size=spec.rollout.group_size,
        reject_uniform=spec.algorithm.uniform_groups == "reject",
        note_solved=spec.data.filter is not None,
    )


class EngineProcess:
    """One engine's actor, and the ones that take its place after it."""

    def __init__(self, factory: ActorFactory, name: str, version: int | None = None) -> None:
        """``version``: what the weights in the folder that the engine is started on count as; None where it gets its
        weights by publishing."""
        self.name = name
        self._factory = factory
        self._version = version
        self._pid: int | None = None
        self.actor = factory.engine(name)

    async def placed(self, warn: Callable[[str], None]) -> None:
        """Wait until Ray has room for the actor; ``warn`` is told what is missing. Raises ``RunError``."""
        await placed(self.actor.ping.remote(), self.name, engine_wants(self._factory.spec), warn)

    async def preload(self) -> None:
        """Import what ``start`` needs."""
        self._pid = await wait_for(self.actor.preload.remote(), self.name, START_TIMEOUT_S)

    async def start(self, folder: Path) -> str:
        """Start the engine on a model's folder (a stub, where weights are published); returns the Ray node's id."""
        node: str = await wait_for(self.actor.start.remote(str(folder), self._version), self.name, START_TIMEOUT_S)
        return node

    async def replace(self, folder: Path) -> None:
        """Make sure that the process is gone, and start another."""
        self.renew()
        await self.preload()
        await self.start(folder)

    def renew(self) -> None:
        """Make sure that the process is gone, and ask Ray for another."""
        self.kill()
        self.actor = self._factory.engine(self.name)

    def kill(self) -> None:
        """End the process, also one that hangs or is stopped; vLLM's own processes go with it."""
        import ray

        if self._pid is not None and self._factory.spec.cluster.address is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        ray.kill(self.actor)
        self._pid = None

    async def stop(self) -> None:
        """Let the engine stop its processes; what does not stop dies with the cluster."""
        await wait_for(self.actor.stop.remote(), self.name, 5.0)


async def start_fleet(
    engines: list[EngineProcess],
    trainers: TrainerRanks,
    model_stub: Callable[[], Path],
    checkpoint: Path | None,
    progress: Callable[[str], None],
    budget: RestartBudget,
) -> str:
    """Bring engines and trainer up; returns the initial model's folder. Those that die meanwhile are started again.

    Raises ``UserError`` with the first cause: a mistake in the settings ends the start at once.
    """
    progress("starting engines and trainer")
    folder = asyncio.create_task(asyncio.to_thread(model_stub))
    starting = [
        asyncio.create_task(_start_trainers(trainers, checkpoint, progress, budget)),
        *(asyncio.create_task(start_engine(engine, folder, budget)) for engine in engines),
    ]
    try:
        model_dir, *nodes = await asyncio.gather(*starting)
    finally:
        for task in (folder, *starting):
            task.cancel()
    if any(node != trainers.node for node in nodes):
        raise RunError(
            "an engine runs on another host than trainer rank 0, and weights travel through its memory",
            location="cluster",
            hint="give the run one host that has room for all engines and trainer rank 0",
        )
    return model_dir


async def _start_trainers(
    trainers: TrainerRanks, checkpoint: Path | None, progress: Callable[[str], None], budget: RestartBudget
) -> str:
    while True:
        try:
            await trainers.placed(budget.warn)
            await trainers.preload()
            model_dir = await trainers.prepare_model(progress)
            progress("starting trainer")
            await trainers.start(checkpoint)
        except TrainerLost as lost:
            await budget.spend("trainer", lost.name, lost.cause)
            trainers.renew()
        else:
            progress("starting engines")
            return model_dir


async def start_engine(engine: EngineProcess, folder: asyncio.Future[Path], budget: RestartBudget) -> str:
    """Start one engine on ``folder``; returns the Ray node's id.

    It is started again when its process dies or does not answer, and for no other reason: a mistake in the settings
    would come back. Raises ``UserError``.
    """
    while True:
        try:
            await engine.placed(budget.warn)
            await engine.preload()
            return await engine.start(await asyncio.shield(folder))
        except (ActorDied, NoAnswer) as error:
            await budget.spend("engine", engine.name, error.message)
            engine.renew()
