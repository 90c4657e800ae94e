"""The trainer, kept level with the ledger.

The ledger only moves forward. The trainer can fall behind it, when it starts from a checkpoint or loses a rank;
then it trains the recorded batches again, in order, and so repeats the very updates that it lost. Invariant:
``step`` is the number of steps in the trainer's weights, and no work is done with others than it asks for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from asyncrl_cli.pipeline.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.train.records import StepReport, TrainingBatch

T = TypeVar("T")


class Follower:
    """Trainer ranks that survive their deaths."""

    def __init__(
        self,
        ranks: TrainerRanks,
        step: int,
        newest: Callable[[], Awaitable[tuple[int, Path | None]]],
        read_batch: Callable[[int], Awaitable[TrainingBatch]],
        passed: Callable[[int], Awaitable[None]],
        trained: Callable[[TrainingBatch, StepReport], Awaitable[None]],
        lost: Callable[[TrainerLost], Awaitable[None]],
    ) -> None:
        """``step``: what the ranks have started from.

        Args:
            newest: step and folder of the newest checkpoint, or 0 and None.
            read_batch: the recorded batch of a step.
            passed: called while catching up, when the weights are those after so many steps.
            trained: called for every batch that is trained again.
            lost: called when a rank died; raises when that has happened too often.
        """
        self._ranks = ranks
        self.step = step
        self._newest = newest
        self._read_batch = read_batch
        self._passed = passed
        self._trained = trained
        self._lost = lost
        self._down = False

    async def at(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, done with the weights after ``step`` steps; it is done again after a death."""
        while True:
            try:
                await self._catch_up(step)
                return await work()
            except TrainerLost as lost:
                self._down = True
                await self._lost(lost)

    async def train(self, batch: TrainingBatch) -> StepReport:
        """Train the batch that follows the weights' last step."""
        reports = await self.at(batch.step, lambda: self._ranks.call("train_step", batch))
        self.step = batch.step + 1
        report: StepReport = reports[0]
        return report

    async def call(self, step: int, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks with the weights after ``step`` steps."""
        return await self.at(step, lambda: self._ranks.call(method, *arguments))

    async def _catch_up(self, step: int) -> None:
        if self._down:
            self.step, folder = await self._newest()
            await self._ranks.restart(folder)
            self._down = False
        await self._passed(self.step)
        while self.step < step:
            batch = await self._read_batch(self.step)
            report: StepReport = (await self._ranks.call("train_step", batch))[0]
            self.step += 1
            await self._trained(batch, report)
            await self._passed(self.step)
