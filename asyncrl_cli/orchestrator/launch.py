"""Runs an experiment from start to end: cluster, actors, loop, results.

``run_experiment`` starts Ray (cluster.py), then ``_start`` makes the run's parts:

    Buffer                      first, because it records the faults of all others
    ActorFactory                creates the actors; ``start_all`` starts engines, ranks and host agents together
    TaskActors                  scorer, episode workers and gateway: the actors that run the task's code
    GenerationClient, Watchdog, Evaluator, PromptSource     in the driver's process
    Orchestrator                the loop, which makes its own parts from these (loop.py)

Problems that can be detected in advance are raised before the first process starts. All started processes have ended
when ``run_experiment`` returns or raises.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.data.loader import PromptFilter, PromptLoader
from asyncrl_cli.data.prompt_encoder import PromptEncoder, first_prompts
from asyncrl_cli.data.tokenizer import load_tokenizer
from asyncrl_cli.inspect.health import HealthWatch
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.events import STALL
from asyncrl_cli.journal.schema import FILE
from asyncrl_cli.monitors.base import Ending, Monitor
from asyncrl_cli.monitors.mlflow.tracker import Mlflow
from asyncrl_cli.monitors.ray_metrics import RayMetrics
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator.actors import ActorFactory, start_all
from asyncrl_cli.orchestrator.cluster import ray_cluster, ray_is_lost, while_ray_lives
from asyncrl_cli.orchestrator.engines import EngineProcess, client_of
from asyncrl_cli.orchestrator.evaluation import Evaluator
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.interrupts import Interrupted, Stop, stop_on_signals
from asyncrl_cli.orchestrator.loop import Orchestrator
from asyncrl_cli.orchestrator.nodes import why_gone
from asyncrl_cli.orchestrator.outside_sessions import OutsideSessions
from asyncrl_cli.orchestrator.prompt_source import PromptSource
from asyncrl_cli.orchestrator.replicas import Replicas
from asyncrl_cli.orchestrator.task_actors import TaskActors
from asyncrl_cli.orchestrator.warm_start import CHECKPOINTS, WarmStart, recorded_updates, with_its_result
from asyncrl_cli.orchestrator.watchdog import Watchdog
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.groups import BufferSettings
from asyncrl_cli.rollout.response_text import decoder, end_tokens
from asyncrl_cli.runs.checkpoints import Checkpoint
from asyncrl_cli.runs.directory import ADAPTER, MODEL, WARM_START, RunDirectory
from asyncrl_cli.runs.recorder import Recorder
from asyncrl_cli.spec.sharing import shares_gpus
from asyncrl_cli.system.supervised_actor import RestartBudget
from asyncrl_cli.tasks.ready.external import External
from asyncrl_cli.train.model.initial import model_stub
from asyncrl_cli.train.model.probe import prompt_tokens

INTERRUPT_S = 5.0
"""Seconds that an interrupted run may take to save a checkpoint."""


@dataclass(frozen=True, slots=True)
class DriverStart:
    """How a driver begins: with a new run (``train``), or at the end of the run's journal (``resume``)."""

    kind: Literal["train", "resume"] = "train"
    note: str = ""  # for the journal
    checkpoint: Checkpoint | None = None  # the trainer's start; None for the initial model
    base: dict[str, Any] | None = None
    """The state at which the history begins without the old journal (a checkpoint's ``DurableLedger.fallback``)."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run's folder does not tell. ``notes`` are by monitor."""

    seconds: float
    health: HealthWatch = field(default_factory=partial(HealthWatch, {}))
    notes: Mapping[str, str] = field(default_factory=dict)


def run_experiment(experiment: Experiment, run: RunDirectory, console: Monitor, start: DriverStart) -> RunResult:
    """Run an experiment to the last step. Afterwards the run's state on disk shows how it ended, also after an error.

    Raises ``UserError`` with the cause if the run cannot continue, ``Interrupted`` after Ctrl-C or SIGTERM.
    """
    recorder = Recorder(run, console.warn)
    reporter = Reporter(recorder, console)
    for monitor in experiment.monitors:
        reporter.join(monitor)

    def close_files() -> None:
        if incomplete_files := recorder.close():
            console.warn(f"{run.run_id}: {incomplete_files}")

    def end(ending: Ending) -> None:
        # Does not wait for the disk: the monitors must hear of the end even if nothing can be written any more.
        recorder.update(phase=ending.phase, reason=ending.reason)
        for wait in (partial(reporter.finish, ending), close_files):
            try:
                wait()
            except KeyboardInterrupt:
                console.warn("interrupted while waiting for files and monitors of the run's end")
        console.status(ending.phase)

    try:
        with stop_on_signals() as stop, ray_cluster(experiment.spec, run.path / "logs"):
            result = asyncio.run(_run(experiment, recorder=recorder, reporter=reporter, start=start, stop=stop))
    except (KeyboardInterrupt, Interrupted):  # KeyboardInterrupt: before the event loop handled signals
        end(Ending("interrupted", reason="stopped by the user"))
        raise Interrupted from None
    except BaseException as error:
        end(_failure(error))
        raise
    end(Ending("finished", _in_short(run, result)))
    return replace(result, notes=dict(reporter.notes))


def _cause(error: BaseException) -> str:
    return hide(f"{type(error).__name__}: {error}")


def _failure(error: BaseException) -> Ending:
    return Ending("failed", hide(str(error)) or type(error).__name__, _cause(error))


def _in_short(run: RunDirectory, result: RunResult) -> str:
    accuracies = [f", held-out accuracy ({series}) {value:.3f}" for series, value in sorted(run.state.accuracy.items())]
    return f"finished {counted(run.state.step, 'step')} in {result.seconds:.0f} s{''.join(accuracies)}"


def link_model(run: Path, has_adapter: bool) -> None:
    """Make the warm start's model the model of a run without steps. An earlier driver may have begun it."""
    for name in (MODEL, ADAPTER):
        shutil.rmtree(run / name, ignore_errors=True)
    link = partial(shutil.copytree, copy_function=os.link)
    link(run / WARM_START, run / MODEL, ignore=shutil.ignore_patterns(ADAPTER))
    if has_adapter:
        link(run / WARM_START / ADAPTER, run / ADAPTER)


async def _run(
    experiment: Experiment, recorder: Recorder, reporter: Reporter, start: DriverStart, stop: Stop
) -> RunResult:
    started = time.monotonic()
    spec, run = experiment.spec, recorder.run
    stop.attach()
    orchestrator: Orchestrator | None = None
    ending = Ending("failed")
    closing: list[Callable[[], Awaitable[None]]] = []
    try:
        reporter.join(RayMetrics(run, spec))
        if spec.tracking.mlflow:
            reporter.join(Mlflow(run, spec))
        hint = f"asyncrl resume {run.argument}"
        if spec.model.warm_start is not None:
            work = _warm_started(experiment, recorder=recorder, reporter=reporter)
            experiment = await while_ray_lives(work, hint, stop)
        if not spec.stop.total:
            link_model(run.path, spec.model.lora is not None)
            result = RunResult(time.monotonic() - started)
            ending = Ending("finished", _in_short(run, result))
            return result
        starting = _start(experiment, recorder=recorder, start=start, reporter=reporter, closing=closing)
        orchestrator = await while_ray_lives(starting, hint, stop)
        recorder.update(phase="running", steps=spec.stop.total)
        await while_ray_lives(orchestrator.run(), hint, stop)
        result = RunResult(time.monotonic() - started, orchestrator.health)
        ending = Ending("finished", _in_short(run, result))
    except Interrupted:
        ending = Ending("interrupted")
        recorder.update(phase="interrupted")  # now, for users who look before the end
        await _save_before_leaving(orchestrator, reporter)
        raise
    except BaseException as error:
        ending = _failure(error)
        raise
    finally:
        if spec.tracking.mlflow:
            reporter.status("finishing MLflow's log")
            await asyncio.to_thread(recorder.wait)  # MLflow's log is made from these files
        # Before the cluster's end, which kills all the run's processes; monitors may have some.
        reporter.finish(ending)
        if not ray_is_lost():
            await asyncio.gather(*(close() for close in closing), return_exceptions=True)
    return result


async def _warm_started(experiment: Experiment, recorder: Recorder, reporter: Reporter) -> Experiment:
    """Make the warm start unless an earlier driver has made it; returns the experiment of the run after it."""
    spec, run = experiment.spec, recorder.run
    if not (run.path / WARM_START).is_dir():
        updates, rows = recorded_updates(run)  # without later updates of a driver that was killed
        run.write_rows("metrics.jsonl", [*rows, *(row for row in run.read("metrics.jsonl") if row["step"] > 0)])
        warm_start = WarmStart(
            spec,
            run,
            experiment.search_path,
            warn=reporter.warn,
            status=reporter.status,
            note=partial(recorder.append, "metrics.jsonl"),
            noted_updates=updates,
        )
        await warm_start.make()
    await asyncio.to_thread(shutil.rmtree, run.path / CHECKPOINTS, ignore_errors=True)
    return replace(experiment, spec=with_its_result(spec, run))


async def _start(
    experiment: Experiment,
    recorder: Recorder,
    start: DriverStart,
    reporter: Reporter,
    closing: list[Callable[[], Awaitable[None]]],
) -> Orchestrator:
    """Start and connect all parts. Functions that stop them, each in bounded time, are added to ``closing``."""
    spec, run, limit_s = experiment.spec, recorder.run, experiment.spec.pipeline.stall_minutes * 60
    # The buffer first: it records the faults of all other parts.
    buffer, opening = await Buffer.open(
        run.path / FILE, BufferSettings.from_spec(spec), start.kind, start.note, start.base, limit_s=limit_s
    )
    closing.append(buffer.close)

    async def record_fault(fault_kind: str, part_name: str, message: str) -> None:
        reporter.faulted(fault_kind)
        await buffer.failed(fault_kind, part_name, hide(message))

    budget = RestartBudget(spec.pipeline.max_restarts, record_fault, reporter.warn)
    factory = ActorFactory(spec, run.path / "logs", experiment.search_path)
    stub = asyncio.create_task(asyncio.to_thread(model_stub, spec, run.model_stub))
    initial: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
    # If only adapters are published, engines load the other weights from the initial model's folder.
    engine_folder = stub if spec.model.published_adapter is None else initial
    # Ray serves requests in order. The ranks come first: engines placed before them could split the ranks' nodes.
    trainer_group = factory.trainer_group()
    trainer_group.ask()
    started_engines: list[EngineProcess] = []

    def make_engine(name: str) -> EngineProcess:
        started_engines.append(factory.engine(name, folder=engine_folder, budget=budget, trainer=trainer_group))
        return started_engines[-1]

    async def stop_engines() -> None:
        await asyncio.gather(*(engine.stop() for engine in started_engines), return_exceptions=True)

    engines = [make_engine(f"engine-{index}") for index in range(spec.rollout.min_engines)]
    outside = None
    if isinstance(experiment.tasks.get(""), External):
        handed_out = {
            training_rollout_id(group.group_id, index) for group in opening.groups for index in group.prefixes
        }
        outside = OutsideSessions(spec, buffer, handed_out)
    tasks = TaskActors(experiment, factory, budget, outside, run.outside_access)
    closing += [tasks.stop, stop_engines]
    # Twice the watchdog's limit: the watchdog's error says more, so it must come first.
    ranks = factory.ranks(2 * limit_s, reporter.warn, trainer_group)
    replicas = Replicas(factory.host_agent, address_of=factory.address_of, budget=budget, why_gone=why_gone)
    loading_task = asyncio.create_task(tasks.start())
    starting = asyncio.create_task(
        start_all(
            engines,
            ranks,
            replicas,
            checkpoint=start.checkpoint.folder if start.checkpoint else None,
            progress=reporter.status,
            budget=budget,
            initial=initial,
            shared_gpus=shares_gpus(spec),
        )
    )
    try:
        model_dir, _ = await asyncio.gather(starting, loading_task)
    except BaseException:
        for task in (starting, loading_task, stub):
            task.cancel()
        raise
    tokenizer = await asyncio.to_thread(load_tokenizer, model_dir, spec.model.chat_template)
    encoder = PromptEncoder.of(spec, tokenizer, "" in experiment.episodic)
    if "" not in experiment.episodic:
        ranks.probe_prompt_ids = prompt_tokens(first_prompts(experiment.train_prompts, encoder))
    watchdog = Watchdog(limit_s, warn=reporter.warn, record=lambda wait: buffer.failed(STALL, wait.who, str(wait)))
    decode = decoder(tokenizer, end_tokens(model_dir, tokenizer), spec.task.special_tokens == "shown")
    client = client_of(
        spec, engines=engines, decode=decode, on_progress=watchdog.progress, on_engine_request=buffer.note_request
    )
    loader = PromptLoader(experiment.train_prompts, seed=spec.seed, shuffle=spec.data.shuffle)
    prompt_filter = None
    if (settings := spec.data.filter) is not None:
        prompt_filter = PromptFilter(settings.solved_streak, settings.revisit_fraction, spec.seed)
    prompts = PromptSource(loader, encoder, opening.waiting, prompt_filter, reporter.warn, outside)
    await tasks.connect(client, model_dir, watchdog.progress)
    held_out = partial(tasks.held_out, tokenizer=tokenizer, warn=reporter.warn)
    evaluator = Evaluator(
        spec,
        write=recorder.write_text,
        client=client,
        buffer=buffer,
        reporter=reporter,
        opening=opening,
        held_out=held_out("", experiment.eval_prompts) if spec.data.eval is not None else None,
        sets={name: held_out(name, prompts) for name, prompts in experiment.sets.items()},
    )
    return Orchestrator(
        spec=spec,
        opening=opening,
        checkpoint_step=start.checkpoint.step if start.checkpoint else 0,
        run_directory=run,
        buffer=buffer,
        ranks=ranks,
        replicas=replicas,
        client=client,
        make_engine=make_engine,
        scoring=tasks.scoring,
        prompts=prompts,
        episodes=tasks.episodes,
        evaluator=evaluator,
        reporter=reporter,
        budget=budget,
        watchdog=watchdog,
    )


async def _save_before_leaving(orchestrator: Orchestrator | None, reporter: Reporter) -> None:
    """Save a checkpoint if there is time, which makes resuming faster. The journal already has everything else."""
    if orchestrator is None:
        return
    reporter.status("stopping: saving a checkpoint if there is time")
    try:
        async with asyncio.timeout(INTERRUPT_S):
            await orchestrator.settle()
            await orchestrator.checkpoint()
    except (TimeoutError, UserError):
        pass
    except Exception as error:  # such as a full disk; the run still counts as interrupted
        reporter.warn(f"no checkpoint was saved: {_cause(error)}")
