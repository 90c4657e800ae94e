"""What episodes need beside the engines: the gateway, and runners for each task that calls the model itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from asyncrl_cli.gateway.session import Limits
from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.episode_workers import EpisodeWorkers
from asyncrl_cli.orchestrator.episodes import Episodes
from asyncrl_cli.orchestrator.gateway_client import GatewayClient, setup_of
from asyncrl_cli.orchestrator.restart_budget import RestartBudget
from asyncrl_cli.orchestrator.scoring import Scoring
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.spec.sections import ExperimentSpec


class EpisodeServices:
    """Gateway and workers of one run. What was started by the time of ``stop`` is stopped by it."""

    def __init__(self, spec: ExperimentSpec, factory: ActorFactory) -> None:
        self._spec = spec
        self._factory = factory
        self._workers: list[EpisodeWorkers] = []
        self._gateway: GatewayClient | None = None
        self._keeping: asyncio.Task[None] | None = None

    def workers(self, task: TaskSpec, budget: RestartBudget, name: str = "runner") -> EpisodeWorkers:
        """The workers of a task, yet to be started; ``name`` is what their logs are called."""
        workers = EpisodeWorkers(task.episode, partial(self._factory.runner, task), budget, name)
        self._workers.append(workers)
        return workers

    async def open(self, client: GenerationClient, model_folder: str, budget: RestartBudget) -> GatewayClient:
        """Start the gateway, with the tokenizer in ``model_folder``. Raises ``UserError``."""
        setup = setup_of(self._spec, model_folder, self._spec.name)
        gateway = self._gateway = GatewayClient(setup, self._factory.gateway, client.generate, budget)
        await gateway.start()
        self._keeping = asyncio.create_task(gateway.keep())
        # Whoever has a session gets its error, which ends the run.
        self._keeping.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return gateway

    def episodes(
        self,
        task: TaskSpec,
        client: GenerationClient,
        gateway: GatewayClient,
        workers: EpisodeWorkers,
        scoring: Scoring,
        on_progress: Callable[[], None],
    ) -> Episodes:
        """The episodes of a task."""
        rollout = self._spec.rollout
        limits = Limits(
            max_length=self._spec.model.max_length,
            max_call_tokens=rollout.max_response_tokens,
            max_calls=task.episode.max_calls,
            max_sampled_tokens=task.episode.max_tokens,
        )
        return Episodes(
            client, gateway, workers, scoring, limits=limits, retries=rollout.retries, on_progress=on_progress
        )

    async def stop(self) -> None:
        """Stop everything, in bounded time; agents first, so that none finds nobody there."""
        await asyncio.gather(*(workers.stop() for workers in self._workers), return_exceptions=True)
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.stop()
