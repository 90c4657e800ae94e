"""Creates a run's actors, and starts them together.

An actor takes seconds to start, so actors start in parallel where possible: engines start from the model's stub (its
config and tokenizer) while trainer rank 0 makes the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.orchestrator.engines import EngineProcess
from asyncrl_cli.orchestrator.nodes import bundle_wants, engine_wants, rank_wants
from asyncrl_cli.orchestrator.placement import PlacementGroup
from asyncrl_cli.orchestrator.replicas import Replicas
from asyncrl_cli.orchestrator.trainers import WATCHING, WRITING, TrainerLost, TrainerRanks
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import shares_gpus
from asyncrl_cli.system.remote import on_node
from asyncrl_cli.system.supervised_actor import RestartBudget

CONCURRENT_CALLS = 100_000
"""Concurrent calls that an episode worker accepts, in practice without a limit."""


@dataclass(frozen=True, slots=True)
class ActorFactory:
    """Creates Ray actors. Calls do not wait for the actor's start. An actor's name is also its log file's name."""

    spec: ExperimentSpec
    logs: Path  # the folder for the processes' logs
    search_path: Path

    def trainer_group(self) -> PlacementGroup:
        """The placement group of all trainer ranks, and of the engines that share their GPUs."""
        spec = self.spec
        who = "the trainer and its engines" if shares_gpus(spec) else "the trainer"
        return PlacementGroup(who, bundle_wants(spec), selector=spec.cluster.trainer, count=spec.trainer.ranks)

    def engine(
        self,
        name: str,
        *,
        folder: Awaitable[Path],
        budget: RestartBudget,
        trainer: PlacementGroup | None = None,
        version: int | None = None,
    ) -> EngineProcess:
        """The engine ``engine-N``, without starting it. For the arguments see ``EngineProcess``. An engine that shares
        a GPU with a rank gets bundle N of ``trainer``, the placement group of all ranks."""
        spec, wants, index = self.spec, engine_wants(self.spec), 0
        shares = trainer is not None and shares_gpus(spec)
        if trainer is not None and shares:
            group, index = trainer, int(name.removeprefix("engine-"))
        else:
            group = PlacementGroup(name, wants, selector=spec.cluster.engines)

        def make() -> Any:
            import ray

            from asyncrl_cli.rollout.engine_settings import engine_environment
            from asyncrl_cli.rollout.worker import RolloutWorker

            variables = engine_environment(spec)
            options = ray.remote(RolloutWorker).options(**group.options(index, wants), **self._starts_with(variables))
            return options.remote(name, spec, str(self.logs), variables)

        return EngineProcess(
            spec, name, make, folder=folder, budget=budget, group=group, shares_group=shares, version=version
        )

    def trainer(self, group: PlacementGroup, index: int) -> Any:
        import ray

        from asyncrl_cli.train.deepspeed_engine import trainer_environment
        from asyncrl_cli.train.worker import TrainerWorker

        variables = trainer_environment(self.spec)
        options = ray.remote(concurrency_groups={WATCHING: 1, WRITING: 1})(TrainerWorker).options(
            **group.options(index, rank_wants(self.spec)), **self._starts_with(variables)
        )
        return options.remote(self.spec, str(self.logs), variables)

    def ranks(self, limit_s: float, warn: Callable[[str], None], group: PlacementGroup | None = None) -> TrainerRanks:
        """All trainer ranks, without starting them. For ``limit_s`` and ``warn`` see ``TrainerRanks``."""
        return TrainerRanks(self.trainer, group or self.trainer_group(), self.search_path, limit_s, warn)

    def _starts_with(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Ray's option for a process with these environment variables.

        A local run does without it: the actor itself sets them, in a process that Ray started in advance and that has
        imported nothing (decision 0044). In a joined cluster, other code may have used the process.
        """
        return {} if self.spec.cluster.address is None else {"runtime_env": {"env_vars": variables}}

    def host_agent(self, name: str, node: str) -> Any:
        """The agent of the Ray node with this id."""
        from asyncrl_cli.weights.agent import HostAgent

        return self._on_node(HostAgent, name, node=node)

    def address_of(self, node: str) -> str:
        """The address at which other nodes reach a Ray node."""
        import ray

        if self.spec.cluster.address is None:
            return "127.0.0.1"
        return next((str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node), "")

    def scorer(self, task: TaskSpec) -> Any:
        from asyncrl_cli.workers.actors import RewardActor

        return self._on_node(RewardActor, "scorer", task, str(self.search_path))

    def episode_worker(self, task: TaskSpec, name: str) -> Any:
        from asyncrl_cli.workers.actors import EpisodeActor

        # The driver limits the number of episodes, not Ray.
        return self._on_node(EpisodeActor, name, task, str(self.search_path), max_concurrency=CONCURRENT_CALLS)

    def gateway(self) -> Any:
        from asyncrl_cli.gateway.actor import GatewayActor

        return self._on_node(GatewayActor)

    def _on_node(self, actor: type, *arguments: Any, node: str | None = None, **options: Any) -> Any:
        """An actor without resources in Ray, by default on the driver's node: it has the user's files, and gateway and
        episode workers reach each other there."""
        import ray

        placed_actor = ray.remote(actor).options(num_cpus=0, scheduling_strategy=on_node(node), **options)
        return placed_actor.remote(*arguments, str(self.logs))


async def start_all(
    engines: Sequence[EngineProcess],
    trainers: TrainerRanks,
    replicas: Replicas,
    *,
    checkpoint: Path | None,
    progress: Callable[[str], None],
    budget: RestartBudget,
    initial: asyncio.Future[Path],
    shared_gpus: bool,
) -> str:
    """Start engines, trainer ranks and the ranks' host agents; returns the initial model's folder.

    Actors that die are restarted; a mistake in the settings raises ``UserError``. ``initial`` gets the folder as soon
    as it exists. ``shared_gpus``: ranks load after the engines' start, because vLLM measures a GPU's free memory then
    and fails if another process changes it.
    """
    progress("starting engines and trainer")
    engines_up = [asyncio.create_task(engine.running()) for engine in engines]

    async def start_trainers() -> str:
        while True:
            try:
                await trainers.preload()
                for node in trainers.nodes:
                    replicas.expect(node)
                model_dir = await trainers.prepare_model()
                if not initial.done():
                    initial.set_result(Path(model_dir))
                if shared_gpus:
                    await asyncio.gather(*engines_up)
                progress("starting trainer")
                await trainers.start(checkpoint)
            except TrainerLost as lost:
                await budget.spend("trainer", lost.name, lost.cause)
            else:
                progress("starting engines")
                return model_dir

    trainers_up = asyncio.create_task(start_trainers())
    try:
        await asyncio.gather(trainers_up, *engines_up)
    finally:
        for task in (trainers_up, *engines_up):
            task.cancel()
    return trainers_up.result()
