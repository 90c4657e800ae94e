"""Recovers the trainer: brings its weights to the ledger's step.

The ledger only moves forward. The trainer can be behind it when it starts from a checkpoint or loses a rank. Then it
trains the recorded batches again, in order, which repeats exactly the lost updates. Invariant: ``step`` is the number
of steps in the trainer's weights, and work that needs the weights of a step is done only with these weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.records.training import StepReport, TrainingBatch
from asyncrl_cli.runs.checkpoints import newest_undamaged
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.system.supervised_actor import RestartBudget

GUARD_S = 2.0
"""Seconds between two checks of idle ranks."""

T = TypeVar("T")


class StepPassed(Exception):
    """The weights are those after a later step than the one that was asked for."""


class ResilientTrainer:
    """Trainer ranks that are restarted after a death."""

    def __init__(
        self,
        ranks: TrainerRanks,
        *,
        buffer: Buffer,
        run: RunDirectory,
        budget: RestartBudget,
        step: int,
        repeated: Callable[[TrainingBatch, StepReport], None],
        gpu_turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """``step``: the step from which the ranks have started. ``repeated`` is called for every recorded batch that is
        trained again. Each step is trained within a ``gpu_turn()``."""
        self.step = step
        """Number of steps in the weights."""
        self.ready = True
        """True if the ranks live and have exactly the weights after ``step`` steps. A step that is cancelled leaves it
        False, because the ranks finish the step."""
        self._ranks = ranks
        self._buffer = buffer
        self._run = run
        self._budget = budget
        self._repeated = repeated
        self._gpu_turn = gpu_turn
        self.recovering = asyncio.Lock()
        """Held while checkpoints and recorded batches are read: those that a recovery needs must not be deleted."""
        # The ranks' calls are collective: two at a time could reach ranks in different orders, and never return.
        self._turn = asyncio.Lock()

    async def at(self, step: int, work: Callable[[], Awaitable[T]], go_back: str = "") -> T:
        """Do ``work`` with the weights after ``step`` steps, again after the death of a rank; returns its result.

        Recorded batches are trained to get there. ``go_back``: the reason to return to a checkpoint if the weights are
        later ones; without one, ``StepPassed`` is raised.
        """
        async with self._turn:
            if self.ready and self.step > step and go_back:  # ranks that are lost restart from a checkpoint anyway
                await self._lose("trainer-0", go_back)
            return await self._at(step, work)

    async def train(self, batch: TrainingBatch) -> StepReport:
        """Train the batch that follows the weights' last step."""
        return await self.at(batch.step, lambda: self._train(batch))

    async def catch_up(self, step: int = 0) -> None:
        """Restart the ranks if one has died, and train recorded batches until the weights have at least ``step``
        steps."""
        async with self._turn:
            await self._at(max(step, self.step), self._ranks.check)

    async def guard(self) -> None:
        """Detect deaths of ranks while they are idle. Never ends."""
        while True:
            await asyncio.sleep(GUARD_S)
            await self.catch_up()

    async def _at(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                if not self.ready or self.step < step:
                    async with self.recovering:
                        await self._recover(step)
                if self.step > step:
                    raise StepPassed(f"the weights are those after {self.step} steps, not after {step}")
                return await work()
            except TrainerLost as lost:
                await self._lose(lost.name, lost.cause)

    async def _recover(self, step: int) -> None:
        if not self.ready:
            # Not later than the step: weights are never computed backwards. A damaged checkpoint is skipped, because an
            # older one only repeats more steps.
            newest = await asyncio.to_thread(newest_undamaged, self._run, step)
            self.step, folder = (newest.step, newest.folder) if newest else (0, None)
            await self._ranks.restart(folder)
            self.ready = True
        while self.step < step:
            # From the journal, never from memory: exactly what was recorded is trained again (decision 0012).
            batch = await self._buffer.batch(self.step)
            self._repeated(batch, await self._train(batch))

    async def _lose(self, name: str, cause: str) -> None:
        """Have the next work begin with a restart of all ranks from a checkpoint."""
        self.ready = False
        await self._budget.spend("trainer", name, cause)

    async def _train(self, batch: TrainingBatch) -> StepReport:
        async with self._gpu_turn():
            # Before the call: if it is cancelled, the ranks finish the step, and no caller learns when.
            self.ready = False
            report = await self._ranks.train_step(batch)
            self.step, self.ready = batch.step + 1, True
        return report
