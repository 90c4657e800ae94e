"""Recovers the trainer, so that its weights are at the ledger's step.

The ledger only moves forward. The trainer can be behind it when it starts from a checkpoint or loses a rank. Then it
trains the recorded batches again, in order, which repeats exactly the lost updates. Invariant: ``step`` is the number
of steps in the trainer's weights, and work that needs the weights of a step is done only with these weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

from asyncrl_cli.orchestrator.buffer_client import BufferClient
from asyncrl_cli.orchestrator.publisher import Publisher
from asyncrl_cli.orchestrator.replicas import Written
from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.records.groups import Opening, PublishRecord
from asyncrl_cli.records.training import StepReport, TrainingBatch
from asyncrl_cli.runs.checkpoints import newest_undamaged
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.system.supervised_actor import RestartBudget
from asyncrl_cli.weights.manifest import comparable

GUARD_S = 2.0
"""Seconds between two checks of idle ranks."""

T = TypeVar("T")


class ResilientTrainer:
    """Trainer ranks that are restarted after a death, and the version that engines serve.

    Attributes:
        step: number of steps in the weights.
        version: the version that engines serve.
        between_steps: whether the weights are exactly those after ``step`` steps. False while a step is trained, and
            after a step was cancelled, because the ranks finish it.
    """

    def __init__(
        self,
        ranks: TrainerRanks,
        publisher: Publisher,
        buffer: BufferClient,
        run: RunDirectory,
        budget: RestartBudget,
        *,
        step: int,
        opening: Opening,
        publish_every: int,
        repeated: Callable[[TrainingBatch, StepReport], None],
        gpu_turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """``step``: the step from which the ranks have started. ``repeated`` is called for every recorded batch that is
        trained again. Each step is trained within a ``gpu_turn()``."""
        self.step = step
        self.version = opening.version
        self.between_steps = True
        self._opened = opening.version, opening.checksum
        self._ranks = ranks
        self._publisher = publisher
        self._buffer = buffer
        self._run = run
        self._budget = budget
        self._publish_every = publish_every
        self._repeated = repeated
        self._gpu_turn = gpu_turn
        self._down = False
        self._turn = asyncio.Lock()

    async def catch_up(self, step: int) -> None:
        """Train recorded batches until the weights are those after ``step`` steps."""
        await self._at(step, _nothing)

    async def train(self, batch: TrainingBatch) -> StepReport:
        """Train the batch that follows the weights' last step."""
        return await self._at(batch.step, lambda: self._train_step(batch))

    async def write(self, version: int) -> Written:
        """Write the weights after the steps of ``version`` into the memory of the ranks' hosts. When this returns, the
        ranks can train again, and the version survives the death of a rank."""
        step = version * self._publish_every
        async with self._turn:
            if self.step > step:
                await self._go_back(f"no host has version {version} any more, and no engine has got it")
            return await self._do(step, lambda: self._publisher.write(version))

    async def deliver(self, written: Written) -> PublishRecord:
        """Have every engine serve a version, while the ranks may train.

        If its hosts lose it before the engines have it, it is written again; ranks that have trained since then first
        return to a checkpoint.
        """
        while (record := await self._publisher.deliver(written)) is None:
            written = await self.write(written.version)
        self.version = record.version
        return record

    async def save(self, step: int, write: Callable[[], Awaitable[T]]) -> T:
        """Call ``write``, which has the ranks save the weights after ``step`` steps; returns its result."""
        return await self._at(step, write)

    async def guard(self) -> None:
        """Detect deaths of ranks while they are idle, and engines that wait for weights that no host has any more.
        Never ends."""
        out_of_reach = -1
        while True:
            await asyncio.sleep(GUARD_S)
            async with self._turn:
                version, _ = self._offered
                passed = self.step > version * self._publish_every
                back = passed and self._publisher.missed and out_of_reach != version
                if back:
                    # Without engines there is no batch, and so no step after which the next version would be published.
                    await self._go_back(f"no host has version {version} any more, and all engines wait for it")
                await self._do(self.step, self._ranks.check)
                if back:
                    # A checkpoint of a later step may be the newest one: then the next publish is due.
                    out_of_reach = -1 if self._publisher.available else version

    async def _at(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work`` with the weights after ``step`` steps, again after a death of a rank; returns its result."""
        async with self._turn:
            return await self._do(step, work)

    async def _do(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                await self._catch_up(step)
                if self.step != step:
                    raise RuntimeError(f"the weights are those after {self.step} steps, not after {step}")
                return await work()
            except TrainerLost as lost:
                await self._go_back(lost.cause, lost.name)

    async def _go_back(self, cause: str, name: str = "trainer-0") -> None:
        """Have the next work begin with a restart of all ranks from a checkpoint; ``name`` is that of the lost rank."""
        self._down = True
        await self._budget.spend("trainer", name, cause)

    async def _catch_up(self, step: int) -> None:
        if self._down or not self.between_steps:  # the second if a step was cancelled
            newest = await asyncio.to_thread(newest_undamaged, self._run, step)
            self.step, folder = (newest.step, newest.folder) if newest else (0, None)
            await self._ranks.restart(folder)
            self._down, self.between_steps = False, True
        await self._publish_again(step)
        while self.step < step:
            # From the journal, never from memory: exactly what was recorded is trained again (decision 0012).
            batch = await self._buffer.batch(self.step)
            report = await self._train_step(batch)
            self._repeated(batch, report)
            await self._publish_again(step)

    @property
    def _offered(self) -> tuple[int, str | None]:
        """The version that engines serve or are loading, and the checksum of its bytes, if it is known. While a publish
        is in flight, it is one more than ``version``."""
        return self._publisher.current or self._opened

    async def _publish_again(self, step: int) -> None:
        """Write the present version again if no host has it, because engines that start need it. That happens after a
        resume, and when the agents that had it are lost. It is written when the trainer passes its step on the way to
        ``step``, unless the next version is published at ``step`` anyway."""
        if self._publisher.available:
            return
        version, checksum = self._offered
        if step == (version + 1) * self._publish_every and not self._publisher.missed:
            return
        if self.step != version * self._publish_every:
            return
        record = await self._publisher.serve(version)
        if checksum is None:
            await self._buffer.publish(record)
        elif record.checksum != checksum and comparable(record.checksum, checksum):
            await self._budget.note(
                "weights",
                "trainer-0",
                f"made version {version} again with other bits; expected after a change of settings or "
                "hardware, and on GPUs without deterministic kernels",
            )

    async def _train_step(self, batch: TrainingBatch) -> StepReport:
        async with self._gpu_turn():
            self.between_steps = False
            report = await self._ranks.train_step(batch)
            self.step, self.between_steps = batch.step + 1, True
        return report


async def _nothing() -> None:
    pass
