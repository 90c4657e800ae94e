"""The buffer: the Ray actor that owns ledger and journal.

A call is answered after everything that it noted has been committed (decision 0013). Commits run one after another in a
separate thread, and calls that arrive during a commit share the next one, so that a higher load needs fewer commits per
call. When a commit fails, its calls and all later ones raise its ``JournalError``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.file import Statement
from asyncrl_cli.records.generation import EngineRequest, Rollout, Segment
from asyncrl_cli.records.groups import (
    Admitted,
    BufferSettings,
    Candidate,
    Opening,
    Outcome,
    PublishRecord,
    Settled,
    StepRecord,
    Taken,
    Waiting,
)
from asyncrl_cli.records.training import TrainingBatch
from asyncrl_cli.runs.checkpoints import complete_checkpoints
from asyncrl_cli.system.logs import redirect_output

LAZY_S = 0.1
"""Seconds by which a commit may be delayed if nothing waits for it, so that several calls share it."""
MANY = 500
"""With this many notes, a commit is not delayed."""


class Buffer:
    """The Ray actor. All methods are Ray calls, and safe to repeat."""

    def __init__(self, path: str, settings: BufferSettings, log_dir: str) -> None:
        redirect_output(log_dir, "buffer")
        self._path = Path(path)
        self._settings = settings
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._committing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._asked = False
        self._urgent = asyncio.Event()
        self._broken: Exception | None = None
        self._busy_s = 0.0

    async def open(self, kind: str, note: str = "", base: Mapping[str, Any] | None = None) -> Opening:
        """Open the journal as ``kind`` (``train``, ``resume``, ``restart``) and report the run's state."""
        self._book = DurableLedger.begin(self._path, self._settings, kind, note, base)
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        opening = self._book.opening()
        await self._commit()
        return opening

    async def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    async def admit(self, candidates: list[Candidate]) -> Admitted:
        """Admit the first of these prompts, as many as there is room for."""
        admitted = self._book.admit(candidates)
        # Commit before the answer: otherwise a buffer that is killed could lose admitted groups (decision 0013).
        await self._commit(0.0 if admitted.admissions else LAZY_S)
        return admitted

    async def record(
        self,
        rollouts: list[Rollout],
        segments: list[Segment],
        outcomes: list[Outcome],
        requests: Sequence[EngineRequest] = (),
    ) -> Settled:
        """Finished rollouts, new tokens of unfinished ones, rewards and failures of recorded rollouts, and requests
        that have left their engines. Durable when it returns, with the groups that the outcomes have ended."""
        self._book.journal.requested(requests)
        self._book.grown(segments)
        settled = self._book.record(rollouts, outcomes)
        self._changed.set()
        await self._commit(LAZY_S)
        return settled

    async def take(self, step: int, patience_s: float) -> Taken | Waiting:
        """The batch of a step, or after ``patience_s`` seconds what it waits for."""
        deadline = time.monotonic() + patience_s
        while (waiting := self._book.take(step)) is not None:
            left = deadline - time.monotonic()
            if waiting.overdue or left <= 0 or self._broken is not None:
                await self._commit()
                return waiting
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue
        # Read from the file, not from memory: training, replay and resume must read the same bytes (decision 0013).
        return Taken(await self.batch(step), self._book.ledger.counts(), self._busy_s)

    async def batch(self, step: int) -> TrainingBatch:
        """A batch that was taken, from the journal."""
        await self._commit()  # before it is trained: no other file may have a later step than the journal
        batch: TrainingBatch = await self._on_disk(self._book.journal.batch, step)
        return batch

    async def requeue(self, group_ids: list[int]) -> list[tuple[int, int, int]]:
        """Abandon overdue groups and start their prompts again; returns (old index, new index, version)."""
        started = self._book.requeue(group_ids)
        self._changed.set()
        await self._commit()
        return started

    async def trained(self, record: StepRecord) -> None:
        """A step is trained."""
        self._book.journal.trained(record)
        await self._commit(LAZY_S)

    async def publish(self, record: PublishRecord) -> None:
        """Every serving engine has proved a version."""
        self._book.publish(record)
        self._changed.set()
        await self._commit()

    async def fallback(self, step: int) -> dict[str, Any]:
        """What the checkpoint of ``step`` keeps."""
        await self._commit()
        state: dict[str, Any] = await self._on_disk(self._book.fallback, step)
        return state

    async def checkpointed(self, step: int, folder: str, seconds: float, removed: list[int]) -> None:
        """A checkpoint is complete, and older ones are removed."""
        self._book.journal.checkpointed(step, folder, seconds)
        for old in removed:
            self._book.journal.checkpoint_removed(old)
        await self._commit()

    async def evaluated(self, result: dict[str, Any]) -> None:
        """An evaluation is done."""
        self._book.journal.evaluated(result)
        await self._commit(LAZY_S)

    async def failed(self, kind: str, part: str, message: str) -> None:
        """Something failed, whether or not the run continues."""
        self._book.journal.failed(kind, part, message)
        await self._commit(LAZY_S)

    async def engine_changed(self, engine: str, change: str, reason: str) -> None:
        """An engine began to serve (``join``), or left (``leave``)."""
        self._book.journal.engine_changed(engine, change, reason)
        await self._commit(LAZY_S)

    async def prune(self, checkpoints: int) -> None:
        """Keep the tokens that the newest checkpoints, and all on disk, need; drop older ones in small commits."""
        await self._commit()
        on_disk = [found.step for found in complete_checkpoints(self._path.parent / "checkpoints")]
        before = await self._on_disk(self._book.journal.needed_from, checkpoints, on_disk)
        while await self._on_disk(self._book.journal.prune, before):
            await self._commit()

    async def close(self) -> None:
        """Write everything into the one file, and close it. The last call."""
        await self._commit()
        await self._on_disk(self._book.journal.close)

    async def _commit(self, patience_s: float = 0.0) -> None:
        """Return when everything noted so far is on disk. The commit may wait ``patience_s`` seconds for other calls
        that share it."""
        if self._broken is not None:
            raise self._broken
        self._asked = True
        if not patience_s or self._book.journal.notes >= MANY:
            self._urgent.set()
        wanted = self._next
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit_all())
        await asyncio.shield(wanted)

    async def _commit_all(self) -> None:
        while self._asked:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), LAZY_S)
            self._urgent.clear()
            self._asked = False
            # Take the notes and their waiting calls together: a call that notes more from now on waits for the next
            # commit.
            statements = self._book.journal.noted()
            done, self._next = self._next, asyncio.get_running_loop().create_future()
            try:
                await self._on_disk(self._timed, statements)
            except Exception as error:
                # Memory is ahead of the disk now, so this buffer answers no further call (decision 0013).
                self._broken = error
                for waiting in (done, self._next):
                    waiting.set_exception(error)
                    waiting.exception()  # marks the error as retrieved: it may have no caller, and asyncio would log it
                self._changed.set()
                return
            done.set_result(None)

    def _timed(self, statements: list[Statement]) -> None:
        if not statements:
            return
        started = time.monotonic()
        self._book.journal.commit(statements)
        self._busy_s += time.monotonic() - started

    async def _on_disk(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._disk, function, *arguments)
