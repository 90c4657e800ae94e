"""A run from start to end: folder, cluster, fleet, loop, results.

Everything that can be refused is refused before the first process starts; whatever was started is gone when
``run_experiment`` returns or raises.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl_cli.buffer.ledger import Ledger
from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.observe.reporter import Reporter, View
from asyncrl_cli.observe.tracker import TrackerClient
from asyncrl_cli.pipeline.checkpoints import Checkpoints, SavedRun, complete_checkpoints
from asyncrl_cli.pipeline.cluster import ray_cluster
from asyncrl_cli.pipeline.conductor import Conductor
from asyncrl_cli.pipeline.dispatcher import Dispatcher
from asyncrl_cli.pipeline.evaluation import Evaluator
from asyncrl_cli.pipeline.fleet import Fleet
from asyncrl_cli.pipeline.preflight import check_machine
from asyncrl_cli.pipeline.prompting import PromptEncoder, PromptSource
from asyncrl_cli.pipeline.tracking import Tracking, close_tracker, note_tracking, start_tracker
from asyncrl_cli.runs.directory import RunDirectory, RunError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.tasks.load import load_task
from asyncrl_cli.tasks.prompts import load_prompts
from asyncrl_cli.train.prepare import skeleton

INTERRUPT_S = 5.0
"""Seconds that an interrupted run may spend on saving where it is."""


class Interrupted(Exception):
    """The user stopped the run; it can be resumed where ``resumable`` says so."""

    def __init__(self, resumable: bool) -> None:
        super().__init__("interrupted")
        self.resumable = resumable


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run leaves. Accuracies by kind (``greedy``, ``sampled``)."""

    seconds: float
    accuracy_before: Mapping[str, float] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    model: Path | None = None
    checkpoint: Path | None = None
    tracking: Tracking | None = None


@dataclass(slots=True)
class Experiment:
    """A checked spec with its data, ready to run. ``search_path`` is where the user's own modules lie."""

    spec: ExperimentSpec
    search_path: Path
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]

    @classmethod
    def load(cls, spec: ExperimentSpec, search_path: Path) -> Experiment:
        """Import the task, open the data, look at the machine. Raises a ``UserError`` that names what is wrong."""
        check_machine(spec)
        task = load_task(spec.task, search_path)
        return cls(
            spec,
            search_path,
            load_prompts("train", spec.data.train, task, search_path),
            load_prompts("eval", spec.data.eval, task, search_path),
        )


def run_experiment(
    experiment: Experiment, run: RunDirectory, view: View, resume_from: SavedRun | None = None
) -> Outcome:
    """Run to the last step. The run's state on disk says how it ended, in every case.

    Raises ``UserError`` with the cause when it cannot go on, ``Interrupted`` after Ctrl-C or SIGTERM.
    """
    try:
        with ray_cluster(experiment.spec, run.path / "logs"):
            outcome = asyncio.run(_run(experiment, run, view, resume_from))
    except KeyboardInterrupt:  # before there was a loop to hear it
        run.update(phase="interrupted", reason="stopped by the user")
        raise Interrupted(resumable=bool(complete_checkpoints(run.path / "checkpoints"))) from None
    except Interrupted:
        run.update(phase="interrupted", reason="stopped by the user")
        raise
    except BaseException as error:
        run.update(phase="failed", reason=f"{type(error).__name__}: {error}")
        raise
    run.update(phase="finished", reason="")
    return outcome


async def _run(experiment: Experiment, run: RunDirectory, view: View, resume_from: SavedRun | None) -> Outcome:
    started = time.monotonic()
    spec = experiment.spec
    tracker: TrackerClient | None = None
    conductor: Conductor | None = None
    status = "FAILED"
    tracking: Tracking | None = None
    fleet = Fleet.create(spec, run.path / "logs", experiment.search_path)
    stop = _stop_on_signals()
    try:
        starting = _start(experiment, fleet, run.path / "skeleton", resume_from, view)
        source, evaluated = await _until_stopped(starting, stop)
        if spec.tracking.mlflow:
            tracker = start_tracker(spec, run)
            noting = asyncio.create_task(note_tracking(tracker, run))
        reporter = Reporter(run, view, tracker)
        dispatcher = Dispatcher(fleet.engines, spec.rollout.retries, spec.pipeline.stall_minutes * 60)
        conductor = Conductor(
            spec=spec,
            fleet=fleet,
            ledger=resume_from.ledger if resume_from else _new_ledger(spec),
            prompts=source,
            dispatcher=dispatcher,
            evaluator=Evaluator(spec, run, dispatcher, fleet.scorer, evaluated),
            checkpoints=Checkpoints(run, fleet, spec.checkpoints.keep_last),
            reporter=reporter,
        )
        run.update(phase="running", steps=spec.stop.steps)
        await _until_stopped(conductor.run(), stop)
        view.status("saving the model")
        model = run.path / "model"
        await fleet.train("save_model", str(model))
        status = "FINISHED"
        checkpoints = complete_checkpoints(run.path / "checkpoints")
        outcome = Outcome(
            seconds=time.monotonic() - started,
            accuracy_before=reporter.accuracy_before,
            accuracy=reporter.accuracy,
            model=model,
            checkpoint=checkpoints[-1] if checkpoints else None,
        )
    except Interrupted as interrupted:
        status = "KILLED"
        interrupted.resumable = await _save_before_leaving(conductor, run, view)
        raise
    finally:
        if tracker is not None:
            view.status("finishing MLflow's log")
            noting.cancel()
            tracking = close_tracker(tracker, run, spec, status)
        await fleet.stop()
    return replace(outcome, tracking=tracking)


async def _start(
    experiment: Experiment, fleet: Fleet, folder: Path, resume_from: SavedRun | None, view: View
) -> tuple[PromptSource, list[tuple[Prompt, tuple[int, ...]]]]:
    spec = experiment.spec

    def make_skeleton() -> Path:
        return skeleton(spec, folder)

    checkpoint = resume_from.folder if resume_from else None
    model_dir = await fleet.start(make_skeleton, experiment.search_path, checkpoint, view.status)
    encoder = await asyncio.to_thread(_encoder, model_dir, spec.rollout.max_prompt_tokens)
    loader = PromptLoader(experiment.train_prompts, spec.seed, spec.data.shuffle)
    if resume_from is not None:
        loader.restore(resume_from.loader)
    source = PromptSource(loader, encoder, resume_from.prompts if resume_from else ())
    encoded = [(prompt, encoder.encode(prompt)) for prompt in experiment.eval_prompts]
    evaluated = [(prompt, ids) for prompt, ids in encoded if ids is not None]
    if not evaluated:
        raise RunError(
            "every held-out prompt is longer than rollout.max_prompt_tokens",
            place="data.eval",
            mend="Raise rollout.max_prompt_tokens",
        )
    return source, evaluated


def _encoder(model_dir: str, max_tokens: int) -> PromptEncoder:
    from transformers import AutoTokenizer

    return PromptEncoder(AutoTokenizer.from_pretrained(model_dir), max_tokens)


def _new_ledger(spec: ExperimentSpec) -> Ledger:
    pipeline = spec.pipeline
    return Ledger(
        pipeline.groups_per_step,
        pipeline.publish_every,
        pipeline.max_staleness,
        pipeline.on_stale,
        total_steps=spec.stop.steps,
    )


def _stop_on_signals() -> asyncio.Event:
    """An event that Ctrl-C and SIGTERM set. A second Ctrl-C ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop


async def _until_stopped(work: Any, stop: asyncio.Event) -> Any:
    """The result of ``work``; raises ``Interrupted`` when ``stop`` comes first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        stopping.cancel()
        return working.result()
    working.cancel()
    await asyncio.wait([working])
    raise Interrupted(resumable=False)


async def _save_before_leaving(conductor: Conductor | None, run: RunDirectory, view: View) -> bool:
    """Save a checkpoint if there is time; returns whether the run can be resumed."""
    if conductor is not None:
        view.status("stopping: saving where the run is")
        try:
            async with asyncio.timeout(INTERRUPT_S):
                await conductor.settle()
                await conductor.checkpoint()
        except (TimeoutError, RunError):
            pass
    return bool(complete_checkpoints(run.path / "checkpoints"))
