"""The trainer, kept level with the ledger.

The ledger only moves forward. The trainer can fall behind it, when it starts from a checkpoint or loses a rank;
then it trains the recorded batches again, in order, and so repeats the very updates that it lost. Invariant:
``step`` is the number of steps in the trainer's weights, and no work is done with others than it asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.records.training import StepReport, TrainingBatch

GUARD_S = 2.0
"""Seconds between two looks at idle ranks."""

T = TypeVar("T")


class ResilientTrainer:
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
        self._turn = asyncio.Lock()
        self.between_steps = True
        """Whether the weights are those after ``step`` steps: not while one is trained, nor after one that was given
        up on. The ranks finish what they were called for."""

    async def at(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, done with the weights after ``step`` steps; it is done again after a death."""
        async with self._turn:
            return await self._at(step, work)

    async def guard(self) -> None:
        """Notice a death while nothing is asked of the ranks, for ever: engines may be waiting for their weights."""
        while True:
            await asyncio.sleep(GUARD_S)
            async with self._turn:
                await self._at(self.step, self._ranks.check)

    async def _at(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                await self._catch_up(step)
                if self.step != step:
                    raise RuntimeError(f"the weights are those after {self.step} steps, not after {step}")
                return await work()
            except TrainerLost as lost:
                self._down = True
                await self._lost(lost)

    async def train(self, batch: TrainingBatch) -> StepReport:
        """Train the batch that follows the weights' last step."""
        return await self.at(batch.step, lambda: self._train_step(batch))

    async def call(self, step: int, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks with the weights after ``step`` steps."""
        return await self.at(step, lambda: self._ranks.call(method, *arguments))

    async def _catch_up(self, step: int) -> None:
        if self._down or not self.between_steps:  # the latter when a step was given up on
            self.step, folder = await self._newest()
            await self._ranks.restart(folder)
            self._down, self.between_steps = False, True
        await self._passed(self.step)
        while self.step < step:
            batch = await self._read_batch(self.step)
            report = await self._train_step(batch)
            await self._trained(batch, report)
            await self._passed(self.step)

    async def _train_step(self, batch: TrainingBatch) -> StepReport:
        self.between_steps = False
        reports: list[StepReport] = await self._ranks.call("train_step", batch)
        self.step, self.between_steps = batch.step + 1, True
        return reports[0]
