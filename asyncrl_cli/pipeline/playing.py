"""What episodes need beside the engines: the gateway, and runners for each task that calls the model itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from asyncrl_cli.pipeline.episodes import Episodes, Service
from asyncrl_cli.pipeline.faults import Faults
from asyncrl_cli.pipeline.fleet import ActorFactory
from asyncrl_cli.pipeline.runners import Runners
from asyncrl_cli.pipeline.scoring import Scoring
from asyncrl_cli.rollout.chat import ChatFormat
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.session import Limits, Sessions
from asyncrl_cli.spec.sections import ExperimentSpec, TaskSpec

if TYPE_CHECKING:
    from asyncrl_cli.rollout.gateway.server import Gateway


class Playing:
    """Gateway and runners of one run. What was started by the time of ``stop`` is stopped by it."""

    def __init__(self, spec: ExperimentSpec, factory: ActorFactory) -> None:
        self._spec = spec
        self._factory = factory
        self._runners: list[Runners] = []
        self._gateway: Gateway | None = None

    def runners(self, task: TaskSpec, faults: Faults, name: str = "runner") -> Runners:
        """The runners of a task, yet to be started; ``name`` is what their logs are called."""
        runners = Runners(task.episode, partial(self._factory.runner, task), faults, name)
        self._runners.append(runners)
        return runners

    async def open(self, client: GenerationClient, chat: ChatFormat) -> Service:
        """Start the gateway. Raises ``GatewayError``."""
        from asyncrl_cli.pipeline.serving import new_session
        from asyncrl_cli.rollout.gateway.server import start_gateway

        sessions = Sessions()
        model = self._spec.name
        spec = self._spec.rollout.gateway
        gateway = await start_gateway(spec, chat, sessions, new_session(self._spec, chat, client), model)
        self._gateway = gateway
        return Service(chat, sessions, gateway.session_url, gateway.api_key, model)

    def episodes(
        self,
        task: TaskSpec,
        client: GenerationClient,
        service: Service,
        runners: Runners,
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
            client, service, runners, scoring, limits=limits, retries=rollout.retries, on_progress=on_progress
        )

    async def stop(self) -> None:
        """Stop everything, in bounded time; agents first, so that none finds nobody there."""
        await asyncio.gather(*(runners.stop() for runners in self._runners), return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.stop()
