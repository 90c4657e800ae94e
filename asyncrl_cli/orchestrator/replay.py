"""Trains a run's recorded batches again, without engines, and compares the resulting weights.

If the spec is unchanged, every published version has the recorded checksum on the same kind of machine: its weights are
equal bit for bit. With another objective, a replay shows its effect on the same data at the cost of training only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.history import starts, step_metrics
from asyncrl_cli.journal.progress import checksum, steps_trained
from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import FILE, explained, open_for_reading, reading
from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.cluster import Actors, ray_cluster, while_ray_lives
from asyncrl_cli.orchestrator.replicas import Replicas
from asyncrl_cli.orchestrator.trainers import TrainerLost
from asyncrl_cli.orchestrator.warm_start import with_its_result
from asyncrl_cli.runs.checkpoints import Checkpoint
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.algorithm import RUNNING_BASELINE
from asyncrl_cli.spec.changes import training_changes
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.supervised_actor import RestartBudget, not_recorded


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step trained again. ``equal``: True if the weights have the recorded checksum; None if no version was
    published after this step, or the journal lacks its checksum."""

    step: int
    version: int
    loss: float | None
    recorded_loss: float | None
    gradient_norm: float | None
    equal: bool | None


def recorded_steps(run: RunDirectory) -> int:
    """Number of trained steps in the journal. Raises ``JournalError``."""
    with reading(run.path / FILE) as connection:
        return steps_trained(connection)


def changes_since(run: RunDirectory, first_step: int) -> list[str]:
    """Reasons why a replay from ``first_step`` on may give other weights: resumes that changed training settings."""
    reasons = []
    with reading(run.path / FILE) as connection:
        for start in starts(connection):
            changed = training_changes(start.note)
            if start.process == "resume" and changed and start.steps_taken > first_step:
                reasons.append(f"the resume after step {start.steps_taken} changed {', '.join(changed)}")
    return reasons


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The run to replay, and the steps."""

    run: RunDirectory
    spec: ExperimentSpec
    search_path: Path
    logs: Path  # the folder for the processes' logs
    checkpoint: Checkpoint | None  # the trainer's start; None for the initial model
    first_step: int  # the first step to show, counted from 0 like all steps in the journal
    end_step: int  # the step after the last one


def replay(plan: ReplayPlan, progress: Callable[[str], None], show: Callable[[ReplayedStep], None]) -> None:
    """Train recorded batches again. Raises ``RunError`` if a batch is no longer in the journal or a rank dies."""
    actors = Actors(0, plan.spec.trainer.ranks)
    with ray_cluster(plan.spec, plan.logs, actors):
        asyncio.run(while_ray_lives(_replay(plan, progress, show), "replay again"))


async def _replay(plan: ReplayPlan, progress: Callable[[str], None], show: Callable[[ReplayedStep], None]) -> None:
    run, spec, checkpoint = plan.run, plan.spec, plan.checkpoint
    budget = RestartBudget(spec.pipeline.max_restarts, not_recorded, progress)
    if spec.model.warm_start is not None:
        spec = with_its_result(spec, run)
    factory = ActorFactory(spec, plan.logs, plan.search_path)
    ranks = factory.ranks(spec.pipeline.stall_minutes * 60, progress)
    replicas = Replicas(factory.host_agent, factory.address_of, budget)
    connection = open_for_reading(run.path / FILE)
    try:
        progress("starting the trainer")
        await ranks.preload()
        await ranks.prepare_model()
        await ranks.start(checkpoint.folder if checkpoint else None)
        for step in range(checkpoint.step if checkpoint else 0, plan.end_step):
            try:
                with explained(run.path / FILE):
                    batch = read_batch(connection, step, earlier=spec.algorithm.advantage == RUNNING_BASELINE)
            except LookupError as error:
                raise RunError(
                    str(error.args[0]),
                    location=run.run_id,
                    hint="replay from a later checkpoint (--from), or keep all tokens (journal.keep: all)",
                ) from None
            report = await ranks.train_step(batch)
            if step < plan.first_step:
                progress(f"on the way to step {plan.first_step + 1}: step {step + 1}")
                continue
            version, steps_past_publish = divmod(step + 1, spec.pipeline.publish_every)
            recorded = None if steps_past_publish else checksum(connection, version)
            equal = None
            if recorded is not None:
                manifest = await replicas.manifest(await replicas.write(ranks, version))
                equal = recorded == manifest.checksum
            show(
                ReplayedStep(
                    step=step,
                    version=version,
                    loss=report.metrics.get("train/loss"),
                    recorded_loss=step_metrics(connection, step).get("train/loss"),
                    gradient_norm=report.metrics.get("train/gradient_norm"),
                    equal=equal,
                )
            )
    except TrainerLost as lost:
        raise RunError(f"the trainer died: {lost}", location=run.run_id, hint=f"its log is in {plan.logs}") from None
    finally:
        connection.close()
