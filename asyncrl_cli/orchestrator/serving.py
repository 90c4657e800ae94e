"""`asyncrl serve`: engines and the gateway, without a trainer.

The engines load the model from its folder, and its weights count as one version that never changes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asyncrl_cli.core.errors import RunError, UserError
from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.cluster import Actors, ray_cluster, ray_is_lost, while_ray_lives
from asyncrl_cli.orchestrator.engines import EngineKeeper, client_of
from asyncrl_cli.orchestrator.gateway_client import GatewayClient, setup_of
from asyncrl_cli.orchestrator.interrupts import Interrupted, Stop, stop_on_signals, until_stopped
from asyncrl_cli.rollout.open_requests import EngineState
from asyncrl_cli.rollout.response_text import decoder, end_tokens
from asyncrl_cli.runs.checkpoints import Checkpoint, verified_checkpoint
from asyncrl_cli.runs.directory import MODEL, RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.logs import writable_folder
from asyncrl_cli.system.supervised_actor import RestartBudget, not_recorded


@dataclass(frozen=True, slots=True)
class Served:
    """What to serve."""

    spec: ExperimentSpec  # how the engines run
    name: str  # the model's name for clients
    what: str  # a description of the model for the user
    version: int  # the weight version that the weights count as
    logs: Path  # the folder for the logs of the processes
    model: Callable[[Path], Path]
    """Returns the model's folder; it may write the model into the folder that it gets as its argument."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address, key and name that clients need."""

    base_url: str
    api_key: str
    model: str


def served_run(run: RunDirectory, spec: ExperimentSpec, step: int | None) -> Served:
    """The model of a run: with ``step`` this step's checkpoint; otherwise the final model, or if there is none, the
    newest checkpoint.

    Raises ``RunError`` when there is none.
    """
    final = run.path / MODEL
    if step is None and run.state.phase == "finished" and final.is_dir():
        trained = run.state.step
        what, model = f"the final model of {run.run_id}", lambda _: final
    else:
        checkpoint = verified_checkpoint(run, step)
        if checkpoint is None:
            raise RunError(
                "the run has saved no model yet",
                location=run.run_id,
                hint=f"wait for its first checkpoint, or serve its initial model: asyncrl serve "
                f"{run.path / 'spec.yaml'}",
            )
        trained = checkpoint.step
        what, model = f"step {trained} of {run.run_id}", partial(_export, run, spec, checkpoint)
    logs = writable_folder(run.path / "logs" / "serve")
    return Served(
        spec, name=run.run_id, what=what, version=trained // spec.pipeline.publish_every, logs=logs, model=model
    )


def served_spec(spec: ExperimentSpec, model: Path) -> Served:
    """The model in a folder, with the settings of a spec."""
    logs = writable_folder(spec.runs_dir.absolute() / "serve" / spec.name)
    return Served(
        spec, name=spec.name, what=f"the initial model of {spec.name}", version=0, logs=logs, model=lambda _: model
    )


def without_training(spec: ExperimentSpec) -> ExperimentSpec:
    """The settings of engines that serve a saved model: its adapters are merged into its weights, and no trainer
    uses the experts that an engine would record."""
    model = spec.model.model_copy(update={"lora": None})
    algorithm = spec.algorithm.model_copy(update={"router_replay": False})
    return spec.model_copy(update={"model": model, "algorithm": algorithm})


def serve(
    served: Served, ready: Callable[[Address], None], status: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM, which raise ``Interrupted``; ``ready`` is called when clients can connect.

    All processes that were started have ended when this returns. Raises ``UserError`` with the cause of a failure.
    """
    try:
        actors = Actors(served.spec.rollout.min_engines, 0)
        with stop_on_signals() as stop, ray_cluster(served.spec, served.logs, actors):
            asyncio.run(_serve(served, ready=ready, status=status, warn=warn, stop=stop))
    except KeyboardInterrupt:  # before an event loop handled signals
        raise Interrupted from None


async def _serve(
    served: Served,
    ready: Callable[[Address], None],
    status: Callable[[str], None],
    warn: Callable[[str], None],
    stop: Stop,
) -> None:
    spec = without_training(served.spec)
    stop.attach()

    async def work(temporary: Path) -> None:
        from asyncrl_cli.train.model.tokenizer import load_tokenizer

        status("reading the model")
        folder = await asyncio.to_thread(served.model, temporary / "model")
        tokenizer = await asyncio.to_thread(load_tokenizer, folder, spec.model.chat_template)
        decode = decoder(tokenizer, end_tokens(folder, tokenizer), spec.task.special_tokens == "shown")
        client = client_of(spec, engines, decode)
        keeper = EngineKeeper(client, _OwnWeights())
        api_key = secrets.token_urlsafe(32)
        setup = setup_of(spec, model_folder=str(folder), model=served.name, api_key=api_key)
        gateway = GatewayClient(setup, make_actor=factory.gateway, generate=client.generate, budget=budget)
        url = await gateway.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(gateway.kept())
                status("starting engines")
                model.set_result(folder)
                await asyncio.gather(*(engine.running() for engine in engines))
                for engine in client.engines:
                    group.create_task(keeper.keep(engine))
                ready(Address(f"{url}/v1", api_key, served.name))
        finally:
            await gateway.stop()

    budget = RestartBudget(spec.pipeline.max_restarts, not_recorded, warn)
    factory = ActorFactory(spec, run_path=served.logs, search_path=Path.cwd(), log_folder=served.logs)
    model: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
    engines = [
        factory.engine(f"engine-{index}", folder=model, budget=budget, version=served.version)
        for index in range(spec.rollout.min_engines)
    ]
    # Below Ray's folder, which the reaper removes even after a kill; engines on other hosts need a shared folder.
    shared = served.logs if spec.cluster.address is not None else os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="model-", dir=shared) as temporary:
        try:
            await until_stopped(while_ray_lives(work(Path(temporary)), "start the server again"), stop)
        except* UserError as errors:
            raise errors.exceptions[0] from None
        finally:
            if not ray_is_lost():
                await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)


class _OwnWeights:
    """The engines have loaded them when they start."""

    async def bring_up(self, engine: EngineState) -> None:
        engine.serving = True


def _export(run: RunDirectory, spec: ExperimentSpec, checkpoint: Checkpoint, folder: Path) -> Path:
    from asyncrl_cli.train.model.initial import model_stub_path
    from asyncrl_cli.train.model.saving import export_model

    export_model(
        checkpoint, model_stub=model_stub_path(spec.model, run.model_stub), folder=folder, lora=spec.model.lora
    )
    return folder
