"""The actors that run tasks' code, and the gateway that episodes call, for training and evaluation."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl_cli.core.files import atomic_write
from asyncrl_cli.data.prompt_encoder import PromptEncoder
from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.episodes import Episodes, EpisodeWorkers
from asyncrl_cli.orchestrator.evaluation import HeldOut, encoded
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.gateway_client import GatewayClient, setup_of
from asyncrl_cli.orchestrator.outside_sessions import OutsideSessions
from asyncrl_cli.orchestrator.scoring import Scoring
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.spec.inputs import TaskSpec
from asyncrl_cli.system.supervised_actor import RestartBudget
from asyncrl_cli.tasks.ready.external import External


class TaskActors:
    """The actors of the run's task and of the further evaluation sets' tasks. Call ``start``, then ``connect``."""

    def __init__(
        self,
        experiment: Experiment,
        factory: ActorFactory,
        budget: RestartBudget,
        outside: OutsideSessions | None = None,
        access_file: Path | None = None,
    ) -> None:
        """``outside`` plays the run's episodes if its task is ``external``. ``access_file``: where outside clients find
        the gateway's address and their token; a resumed run keeps both."""
        self._spec = spec = experiment.spec
        self._episodic = experiment.episodic
        self._task_objects = experiment.tasks
        self._factory = factory
        self._budget = budget
        self._all_workers: list[EpisodeWorkers] = []
        self._gateway: GatewayClient | None = None
        self.scoring = self._make_scoring("", spec.task)
        self._outside = outside
        self._access_file = access_file
        self._workers: EpisodeWorkers | OutsideSessions | None = None
        if "" in self._episodic and not isinstance(experiment.tasks.get(""), External):
            self._workers = self._make_workers(spec.task, "episode-worker")
        elif outside is not None:
            self._workers = outside
        self.episodes: Episodes | None = None
        """Plays the rollouts of the run's task, if they are episodes."""

    async def start(self) -> None:
        """Load the run's task. Raises ``UserError`` if it cannot be loaded."""
        await (self.scoring.start() if self._workers is None else self._workers.start())

    async def connect(
        self, client: GenerationClient, model_folder: str, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Start the gateway if any task has episodes. ``client`` serves their requests. ``on_progress`` is called for
        each call of an episode and each scored response."""
        self._on_progress = self.scoring.on_progress = on_progress
        if not self._episodic:
            return
        setup = setup_of(self._spec, model_folder, self._spec.name)
        answer, port = None, 0
        if self._outside is not None and self._access_file is not None:
            token, port = _known_access(self._access_file)
            setup = replace(setup, client_token=token, secret=token.encode())
            self._outside.on_demand = client.room.set
            answer = self._outside.answer
        self._gateway = GatewayClient(
            setup, self._factory.gateway, generate=client.generate, budget=self._budget, answer=answer, port=port
        )
        url = await self._gateway.start()
        if self._access_file is not None and setup.client_token is not None:
            with atomic_write(self._access_file, private=True, durable=True) as file:
                file.write(json.dumps({"url": url, "token": setup.client_token}).encode())
        self._playing = partial(Episodes, self._spec, client=client, gateway=self._gateway, on_progress=on_progress)
        if self._workers is not None:
            self.episodes = self._playing(self._spec.task, workers=self._workers, scoring=self.scoring)

    def held_out(self, name: str, prompts: Sequence[Prompt], tokenizer: Any, warn: Callable[[str], None]) -> HeldOut:
        """The prompts of an evaluation set with the part that scores the responses. ``name`` "": ``data.eval``."""
        episodic = name in self._episodic
        set_spec = self._spec.evaluation.sets.get(name)
        location = "data.eval" if set_spec is None else f"evaluation.sets.{name}.data"
        encoder = PromptEncoder.of(self._spec, tokenizer, episodic)
        rows = encoded(prompts, encoder=encoder, location=location, warn=warn)
        if set_spec is None or set_spec.task is None:
            return HeldOut(rows, self.scoring, self.episodes)
        scoring = self._make_scoring(name, set_spec.task)
        scoring.on_progress = self._on_progress
        if not episodic:
            return HeldOut(rows, scoring)
        workers = self._make_workers(set_spec.task, f"episode-worker-{name}")
        return HeldOut(rows, scoring, self._playing(set_spec.task, workers=workers, scoring=scoring))

    async def stop(self) -> None:
        """End all episodes, then the gateway, in bounded time."""
        # Episodes first: a running agent that finds no gateway would count as failed.
        await asyncio.gather(*(workers.stop() for workers in self._all_workers), return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.stop()

    def _make_scoring(self, name: str, task: TaskSpec) -> Scoring:
        make_actor = partial(self._factory.scorer, task)
        return Scoring(task, make_actor, budget=self._budget, task_object=self._task_objects[name])

    def _make_workers(self, task: TaskSpec, name: str) -> EpisodeWorkers:
        make_actor = partial(self._factory.episode_worker, task)
        workers = EpisodeWorkers(task.episode, make_actor=make_actor, budget=self._budget, name=name)
        self._all_workers.append(workers)
        return workers


def _known_access(file: Path) -> tuple[str, int]:
    """The token and the port that outside clients know from an earlier driver; a new token and 0 without one."""
    try:
        access = json.loads(file.read_text())
        return str(access["token"]), int(access["url"].rpartition(":")[2])
    except (OSError, ValueError, KeyError):
        return secrets.token_urlsafe(32), 0
