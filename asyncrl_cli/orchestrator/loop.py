"""The main loop of a run.

    admit -> generate -> record -> score -> take -> train -> publish -> admit ...

Generation and training wait for each other only if the buffer requires it, and the trainer does not wait until the
engines have loaded a new version. The modes ``sync``, ``one_step_off`` and ``async`` only set the buffer's numbers; no
code in this file depends on the mode.

The loop connects these parts:

    Buffer              decides which groups start and which are trained; records each decision before it takes effect
    RolloutScheduler    admits groups, requests their rollouts, has them scored and recorded
    GenerationClient    returns a rollout for each request, whatever happens to the engines in between
    EnginePool          adds, restarts and removes engines
    Scoring, Episodes   compute rewards, and play rollouts in which the task calls the model
    ResilientTrainer    trains batches; brings restarted ranks back to the current step
    Publisher           brings each weight version to all engines, and has them prove it; Replicas hold the bytes
    Evaluator           measures the accuracy on held-out prompts
    Checkpoints         saves the trainer's state; Uploads copies it elsewhere
    StepRecorder        computes each step's metrics; the Reporter sends them to files and monitors
    Watchdog            ends the run when one of the loop's waits takes too long

No part knows the orchestrator. A part gets the parts that it uses, and informs others by return values, callbacks and
the journal. So each part can be tested alone, and the order of events is readable in ``Orchestrator._loop``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl_cli.core.errors import RunError, first_cause
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.health import HealthWatch
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator.checkpoints import Checkpoints
from asyncrl_cli.orchestrator.engine_pool import EnginePool
from asyncrl_cli.orchestrator.engines import EngineProcess, GpuTurns
from asyncrl_cli.orchestrator.episodes import Episodes
from asyncrl_cli.orchestrator.evaluation import Evaluator
from asyncrl_cli.orchestrator.metrics import StepRecorder
from asyncrl_cli.orchestrator.prompt_source import PromptSource
from asyncrl_cli.orchestrator.publisher import Publisher
from asyncrl_cli.orchestrator.replicas import Replicas
from asyncrl_cli.orchestrator.rollout_scheduler import RolloutScheduler
from asyncrl_cli.orchestrator.scoring import Scoring
from asyncrl_cli.orchestrator.trainer_recovery import ResilientTrainer
from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.orchestrator.uploads import Uploads
from asyncrl_cli.orchestrator.watchdog import DRIVER, TRAINER, Watchdog
from asyncrl_cli.records.groups import Opening, TakenBatch
from asyncrl_cli.records.training import StepReport, TrainingBatch
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.runs.directory import ADAPTER, MODEL, RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import engines_sleep
from asyncrl_cli.system.supervised_actor import RestartBudget

T = TypeVar("T")


@dataclass(eq=False)
class Orchestrator:
    """Runs the parts, which ``launch.py`` has started, from the journal's end to the last step."""

    spec: ExperimentSpec
    opening: Opening  # the journal's state at the start of this driver
    checkpoint_step: int  # the step of the checkpoint from which the ranks have started; 0 without one
    run_directory: RunDirectory
    buffer: Buffer
    ranks: TrainerRanks
    replicas: Replicas
    client: GenerationClient
    make_engine: Callable[[str], EngineProcess]  # makes an engine by its name, without starting it
    scoring: Scoring
    prompts: PromptSource
    episodes: Episodes | None  # None if the driver generates the rollouts
    evaluator: Evaluator
    reporter: Reporter
    budget: RestartBudget
    watchdog: Watchdog

    def __post_init__(self) -> None:
        spec = self.spec
        self._tasks = asyncio.TaskGroup()
        self._checkpoints = Checkpoints(self.run_directory.path / "checkpoints", self.ranks, spec)
        self._uploads = Uploads(spec.checkpoints, self.run_directory, self.buffer, self.reporter.warn)
        self._steps = StepRecorder(
            spec,
            client=self.client,
            prompts=self.prompts,
            buffer=self.buffer,
            reporter=self.reporter,
            reported=self.opening.trained,
            # Without the warm start's rows.
            history=[row for row in self.run_directory.read("metrics.jsonl") if row["step"] > 0],
        )
        turns = GpuTurns(self.client, engines_sleep(spec), spec.pipeline.stall_minutes * 60)
        self._trainer = ResilientTrainer(
            self.ranks,
            buffer=self.buffer,
            run=self.run_directory,
            budget=self.budget,
            microbatch_tokens=spec.trainer.microbatch_tokens,
            repeated=self._repeated,
            progress=self.watchdog.caught_up,
            gpu_turn=turns.trainer,
            step=self.checkpoint_step,
        )
        self._publisher = Publisher(
            spec,
            opening=self.opening,
            trainer=self._trainer,
            client=self.client,
            replicas=self.replicas,
            buffer=self.buffer,
            watchdog=self.watchdog,
            budget=self.budget,
        )
        self._scheduler = RolloutScheduler(
            spec,
            buffer=self.buffer,
            client=self.client,
            scoring=self.scoring,
            prompts=self.prompts,
            spawn=self._spawn,
            episodes=self.episodes,
            warn=self.reporter.warn,
        )
        self._pool = EnginePool(
            spec.rollout.max_engines,
            make=self.make_engine,
            client=self.client,
            bring_up=self._publisher.bring_up,
            buffer=self.buffer,
            budget=self.budget,
            reporter=self.reporter,
            gpu_turn=turns.engines,
        )
        self._step = self.opening.step
        self._written_version = self.opening.version  # the newest version that was written
        self._publish_wait_s = 0.0  # seconds until the trainer could write this step's publish
        self._in_flight: tuple[TakenBatch, asyncio.Task[StepReport]] | None = None
        self._saving: asyncio.Task[bool] | None = None  # the newest checkpoint
        self._saved_step = self.checkpoint_step  # its step; 0 after its loss
        self._evaluation: asyncio.Task[None] | None = None
        self._fixed_version = False  # True while an evaluation needs one version, so publishes wait for it

    @property
    def health(self) -> HealthWatch:
        """The findings of all steps so far."""
        return self._steps.health

    async def run(self) -> None:
        """Train until the last step. Raises ``RunError`` with the first cause if the run cannot continue."""
        try:
            async with self._tasks as tasks:
                endless = [
                    tasks.create_task(self._scheduler.run()),
                    tasks.create_task(self.watchdog.watch()),
                    tasks.create_task(self._trainer.guard()),
                    tasks.create_task(self._publisher.guard()),
                    tasks.create_task(self._pool.run()),
                ]
                await self._loop()
                for task in endless:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_cause(group) from None

    async def settle(self) -> None:
        """After an interruption, wait for the running step and publish, and report the step.

        Raises ``RunError`` if one of them failed or a recovery was interrupted: then the ranks may still train a step,
        so their weights belong to no step that can be saved.
        """
        if self._in_flight is not None:
            taken_batch, training = self._in_flight
            self._steps.report(taken_batch, await training, None)
        # The publish must be recorded before the checkpoint: a resumed run publishes every version that the journal
        # lacks, and a checkpoint of a later step does not have this version's weights.
        await self._publisher.delivered()
        if not self._trainer.ready:
            raise RunError("interrupted during recovery", location="trainer-0")
        self._step = self._trainer.step

    async def checkpoint(self, in_background: bool = False) -> None:
        """Save a checkpoint of the current step. Call it between steps, or after ``settle``.

        ``in_background``: return when the trainer's state is copied; the copy is written while training continues.
        """
        step = self._step
        # From a checkpoint between two publishes, the engines' version could not be made again (decision 0009).
        if step % self.spec.pipeline.publish_every:
            return
        started = time.monotonic()
        if self._saving is not None and not self._saving.done():
            self.reporter.status("waiting until the previous checkpoint is written")
        await self._saved()  # the hosts have memory for one copy
        # The journal first: a checkpoint must not hold a step that the journal lacks (decision 0009).
        state = {"step": step, **await self.buffer.fallback(step)}

        while True:
            self.reporter.status("saving a checkpoint")
            copying = self._trainer.at_step(step, lambda: self._checkpoints.copy(step))
            if not await self._until_saved(step, copying):
                self._saved_step = step
                return
            stall_s = time.monotonic() - started
            self._steps.extra_metrics["checkpoint/stall_s"] = stall_s
            self._saved_step = step
            # Not in ``_tasks``, which Ctrl-C cancels: the copy is made, so the last checkpoint waits for its files.
            self._saving = asyncio.create_task(self._complete(step, state, started=started, stall_s=stall_s))
            if in_background:
                self._spawn(self._saved())  # an error ends the run immediately
                return
            if await self._saved():
                return

    async def _checkpoint_if_due(self) -> None:
        """Save a checkpoint at each multiple of ``checkpoints.every``, and soon after one whose checkpoint was lost."""
        every = self.spec.checkpoints.every
        if every and self._step // every > self._saved_step // every:
            await self.checkpoint(in_background=True)

    async def _complete(self, step: int, state: Mapping[str, Any], started: float, stall_s: float) -> bool:
        """Write the copied checkpoint; returns False if a rank died first."""
        try:
            saved = await self._until_saved(step, self._checkpoints.write(step, state))
        except TrainerLost as lost:  # the ranks restart from an older checkpoint
            self.reporter.warn(f"the checkpoint of step {step} is lost: {lost.name} died while it was written")
            self._saved_step = 0
            return False
        # A recovery reads checkpoints and batches that the deletions below would remove.
        async with self._trainer.recovering:
            removed = await asyncio.to_thread(
                self._checkpoints.prune,
                dict(self.evaluator.accuracies),
                set(self.evaluator.running),
                set(self._uploads.waiting),
            )
            self._steps.extra_metrics["checkpoint/seconds"] = seconds = time.monotonic() - started
            await self.buffer.checkpointed(step, saved.folder.name, seconds, stall_s, removed)
            self._uploads.begin()  # after ``checkpointed``: the upload's result completes this row
            if self.spec.journal.keep != "all":
                await self.buffer.prune(self.spec.journal.keep)
        return True

    async def _until_saved(self, step: int, saving: Awaitable[T]) -> T:
        purpose = f"the checkpoint of step {step}"
        return await self.watchdog.until(saving, who=DRIVER, purpose=purpose, extra_s=self.ranks.saving_s)

    async def _saved(self) -> bool:
        """Wait until no checkpoint is being written; returns False if a rank died while the last one was written.
        Raises the last one's error if it failed."""
        return self._saving is None or await asyncio.shield(self._saving)

    async def _loop(self) -> None:
        steps, partial = self.spec.stop.total, self.spec.pipeline.partial_rollouts
        # Generation and training take turns: the next batch needs the new weights, so the step includes the delivery.
        alternating = partial or self.spec.pipeline.max_staleness == 0
        # Before any engine serves: unfinished rollouts must take their slots before new groups are admitted.
        self._scheduler.resume(self.opening)
        self._uploads.begin()  # uploads that earlier drivers left
        behind = self._step - self._trainer.step
        self.reporter.status(f"training {behind} recorded steps again" if behind else "publishing the first weights")
        while self._publish_due:  # twice if a publish was in flight when the run stopped
            await self._begin_publish()
        await self._publisher.delivered()
        await self._publisher.restore()  # if nothing was due: the hosts' memory is lost with the earlier driver
        await self._trainer.catch_up(self._step)
        if self._step < steps:
            self._begin_evaluation()
            await self._checkpoint_if_due()
        while self._step < steps:
            taken_batch = await self._take()
            if partial:  # unfinished rollouts keep their tokens, and continue in the next step
                await self._finish_fixed_evaluation()
                await self.watchdog.until(self.client.pause(), DRIVER, "engines to stop generating")
            report = await self._train(taken_batch)
            trained_at = time.monotonic()
            self._publish_wait_s = 0.0
            if self._publish_due:
                await self._begin_publish()
                if alternating:
                    await self._publisher.delivered()
            publish_s = time.monotonic() - trained_at
            self._steps.report(taken_batch, report, self._publisher.take_record(), publish_s, self._publish_wait_s)
            # Only after the report: while it is set, ``settle`` reports the step of an interrupted run.
            self._in_flight = None
            if partial:
                await self.client.resume()
            if self._step < steps:
                # Between two publishes, no checkpoint can be saved.
                idle_steps = self._steps.steps_without_learning
                if idle_steps and self._step % self.spec.pipeline.publish_every == 0:
                    await self._publisher.delivered()
                    await self.checkpoint()
                    raise self._unhealthy(idle_steps)
                if self.evaluator.due(self._step):
                    await self._publisher.delivered()  # the evaluation is of this step's weights
                    await self._finish_evaluation("an evaluation")
                    self._begin_evaluation()
                await self._checkpoint_if_due()
        await self._publisher.delivered()
        await self._finish_evaluation("an evaluation")
        self._begin_evaluation()
        await self._finish_evaluation("the evaluation after training")
        await self.checkpoint()
        self.reporter.status("saving the model")
        model, adapter = self.run_directory.path / MODEL, self.run_directory.path / ADAPTER
        await self._trainer.at_step(self._step, lambda: self.ranks.save_model(model, adapter))
        if self._uploads.waiting:
            self.reporter.status("waiting for uploads")
        await self._uploads.finish()

    def _unhealthy(self, idle_steps: int) -> RunError:
        findings = [finding for finding in self.health.open_findings if finding.stops_learning]
        causes = "".join(f"; {finding.observation}: {finding.cause}" for finding in findings)
        remedies = [finding.remedy for finding in findings]
        resume = f"`asyncrl resume {self.run_directory.argument}` continues after step {self._step} and counts from 0"
        return RunError(
            f"nothing was learned in {counted(idle_steps, 'step')} in a row{causes}",
            location="stop.on_unhealthy",
            hint="; ".join([*remedies, resume]),
        )

    @property
    def _publish_due(self) -> bool:
        return self._step >= (self._written_version + 1) * self.spec.pipeline.publish_every

    async def _take(self) -> TakenBatch:
        with self.watchdog.waiting(TRAINER, f"the batch of step {self._step + 1}") as wait:
            while True:
                answer = await self.buffer.take(self._step)
                if isinstance(answer, TakenBatch):
                    self.client.room.set()  # pipeline.ahead has room again
                    return answer
                if answer.overdue:
                    await self._scheduler.requeue(answer.overdue)
                    continue
                running = self._pool.shortage() or f"{self.client.running} rollouts are running"
                if self.scoring.unscored:
                    running += f", {self.scoring.unscored} wait for their rewards"
                if not (self.prompts.wanted_groups or self.client.running):
                    wait.progress()  # no program outside of the run wants a session: the run does not hang
                wait.purpose = f"the batch of step {self._step + 1} ({answer.reason}; {running})"
                self.reporter.status(f"waiting: {answer.reason}", answer.counts)

    async def _train(self, taken_batch: TakenBatch) -> StepReport:
        self.reporter.status("training", taken_batch.counts)
        with self.watchdog.waiting(DRIVER, f"the trainer's step {self._step + 1}") as wait:
            training = asyncio.create_task(self._trainer.train(taken_batch.batch, wait.progress))
            self._in_flight = (taken_batch, training)
            # Shielded from Ctrl-C, which cannot stop the ranks: ``settle`` waits for their step.
            report = await asyncio.shield(training)
        self._step += 1
        return report

    async def _begin_publish(self) -> None:
        """Have the ranks write the next version. Engines load it while the trainer trains on (decision 0038)."""
        started = time.monotonic()
        # One publish at a time: the ledger's proof assumes it, and the hosts have memory for one new version.
        await self._publisher.delivered()
        await self._finish_fixed_evaluation()
        self._publish_wait_s = time.monotonic() - started
        await self._publisher.publish(self._written_version + 1, self._publish_wait_s)
        self._written_version += 1
        self._spawn(self._publisher.delivered())  # an error ends the run immediately

    def _repeated(self, batch: TrainingBatch, report: StepReport) -> None:
        self.watchdog.caught_up()
        self.reporter.status(f"trained step {batch.step + 1} of {self._step} again")
        # An earlier driver took this batch but did not report its step. ``_loop`` reports this driver's own steps.
        if self._steps.reported <= batch.step < self.opening.step:
            self._steps.report(TakenBatch(batch, self.opening.counts, 0.0), report, None)

    def _begin_evaluation(self) -> None:
        if self.evaluator.due(self._step):
            self._evaluation = self._tasks.create_task(self.evaluator.evaluate(self._step))
            # The accuracy before training must be the initial model's.
            self._fixed_version = self._step == 0 or self.spec.evaluation.fix_version

    async def _finish_fixed_evaluation(self) -> None:
        if self._fixed_version:
            await self._finish_evaluation("the evaluation of the current weights")

    async def _finish_evaluation(self, purpose: str) -> None:
        if self._evaluation is not None:
            await self.watchdog.until(self._evaluation, TRAINER, purpose)
        self._evaluation, self._fixed_version = None, False

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            self._tasks.create_task(coroutine)
        except RuntimeError:  # the run has not begun, or is ending
            coroutine.close()
