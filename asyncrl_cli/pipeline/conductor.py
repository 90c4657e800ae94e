"""The one loop of a run.

    admit -> generate -> score -> finish -> take -> train -> publish -> admit ...

Generation and training never wait for each other except where the ledger says so; ``sync``,
``one_step_off`` and ``async`` are settings of its numbers and of nothing in this file. A version counts as
published only after every engine has proved it, so a group admitted under version v never holds an older token.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from asyncrl_cli.buffer.ledger import Batch, Ledger
from asyncrl_cli.observe.records import EvaluationKind, EvaluationResult
from asyncrl_cli.observe.reporter import Reporter
from asyncrl_cli.pipeline.checkpoints import Checkpoints
from asyncrl_cli.pipeline.dispatcher import Dispatcher
from asyncrl_cli.pipeline.evaluation import Evaluator
from asyncrl_cli.pipeline.fleet import Fleet
from asyncrl_cli.pipeline.groups import Ended, GroupSource
from asyncrl_cli.pipeline.metrics import StepClock, describe_batch, step_metrics
from asyncrl_cli.pipeline.prompting import PromptSource
from asyncrl_cli.pipeline.publisher import Publisher, PublishReport
from asyncrl_cli.pipeline.remote import wait_for
from asyncrl_cli.runs.directory import RunError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.records import StepReport, TrainingBatch


class Conductor:
    """Drives a started fleet from the ledger's step to the last one."""

    def __init__(
        self,
        spec: ExperimentSpec,
        fleet: Fleet,
        ledger: Ledger,
        prompts: PromptSource,
        dispatcher: Dispatcher,
        evaluator: Evaluator,
        checkpoints: Checkpoints,
        reporter: Reporter,
    ) -> None:
        self._spec = spec
        self._fleet = fleet
        self._ledger = ledger
        self._prompts = prompts
        self._dispatcher = dispatcher
        self._evaluator = evaluator
        self._checkpoints = checkpoints
        self._reporter = reporter
        self._groups = GroupSource(spec, ledger, dispatcher, prompts.next)
        self._stall_s = spec.pipeline.stall_minutes * 60
        self._publisher = Publisher(fleet, self._stall_s)
        self._changed = asyncio.Event()
        self._evaluation: asyncio.Task[None] | None = None
        self._training: asyncio.Task[list[StepReport]] | None = None

    async def run(self) -> None:
        """Train until the last step. Raises ``RunError`` with the first cause when the run cannot go on."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                collectors = [
                    tasks.create_task(self._dispatcher.collect_forever(engine)) for engine in self._dispatcher.engines
                ]
                await self._loop()
                for collector in collectors:
                    collector.cancel()
        except BaseExceptionGroup as group:
            raise _first_cause(group) from None

    async def settle(self) -> None:
        """After an interruption: wait until the trainer's step in flight, if any, is done.

        Raises ``RunError`` when it failed: the ledger counts it as trained, and nothing may be saved then.
        """
        if self._training is not None:
            await self._training

    async def checkpoint(self) -> None:
        """Save where the run is now. Call it between steps, or after ``settle``.

        Between two publishes nothing is saved: the engines' version could not be made again from it.
        """
        if self._ledger.step % self._ledger.publish_every:
            return
        outstanding = self._groups.outstanding_prompts() + self._prompts.waiting()
        await self._checkpoints.save(self._ledger, self._prompts.loader.state(), outstanding)

    async def _loop(self) -> None:
        ledger, steps = self._ledger, self._spec.stop.steps
        if ledger.publish_due:  # resumed between a version's last batch and its publish
            ledger.publish()
        self._reporter.status("publishing the first weights")
        await self._publisher.publish(ledger.version)
        self._clock = StepClock(self._dispatcher)
        await self._fill()
        first = self._begin_evaluation(0, None) if ledger.step == 0 else None
        while not ledger.done:
            batch = await self._next_batch()
            groups = self._groups.take(batch.group_ids)
            ledger.take(batch)
            training_batch = TrainingBatch(batch.step, batch.version, groups)
            self._reporter.doing("training", ledger.counts())
            self._training = asyncio.create_task(self._fleet.train("train_step", training_batch))
            report = (await self._bounded(asyncio.shield(self._training), "the trainer's step"))[0]
            published = None
            if ledger.publish_due:
                if first is not None:
                    # The accuracy before training belongs to one version, so the next one waits for it.
                    await self._bounded(first, "the evaluation before training")
                    first = None
                published = await self._publish()
                await self._fill()
            self._note_step(batch, training_batch, report, published)
            if not ledger.done:
                await self._between_steps(ledger.step)
        if self._evaluation is not None:
            await self._bounded(self._evaluation, "an evaluation")
        await self._bounded(self._begin_evaluation(steps, None), "the evaluation after training")
        await self.checkpoint()

    async def _between_steps(self, step: int) -> None:
        evaluation = self._spec.evaluation
        if evaluation.every and step % evaluation.every == 0:
            if self._evaluation is not None:
                await self._bounded(self._evaluation, "an evaluation")
            self._begin_evaluation(step, evaluation.prompts)
        if self._spec.checkpoints.every and step % self._spec.checkpoints.every == 0:
            self._reporter.doing("saving a checkpoint", self._ledger.counts())
            await self.checkpoint()

    def _begin_evaluation(self, step: int, count: int | None) -> asyncio.Task[None]:
        ends = step in (0, self._spec.stop.steps)
        kinds: tuple[EvaluationKind, ...] = ("greedy", "sampled") if ends else ("greedy",)
        self._evaluation = self._tasks.create_task(self._evaluate(kinds, step, count))
        return self._evaluation

    async def _evaluate(self, kinds: tuple[EvaluationKind, ...], step: int, count: int | None) -> None:
        results: list[EvaluationResult] = await asyncio.gather(
            *(self._evaluator.evaluate(kind, step, count) for kind in kinds)
        )
        for result in results:
            self._reporter.evaluated(result)

    async def _publish(self) -> PublishReport:
        ledger = self._ledger
        self._reporter.doing("publishing", ledger.counts())
        report = await self._publisher.publish(ledger.version + 1)
        ledger.publish()
        return report

    async def _next_batch(self) -> Batch:
        while True:
            upcoming = self._ledger.next_batch()
            if isinstance(upcoming, Batch):
                return upcoming
            if self._ledger.overdue():
                await self._groups.requeue_overdue(self._on_end)
                await self._dispatcher.flush()
                continue
            self._reporter.doing(f"waiting: {upcoming}", self._ledger.counts())
            self._changed.clear()
            waits_for = f"step {self._ledger.step} ({upcoming}; {self._dispatcher.running} rollouts are running)"
            await self._bounded(self._changed.wait(), waits_for)

    async def _bounded(self, work: Any, what: str) -> Any:
        try:
            return await asyncio.wait_for(work, self._stall_s)
        except TimeoutError:
            raise RunError(
                f"nothing moved for {self._spec.pipeline.stall_minutes:g} minutes while waiting for {what}",
                place="pipeline",
                mend="Look for the stalled part in the run's logs, or raise pipeline.stall_minutes",
            ) from None

    async def _fill(self) -> None:
        self._groups.fill(self._on_end)
        await self._dispatcher.flush()

    def _on_end(self, ended: Ended) -> None:
        to_score = self._groups.unscored(ended)
        if self._groups.failures > self._spec.rollout.max_failures:
            raise RunError(
                f"{self._groups.failures} groups were lost to failed rollouts; the first: {self._groups.first_failure}",
                place="rollout",
                mend="Mend that cause (logs/engine-*.log say more), or raise rollout.max_failures",
            )
        self._groups.fill(self._on_end)  # the collector that called this flushes
        self._changed.set()
        if to_score:
            self._tasks.create_task(self._score(to_score))

    async def _score(self, to_score: list[tuple[int, int, Any, Any]]) -> None:
        name, scorer = self._fleet.scorer
        responses = [(prompt, rollout.text, rollout.finished) for _, _, prompt, rollout in to_score]
        rewards: list[float] = await wait_for(scorer.score.remote(responses), name, self._stall_s)
        for (group_id, index, _, _), reward in zip(to_score, rewards, strict=True):
            self._groups.scored(group_id, index, reward)
        await self._fill()  # a rejected group has given its room back
        self._changed.set()

    def _note_step(
        self, batch: Batch, training_batch: TrainingBatch, report: StepReport, published: PublishReport | None
    ) -> None:
        window = self._clock.lap(report)
        metrics = step_metrics(batch, training_batch, report, published, window, self._ledger.counts())
        metrics["data/skipped_prompts"] = float(self._prompts.skipped)
        self._reporter.trained(describe_batch(training_batch))
        self._reporter.stepped(self._ledger.step, self._ledger.version, metrics, time.time())


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
