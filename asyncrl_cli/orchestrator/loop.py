"""The one loop of a run.

    admit -> generate -> record -> score -> take -> train -> publish -> admit ...

Generation and training never wait for each other except where the buffer says so; ``sync``, ``one_step_off`` and
``async`` are settings of its numbers and of nothing in this file. An engine serves a version only after it has
proved it, so a group admitted under version v never holds an older token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.events import STALL
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator.buffer_client import BufferClient
from asyncrl_cli.orchestrator.checkpoints import Checkpoints
from asyncrl_cli.orchestrator.engines import EngineKeeper
from asyncrl_cli.orchestrator.episodes import Episodes
from asyncrl_cli.orchestrator.evaluation import Evaluator, Series
from asyncrl_cli.orchestrator.metrics import StepClock, batch_digest, step_metrics
from asyncrl_cli.orchestrator.prompt_source import PromptSource
from asyncrl_cli.orchestrator.publisher import TOLERANCE, Publisher, PublishReport
from asyncrl_cli.orchestrator.restart_budget import RestartBudget
from asyncrl_cli.orchestrator.rollout_scheduler import RolloutScheduler
from asyncrl_cli.orchestrator.scoring import Scoring
from asyncrl_cli.orchestrator.trainer_recovery import ResilientTrainer
from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.orchestrator.watchdog import GENERATION, Wait, Watchdog
from asyncrl_cli.records.groups import Opening, PublishRecord, StepRecord, Taken, Waiting
from asyncrl_cli.records.training import Publication, StepReport, TrainingBatch
from asyncrl_cli.rollout.client import GenerationClient
from asyncrl_cli.runs.checkpoints import newest_undamaged
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.tasks.mix import task_names

PATIENCE_S = 2.0
"""Seconds after which the buffer says what a batch waits for."""
CLOSE_S = 10.0
"""Seconds that the buffer may take to close the journal."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The started parts of a run."""

    buffer: BufferClient
    ranks: TrainerRanks
    client: GenerationClient
    scoring: Scoring
    prompts: PromptSource
    episodes: Episodes | None
    evaluator: Evaluator
    checkpoints: Checkpoints
    run: RunDirectory
    reporter: Reporter
    budget: RestartBudget
    watchdog: Watchdog
    model_stub: Path
    model_folder: Path


class Orchestrator:
    """Drives started parts from where the journal stands to the last step."""

    def __init__(self, spec: ExperimentSpec, parts: Parts, opening: Opening, checkpoint_step: int) -> None:
        """``checkpoint_step``: what the trainer ranks have started from."""
        self._spec = spec
        self._parts = parts
        self._opening = opening
        self._reported = opening.trained  # steps
        self._untold: dict[int, StepRecord] = {}  # reported, and not yet in the journal
        self._step, self._version = opening.step, opening.version
        self._checksum = opening.checksum  # of the bytes of the present version, once that is published
        self._accuracies = dict(opening.evaluated)
        self._trainer = ResilientTrainer(
            parts.ranks,
            checkpoint_step,
            newest=self._newest_checkpoint,
            read_batch=self._read_batch,
            passed=self._serve_again,
            trained=self._trained_again,
            lost=self._lost_trainer,
        )
        self._publisher = Publisher(spec, self._write_weights)
        self._evaluated = set(opening.evaluations)  # step and kind
        self._evaluation: asyncio.Task[None] | None = None
        self._pinned = False  # whether that belongs to one version, so that the next one waits for it
        self._evaluating: set[int] = set()  # steps whose evaluation is under way
        self._in_flight: tuple[Taken, asyncio.Task[StepReport]] | None = None
        self._clock = StepClock(parts.client)
        self._gap_warned = False

    async def run(self) -> None:
        """Train until the last step. Raises ``RunError`` with the first cause when the run cannot go on."""
        parts = self._parts
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._scheduler = RolloutScheduler(
                    *(self._spec, parts.buffer, parts.client, parts.scoring, parts.prompts),
                    self._spawn,
                    parts.episodes,
                )
                parts.buffer.on_reopen = self._scheduler.reopened
                parts.client.on_segments = self._scheduler.note_segments
                parts.client.on_engine_request = self._scheduler.note_engine_request
                parts.client.on_room = self._scheduler.fill
                parts.watchdog.on_stall = self._note_stall
                keeper = EngineKeeper(
                    parts.client, self._publisher, parts.budget, parts.model_stub, self._scheduler.fill
                )
                endless = [
                    tasks.create_task(self._scheduler.keep_full()),
                    tasks.create_task(parts.watchdog.watch()),
                    tasks.create_task(self._trainer.guard()),
                    *(tasks.create_task(keeper.keep(engine)) for engine in parts.client.engines),
                ]
                await self._loop()
                for task in endless:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first_cause(group) from None

    async def settle(self) -> None:
        """After an interruption: wait until the trainer's step in flight, if any, is done, and report it.

        Raises ``RunError`` when it failed, and when catching up was interrupted: a step that nobody waits for changes
        the weights then, and nothing may be saved.
        """
        if self._in_flight is not None:
            taken, training = self._in_flight
            await self._note_step(taken, await training, None)
        await self._tell()
        if not self._trainer.between_steps:
            raise RunError("it was interrupted while it caught up", location="trainer-0")
        self._step = self._trainer.step

    async def close(self) -> None:
        """The run is over, however it ended: have the journal closed. Whatever goes wrong loses nothing."""
        await asyncio.wait_for(self._parts.buffer.call("close"), CLOSE_S)

    async def checkpoint(self) -> None:
        """Save where the run is now. Call it between steps, or after ``settle``.

        Between two publishes nothing is saved: the engines' version could not be made again from it.
        """
        step, parts = self._step, self._parts
        if step % self._spec.pipeline.publish_every:
            return
        started = time.monotonic()
        await self._tell()
        state = {"step": step, **await parts.buffer.call("fallback", step)}
        saving = self._trainer.at(step, lambda: parts.checkpoints.save(step, state))
        saved = await parts.watchdog.until(saving, "the trainer", f"the checkpoint of step {step}")
        removed = await parts.checkpoints.prune(self._accuracies, self._evaluating)
        seconds = time.monotonic() - started
        await parts.buffer.call("checkpointed", step, saved.folder.name, seconds, removed)

    async def _loop(self) -> None:
        parts, steps = self._parts, self._spec.stop.steps
        self._scheduler.resume(self._opening)  # before any engine serves, and new groups are admitted
        behind = self._step - self._trainer.step
        parts.reporter.status(f"training {behind} recorded steps again" if behind else "publishing the first weights")
        if self._publish_due:
            await self._publish()
        else:
            await self._trainer.at(self._step, _nothing)
        if self._step < steps:
            self._begin_evaluation()
        while self._step < steps:
            taken = await self._take()
            if self._spec.pipeline.partial_rollouts:
                await self._stop_generation()
            report = await self._train(taken)
            published = None
            if self._publish_due:
                if self._pinned:
                    await self._finish_evaluation("the evaluation of the present weights")
                published = await self._publish()
            self._spawn(self._note_step(taken, report, published))
            self._in_flight = None
            if self._spec.pipeline.partial_rollouts:
                await parts.client.resume()
            if self._step < steps:
                await self._between_steps()
        await self._finish_evaluation("an evaluation")
        self._begin_evaluation()
        await self._finish_evaluation("the evaluation after training")
        await self._scheduler.record_engine_requests()
        await self.checkpoint()
        parts.reporter.status("saving the model")
        await self._trainer.call(self._step, "save_model", str(parts.model_folder))

    @property
    def _publish_due(self) -> bool:
        return self._step == (self._version + 1) * self._spec.pipeline.publish_every

    async def _take(self) -> Taken:
        parts = self._parts
        with parts.watchdog.waiting(GENERATION, f"the batch of step {self._step + 1}") as wait:
            while True:
                answer: Taken | Waiting = await parts.buffer.call("take", self._step, PATIENCE_S)
                if isinstance(answer, Taken):
                    return answer
                if answer.overdue:
                    await self._scheduler.requeue(answer.overdue)
                    continue
                running = f"{parts.client.running} rollouts are running"
                wait.what = f"the batch of step {self._step + 1} ({answer.reason}; {running})"
                parts.reporter.doing(f"waiting: {answer.reason}", answer.counts)

    async def _stop_generation(self) -> None:
        """The batch is full: what has not ended keeps its tokens, and goes on when engines may generate again."""
        if self._pinned:
            await self._finish_evaluation("the evaluation of the present weights")
        await self._parts.watchdog.until(self._parts.client.pause(), "the orchestrator", "engines to stop generating")

    async def _train(self, taken: Taken) -> StepReport:
        parts = self._parts
        parts.reporter.doing("training", taken.counts)
        training = asyncio.create_task(self._trainer.train(taken.batch))
        self._in_flight = (taken, training)
        work = asyncio.shield(training)
        report = await parts.watchdog.until(work, "the orchestrator", f"the trainer's step {self._step + 1}")
        self._step += 1
        return report

    async def _publish(self) -> PublishReport:
        version, parts = self._version + 1, self._parts
        serving = self._trainer.at(self._step, lambda: self._serve(version))
        report = await parts.watchdog.until(serving, "the orchestrator", f"every engine to load version {version}")
        await self._record_publish(report)
        self._version, self._checksum = version, report.checksum
        self._scheduler.fill()
        return report

    async def _record_publish(self, report: PublishReport) -> None:
        await self._parts.buffer.call("publish", PublishRecord(step=self._step, **asdict(report)))

    async def _serve(self, version: int) -> PublishReport:
        client = self._parts.client
        return await self._publisher.serve(
            version,
            lambda: [(engine.name, engine.process.actor) for engine in client.serving()],
            client.mark_dead,
        )

    async def _write_weights(self, version: int) -> Publication:
        writing = self._parts.ranks.call("publish", version)
        publications = await self._parts.watchdog.until(
            writing, "the orchestrator", f"the trainer to write version {version}"
        )
        publication: Publication = publications[0]
        return publication

    # -- a trainer that catches up

    async def _newest_checkpoint(self) -> tuple[int, Path | None]:
        newest = await asyncio.to_thread(newest_undamaged, self._parts.run)
        return (0, None) if newest is None else (newest.step, newest.folder)

    async def _read_batch(self, step: int) -> TrainingBatch:
        batch: TrainingBatch = await self._parts.buffer.call("batch", step)
        return batch

    async def _serve_again(self, step: int) -> None:
        """The trainer comes past the step of the version that engines serve, or should."""
        if self._publisher.available or self._publish_due:
            return
        if step != self._version * self._spec.pipeline.publish_every:
            return
        report = await self._serve(self._version)
        if self._checksum is None:
            self._checksum = report.checksum
            await self._record_publish(report)
        elif report.checksum != self._checksum:
            await self._parts.budget.note(
                "weights",
                "trainer-0",
                f"made version {self._version} again with other bits; expected after a change of settings or "
                "hardware, and on GPUs without deterministic kernels",
            )
            self._checksum = report.checksum

    async def _trained_again(self, batch: TrainingBatch, report: StepReport) -> None:
        self._parts.watchdog.caught_up()
        self._parts.reporter.status(f"trained step {batch.step + 1} of {self._step} again")
        in_hand = self._in_flight is not None and self._in_flight[0].batch.step == batch.step  # the loop reports it
        if batch.step >= self._reported and not in_hand:
            counts = self._opening.counts
            self._spawn(self._note_step(Taken(batch, counts, 0.0), report, None))

    def _note_stall(self, wait: Wait) -> None:
        self._spawn(self._parts.buffer.call("failed", STALL, wait.who, str(wait)))

    async def _lost_trainer(self, lost: TrainerLost) -> None:
        self._publisher.lost()
        await self._parts.budget.spend("trainer", lost.name, lost.cause)

    # -- between steps

    async def _between_steps(self) -> None:
        step = self._step
        if self._evaluations_due():
            await self._finish_evaluation("an evaluation")
            self._begin_evaluation()
        if self._spec.checkpoints.every and step % self._spec.checkpoints.every == 0:
            self._parts.reporter.status("saving a checkpoint")
            await self.checkpoint()
            if self._spec.journal.keep != "all":
                self._spawn(self._parts.buffer.call("prune", self._spec.journal.keep))

    def _evaluations_due(self) -> list[Series]:
        """What is to be evaluated after this step and has not been, perhaps since the run was stopped in its midst."""
        due = self._parts.evaluator.due(self._step)
        return [series for series in due if (self._step, series.kind) not in self._evaluated]

    def _begin_evaluation(self) -> None:
        if due := self._evaluations_due():
            self._evaluating.add(self._step)
            self._evaluation = self._tasks.create_task(self._evaluate(due, self._step))
            # The accuracy before training is that of the initial model and nothing else.
            self._pinned = self._step == 0 or self._spec.evaluation.fix_version

    async def _finish_evaluation(self, what: str) -> None:
        if self._evaluation is not None:
            await self._parts.watchdog.until(self._evaluation, GENERATION, what)
        self._evaluation, self._pinned = None, False

    async def _evaluate(self, due: list[Series], step: int) -> None:
        await asyncio.gather(*(self._evaluate_one(series, step) for series in due))
        self._evaluating.discard(step)

    async def _evaluate_one(self, series: Series, step: int) -> None:
        result = await self._parts.evaluator.evaluate(series, step)
        self._evaluated.add((step, series.kind))
        if result.kind == "greedy":
            self._accuracies[step] = result.accuracy
        self._parts.reporter.evaluated(result)
        await self._parts.buffer.call("evaluated", asdict(result))

    def _note_step(
        self, taken: Taken, report: StepReport, published: PublishReport | None
    ) -> Coroutine[Any, Any, None]:
        """Report a trained step; what is returned tells the buffer, which nothing needs to wait for."""
        window = self._clock.lap(report, taken.journal_s)
        names = task_names(self._spec.task)
        metrics = step_metrics(taken.batch, report, published, window, taken.counts, names)
        prompts = self._parts.prompts
        metrics["data/skipped_prompts"] = float(prompts.skipped)
        if prompts.unusable:
            metrics["data/unusable_prompts"] = float(prompts.unusable)
        if prompts.filter is not None:
            metrics["data/filtered_prompts"] = float(prompts.filter.filtered)
        step = taken.batch.step
        self._warn_of_gap(step + 1, report)
        self._parts.reporter.stepped(step + 1, self._version, metrics, time.time())
        self._reported = step + 1
        self._untold[step] = StepRecord(step, batch_digest(taken.batch), metrics)
        return self._tell()

    def _warn_of_gap(self, step: int, report: StepReport) -> None:
        """Say once that an engine's log-probs are further from the trainer's than rounding explains."""
        gap, limit = report.metrics.get("engine/logprob_gap_max", 0.0), TOLERANCE["float32"]
        if self._spec.trainer.dtype == self._spec.rollout.dtype == "float32" and gap > limit and not self._gap_warned:
            self._gap_warned = True
            self._parts.reporter.warn(
                f"step {step}: an engine's log-probs are up to {gap:.2g} nats from the trainer's for the same weights; "
                f"in float32 {limit:g} is the most that rounding explains (metric engine/logprob_gap_max)"
            )

    async def _tell(self) -> None:
        """Return when the journal has every step that was reported."""
        for step, record in list(self._untold.items()):
            await self._parts.buffer.call("trained", record)
            self._untold.pop(step, None)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # the run is ending
            work.close()


async def _nothing() -> None:
    pass


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
