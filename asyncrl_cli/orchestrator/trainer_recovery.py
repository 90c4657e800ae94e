"""Recovers the trainer: brings its weights to the ledger's step.

The ledger only moves forward. After a start from a checkpoint or the loss of a rank, the trainer is behind it. Then it
trains the recorded batches again, in order, which repeats the lost updates exactly (decision 0009). Invariant: ``step``
is the number of steps in the trainer's weights, and work that needs a step's weights is done only with these weights.

A rank that runs out of GPU memory leaves the others in a collective call that never ends. So the ranks restart as after
a death, and train this batch in micro-batches of half as many tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.records.training import StepReport, TrainingBatch
from asyncrl_cli.runs.checkpoints import newest_undamaged
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.system.supervised_actor import RestartBudget
from asyncrl_cli.train.worker import FullGpu

GUARD_S = 2.0
"""Seconds between two checks of idle ranks."""
T = TypeVar("T")


class StepPassed(Exception):
    """The trainer's weights are already past the requested step."""


@dataclass(slots=True, eq=False)
class ResilientTrainer:
    """Trainer ranks that are restarted after a death."""

    ranks: TrainerRanks
    buffer: Buffer
    run: RunDirectory
    budget: RestartBudget
    microbatch_tokens: int
    repeated: Callable[[TrainingBatch, StepReport], None]
    """Called for each recorded batch that is trained again."""
    progress: Callable[[], None] = lambda: None
    """Called while a batch is trained again."""
    gpu_turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Each step is trained within it."""
    step: int = 0
    """Number of steps in the weights."""
    ready: bool = True
    """True if the ranks live and have exactly the weights after ``step`` steps. A cancelled step leaves it False,
    because the ranks finish the step."""
    recovering: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a recovery reads checkpoints and recorded batches; nobody may delete any during this time."""
    _reduced_tokens: dict[int, int] = field(default_factory=dict)  # by step, of this process; older: in their batches
    # Calls to the ranks are collective. Two at a time could reach the ranks in different orders and deadlock.
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def at_step(self, step: int, call: Callable[[], Awaitable[T]], go_back: str = "") -> T:
        """The result of ``call`` with the weights after ``step`` steps. If a rank dies, recover and repeat the call.

        If the weights are behind, recorded batches are trained first. If they are ahead, the ranks return to a
        checkpoint for the reason ``go_back``; without a reason, ``StepPassed`` is raised.
        """
        async with self._turn:
            if self.ready and self.step > step and go_back:  # lost ranks restart from a checkpoint anyway
                await self._lose("trainer-0", go_back)
            return await self._retry_at_step(step, call)

    async def train(self, batch: TrainingBatch, progress: Callable[[], None] = lambda: None) -> StepReport:
        """Train one batch at its step; ``progress`` as in ``TrainerRanks.train_step``."""
        return await self.at_step(batch.step, lambda: self._train(batch, progress))

    async def catch_up(self, step: int = 0) -> None:
        """Restart the ranks if one has died, and train recorded batches until at least ``step`` steps are done."""
        async with self._turn:
            await self._retry_at_step(max(step, self.step), self.ranks.check)

    async def guard(self) -> None:
        """Recover ranks that die while they are idle, before the next step needs them. Never ends."""
        while True:
            await asyncio.sleep(GUARD_S)
            await self.catch_up()

    async def _retry_at_step(self, step: int, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                if not self.ready or self.step < step:
                    async with self.recovering:
                        await self._recover(step)
                if self.step > step:
                    raise StepPassed(f"the weights are at step {self.step}, past step {step}")
                return await call()
            except TrainerLost as lost:  # also a rank that dies during the recovery; the budget bounds the attempts
                await self._lose(lost.name, lost.cause)

    async def _recover(self, step: int) -> None:
        if not self.ready:
            # A checkpoint past the step is useless: training cannot be undone. A damaged one is skipped: from an older
            # one the same weights follow, after more repeated steps.
            checkpoint = await asyncio.to_thread(newest_undamaged, self.run, step)
            self.step, folder = (checkpoint.step, checkpoint.folder) if checkpoint else (0, None)
            await self.ranks.restart(folder)
            self.ready = True
        while self.step < step:
            # From the journal, not from memory: a repeated step must see exactly the recorded batch (decision 0009).
            try:
                batch = await self.buffer.batch(self.step)
            except LookupError as error:
                raise RunError(
                    f"step {self.step + 1} cannot be trained again: {error.args[0]}",
                    location="trainer-0",
                    hint="the newest checkpoint is damaged, and the journal does not reach back to an older one: "
                    f"`asyncrl resume {self.run.argument} --without-journal` continues from that",
                ) from None
            self.repeated(batch, await self._train(batch, self.progress))

    async def _lose(self, name: str, cause: str) -> None:
        """Make the next work begin with a restart of all ranks. Raises ``RunError`` if the budget is spent."""
        self.ready = False
        await self.budget.spend("trainer", name, cause)

    async def _reduce(self, batch: TrainingBatch, error: FullGpu) -> NoReturn:
        """Halve the micro-batches of a batch, and raise ``TrainerLost``. Raises ``error`` if they have only one row."""
        tokens = batch.tokens_per_microbatch or self.microbatch_tokens
        if tokens <= batch.longest_row:
            raise error
        self._reduced_tokens[batch.step] = tokens // 2
        # Before the batch is trained so: a resume and a replay must divide it in the same way.
        await self.buffer.reduce_microbatches(batch.step, tokens // 2)
        cause = f"{error.message}; step {batch.step + 1} is trained with {tokens // 2:,} tokens a micro-batch"
        raise TrainerLost(error.location, cause) from error

    async def _train(self, batch: TrainingBatch, progress: Callable[[], None]) -> StepReport:
        async with self.gpu_turn():
            # Before the call: if it is cancelled, the ranks still finish the step, and nobody learns when.
            self.ready = False
            tokens = self._reduced_tokens.get(batch.step, batch.tokens_per_microbatch)
            batch = replace(batch, tokens_per_microbatch=tokens)
            try:
                report = await self.ranks.train_step(batch, progress)
            except FullGpu as error:
                await self._reduce(batch, error)
            self.step, self.ready = batch.step + 1, True
        return report
