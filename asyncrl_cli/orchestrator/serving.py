"""Runs engines without a trainer, for `asyncrl serve` and `asyncrl evaluate`.

The engines load the model from its folder. Its weights count as one version that never changes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl_cli.core.errors import RunError, first_cause
from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.cluster import Actors, ray_cluster, ray_is_lost, while_ray_lives
from asyncrl_cli.orchestrator.engines import client_of, keep_engine
from asyncrl_cli.orchestrator.gateway_client import GatewayClient, setup_of
from asyncrl_cli.orchestrator.interrupts import Interrupted, Stop, stop_on_signals
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.rollout.open_requests import EngineState
from asyncrl_cli.rollout.response_text import decoder, end_tokens
from asyncrl_cli.runs.checkpoints import Checkpoint, verified_checkpoint
from asyncrl_cli.runs.directory import MODEL, RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec, StopSpec, TrainerSpec
from asyncrl_cli.system.logs import writable_folder
from asyncrl_cli.system.supervised_actor import RestartBudget, not_recorded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """A model to serve, and the engines' settings."""

    spec: ExperimentSpec
    name: str  # the model's name for clients
    description: str  # a description of the model for the user
    step: int  # the step of its weights; 0 for a model that no run has trained
    logs: Path  # the folder for the processes' logs
    model: Callable[[Path], Path]
    """Returns the model's folder. It may write the model to its argument."""

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.step // self.spec.pipeline.publish_every


@dataclass(frozen=True, slots=True)
class Address:
    """The address, key and name that clients need."""

    base_url: str
    api_key: str
    model: str


def served_run(run: RunDirectory, spec: ExperimentSpec, step: int | None, command: str = "serve") -> Served:
    """A run's model: the checkpoint of ``step`` if given, otherwise the final model or else the newest checkpoint.
    ``command`` names the folder of the logs. Raises ``RunError`` if there is no model."""
    final = run.path.absolute() / MODEL
    logs = run.path / "logs" / command
    if step is None and run.state.phase == "finished" and final.is_dir():
        description = f"the final model of {run.run_id}"
        return replace(
            served_folder(spec, final, logs=logs, description=description), name=run.run_id, step=run.state.step
        )
    checkpoint = verified_checkpoint(run, step)
    if checkpoint is None:
        raise RunError(
            "the run has saved no model yet",
            location=run.run_id,
            hint=f"wait for its first checkpoint, or {command} its initial model: asyncrl {command} "
            f"{run.path / 'spec.yaml'}",
        )
    return Served(
        spec,
        name=run.run_id,
        description=f"step {checkpoint.step} of {run.run_id}",
        step=checkpoint.step,
        logs=writable_folder(logs),
        model=partial(_export, run, spec, checkpoint),
    )


def served_folder(spec: ExperimentSpec, folder: Path, logs: Path, description: str) -> Served:
    """The model in a folder, with the other settings of a spec."""
    spec = saved_model(spec, str(folder))
    return Served(
        spec, name=spec.name, description=description, step=0, logs=writable_folder(logs), model=lambda _: folder
    )


def saved_model(spec: ExperimentSpec, path: str) -> ExperimentSpec:
    """The spec with the saved model at ``path`` (a folder, or a hub id)."""
    saved = {"path": path, "init": None, "warm_start": None, "lora": None}
    return spec.model_copy(update={"model": spec.model.model_copy(update=saved)})


def without_training(spec: ExperimentSpec) -> ExperimentSpec:
    """The spec without the settings that only training needs: a saved model's adapters are merged, and no trainer needs
    recorded experts, GPUs or training prompts."""
    changes = {
        "model": spec.model.model_copy(update={"lora": None}),
        "algorithm": spec.algorithm.model_copy(update={"router_replay": False}),
        "trainer": TrainerSpec(),
        "stop": StopSpec(steps=1),
    }
    return spec.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class Engines:
    """A saved model's engines, which may still start, and the objects that a command needs to use them."""

    folder: Path  # the model's folder
    tokenizer: Any
    client: GenerationClient
    factory: ActorFactory
    budget: RestartBudget
    serving: Awaitable[None]
    """Done when all engines serve."""


def use_engines(
    served: Served,
    use: Callable[[Engines], Awaitable[T]],
    *,
    again: str,
    status: Callable[[str], None],
    warn: Callable[[str], None],
    search_path: Path | None = None,
) -> T:
    """Start engines, and return the result of ``use``, which begins while they start.

    ``again``: the error's hint if Ray's processes die. ``search_path``: the folder of the user's modules. All started
    processes have ended when this returns. Raises ``Interrupted`` after Ctrl-C or SIGTERM, otherwise ``UserError``.
    """
    spec = without_training(served.spec)

    async def start_and_use(stop: Stop) -> T:
        stop.attach()
        budget = RestartBudget(spec.pipeline.max_restarts, not_recorded, warn)
        factory = ActorFactory(spec, served.logs, search_path or Path.cwd())
        model: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        engines = [
            factory.engine(f"engine-{index}", folder=model, budget=budget, version=served.version)
            for index in range(spec.rollout.min_engines)
        ]

        async def run(temporary: Path) -> T:
            from asyncrl_cli.data.tokenizer import load_tokenizer

            status("reading the model")
            folder = await asyncio.to_thread(served.model, temporary / "model")
            tokenizer = await asyncio.to_thread(load_tokenizer, folder, spec.model.chat_template)
            decode = decoder(tokenizer, end_tokens(folder, tokenizer), spec.task.special_tokens == "shown")
            client = client_of(spec, engines, decode)
            gpu_turn = asyncio.Event()
            gpu_turn.set()  # no trainer needs the GPUs
            keeper_tasks: list[asyncio.Task[Any]] = []
            async with asyncio.TaskGroup() as group:

                async def start() -> None:
                    status("starting engines")
                    model.set_result(folder)
                    await asyncio.gather(*(engine.running() for engine in engines))
                    for engine in client.engines:
                        keeping = keep_engine(engine, client, _serve_own_weights, gpu_turn=gpu_turn)
                        keeper_tasks.append(group.create_task(keeping))

                serving = group.create_task(start())
                result = await use(
                    Engines(folder, tokenizer, client=client, factory=factory, budget=budget, serving=serving)
                )
                for task in (serving, *keeper_tasks):
                    task.cancel()
            return result

        # Below Ray's folder, which the reaper removes even after a kill; engines on other hosts need a shared folder.
        shared = served.logs if spec.cluster.address is not None else os.environ.get("TMPDIR")
        with tempfile.TemporaryDirectory(prefix="model-", dir=shared) as temporary:
            try:
                return await while_ray_lives(run(Path(temporary)), again, stop)
            except BaseExceptionGroup as group:
                raise first_cause(group) from None
            finally:
                if not ray_is_lost():
                    await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)

    try:
        actors = Actors(spec.rollout.min_engines, 0)
        with stop_on_signals() as stop, ray_cluster(spec, served.logs, actors):
            return asyncio.run(start_and_use(stop))
    except KeyboardInterrupt:  # before an event loop handled signals
        raise Interrupted from None


def serve(
    served: Served,
    *,
    ready: Callable[[Address], None],
    check: Callable[[Any], str],
    status: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C or SIGTERM. ``ready`` is called when clients can connect. ``check`` returns a warning about
    the tokenizer, or an empty text. Raises like ``use_engines``."""

    async def serve_requests(engines: Engines) -> None:
        if warning := await asyncio.to_thread(check, engines.tokenizer):
            warn(warning)
        api_key = secrets.token_urlsafe(32)
        setup = setup_of(engines.factory.spec, model_folder=str(engines.folder), model=served.name, api_key=api_key)
        gateway = GatewayClient(
            setup, make_actor=engines.factory.gateway, generate=engines.client.generate, budget=engines.budget
        )
        url = await gateway.start()
        try:
            await engines.serving
            ready(Address(f"{url}/v1", api_key, served.name))
            await gateway.wait_until_lost()
        finally:
            await gateway.stop()

    use_engines(served, serve_requests, again="start the server again", status=status, warn=warn)


async def _serve_own_weights(engine: EngineState) -> None:
    engine.serving = True  # engines without a trainer load their weights when they start


def _export(run: RunDirectory, spec: ExperimentSpec, checkpoint: Checkpoint, folder: Path) -> Path:
    from asyncrl_cli.train.model.initial import model_stub_path
    from asyncrl_cli.train.model.saving import export_model

    export_model(
        checkpoint,
        model_stub=model_stub_path(spec.model, run.model_stub),
        folder=folder,
        lora=spec.model.lora,
        images=spec.model.max_images > 0,
    )
    return folder
