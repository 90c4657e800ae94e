"""The buffer: a run's ledger and journal, in the driver's process.

A call returns after everything that it noted has been committed (decision 0013). Commits run one after another in a
separate thread, and calls that arrive during a commit share the next commit, so a higher load needs fewer commits per
call. When a commit fails, its calls and all later calls raise its ``JournalError``.

Invariant: after ``open`` only the event loop uses the ledger and the notes, and only the journal's thread uses the
file. So a slow disk does not stop the loop, and no lock is needed (decision 0013).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, Self, TypeVar

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.events import HEALTH
from asyncrl_cli.journal.file import Statement
from asyncrl_cli.journal.rollout_rows import RolloutOutcome, reduced_key, rollout_outcome
from asyncrl_cli.journal.schema import JournalError
from asyncrl_cli.records.generation import EngineRequest, Rollout, Segment
from asyncrl_cli.records.groups import (
    BufferSettings,
    Candidate,
    Group,
    Opening,
    Outcome,
    PublishRecord,
    Settled,
    StepRecord,
    TakenBatch,
    Waiting,
)
from asyncrl_cli.records.training import TrainingBatch
from asyncrl_cli.runs.checkpoints import complete_checkpoints

P = ParamSpec("P")
T = TypeVar("T")

LAZY_S = 0.1
"""Longest delay (s) of a commit that is not urgent. The delay lets more calls share the commit."""
MANY = 500
"""From this number of notes on, a commit starts without delay."""
PATIENCE_S = 2.0
"""Seconds after which ``take`` reports why there is no batch yet."""
CLOSE_S = 10.0
"""Seconds that closing the journal may take."""


class Disk:
    """A thread that runs functions one after another, each for at most ``limit_s`` seconds.

    The thread is a daemon: the process must be able to end although its disk hangs.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path = path
        self._limit_s = limit_s
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        Thread(target=self._run_jobs, name="journal", daemon=True).start()

    async def run(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Run a function that reads or writes the journal. Raises ``JournalError`` after ``limit_s`` seconds."""
        job: Future[T] = Future()
        self._jobs.put((job, partial(function, *arguments, **keywords)))
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise JournalError(
                f"the disk has not answered for {self._limit_s:.0f} s",
                location=str(self._path),
                hint="check the disk, then `asyncrl resume`: everything acknowledged is in the journal",
            ) from None

    def stop(self) -> None:
        """End the thread once its jobs are done."""
        self._jobs.put(None)

    def _run_jobs(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, function = item
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(function())
                except BaseException as error:
                    job.set_exception(error)
            del item, job, function  # otherwise a large batch stays in memory while the thread waits for its next job


class Buffer:
    """Admits groups, records their rollouts and results, and returns batches. Every answer follows its commit."""

    @classmethod
    async def open(
        cls,
        path: Path,
        settings: BufferSettings,
        start_kind: str,
        note: str = "",
        base: Mapping[str, Any] | None = None,
        *,
        limit_s: float,
    ) -> tuple[Self, Opening]:
        """Open the journal as ``start_kind`` (``train``, ``resume``) and read the run's state. Raises ``JournalError``.

        ``limit_s``: seconds that one operation on the disk may take.
        """

        def begin() -> tuple[DurableLedger, Opening]:
            book = DurableLedger.begin(path, settings, start_kind, note, base)
            return book, book.opening()

        disk = Disk(path, limit_s)
        try:
            book, opening = await disk.run(begin)
        except BaseException:
            disk.stop()
            raise
        return cls(path, book, disk), opening

    def __init__(self, path: Path, book: DurableLedger, disk: Disk) -> None:
        """Use ``open``."""
        self._path = path
        self._book = book
        self._disk = disk
        self._next_commit: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )  # done after the next commit
        self._committing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # a waiting ``take`` must look again
        self._commit_requested = False
        self._urgent = asyncio.Event()
        self._broken: Exception | None = None
        self._busy_s = 0.0

    def room(self) -> int:
        """Number of groups that may be admitted now."""
        return self._book.ledger.room()

    async def admit(self, candidates: Sequence[Candidate]) -> tuple[Group, ...]:
        """Admit these prompts. Raises ``LedgerError`` if there is no ``room`` for all of them."""
        groups = self._book.admit(candidates)
        # Commit before returning: otherwise tokens could be generated for a group that a kill removes (decision 0013).
        await self._commit()
        return groups

    async def record(
        self, rollouts: Sequence[Rollout] = (), segments: Sequence[Segment] = (), outcomes: Sequence[Outcome] = ()
    ) -> Settled:
        """Record finished rollouts, new tokens of unfinished rollouts, and rewards and failures of recorded rollouts.
        Returns the groups that the outcomes have ended."""
        self._book.grown(segments)
        settled = self._book.record(rollouts, outcomes)
        self._changed.set()
        await self._commit(urgent=False)
        return settled

    async def handed_out(self, rollout_id: str) -> None:
        """Record that a rollout without tokens belongs to a program outside of the run from now on."""
        self._book.journal.handed_out(rollout_id)
        await self._commit()

    async def flush(self) -> None:
        """Return once everything that was recorded is on disk."""
        await self._commit(urgent=False)

    async def outcome(self, rollout_id: str) -> RolloutOutcome | None:
        """Read how a rollout and its group have ended; None if the run has no such group."""
        await self._commit()
        return await self._disk.run(self._book.journal.read, rollout_outcome, rollout_id)

    def note_request(self, request: EngineRequest) -> None:
        """Note a request that has left its engine. It is written with the next commit, and nothing waits for it."""
        self._book.journal.requested(request)

    async def take(self, step: int, patience_s: float = PATIENCE_S) -> TakenBatch | Waiting:
        """Take a step's batch. Returns the reason if there is none after ``patience_s`` seconds."""
        deadline = time.monotonic() + patience_s
        while (waiting := self._book.take(step)) is not None:
            remaining_s = deadline - time.monotonic()
            if waiting.overdue or remaining_s <= 0 or self._broken is not None:
                await self._commit()
                return waiting
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await self._changed.wait()
        # Read from the file, not from memory: training, replay and resume must read the same bytes (decision 0013).
        return TakenBatch(await self.batch(step), self._book.ledger.counts(), self._busy_s)

    async def batch(self, step: int) -> TrainingBatch:
        """Read a taken batch from the journal."""
        # Commit before it is trained: otherwise a checkpoint could have a later step than the journal after a kill.
        await self._commit()
        return await self._disk.run(self._book.batch, step)

    async def requeue(self, group_ids: Sequence[int]) -> list[tuple[int, int, int]]:
        """Abandon overdue groups and start their prompts again. Returns (old index, new index, version) for each."""
        started = self._book.requeue(group_ids)
        self._changed.set()
        await self._commit()
        return started

    async def reduce_microbatches(self, step: int, tokens: int) -> None:
        """Record that a taken batch is trained in micro-batches of at most ``tokens``."""
        self._book.journal.described({reduced_key(step): tokens})
        await self._commit()

    def trained(self, record: StepRecord, findings: Sequence[tuple[str, str]] = ()) -> None:
        """Note a trained step, and health findings (rule, text) that began or ended with it. Nothing waits for their
        commit, which comes within ``LAZY_S``, and before any later call's answer."""
        self._book.journal.trained(record)
        for rule, text in findings:
            self._book.journal.failed(HEALTH, rule, text)
        self._request_commit(urgent=False)

    async def publish(self, record: PublishRecord) -> None:
        """Record that every serving engine has proved a version."""
        self._book.publish(record)
        self._changed.set()
        await self._commit()

    async def fallback(self, step: int) -> dict[str, Any]:
        """Return the state that the checkpoint of ``step`` stores to resume without the journal."""
        await self._commit()
        return await self._disk.run(self._book.fallback, step)

    async def checkpointed(
        self, step: int, folder: str, seconds: float, stall_s: float, removed: Sequence[int] = ()
    ) -> None:
        """Record that a checkpoint is complete, and that the older checkpoints in ``removed`` are deleted."""
        self._book.journal.checkpointed(step, folder=folder, seconds=seconds, stall_s=stall_s)
        for removed_step in removed:
            self._book.journal.checkpoint_removed(removed_step)
        await self._commit()

    async def uploaded(self, step: int, failure: str) -> None:
        """Record that a checkpoint was uploaded, or why it was not."""
        self._book.journal.uploaded(step, failure)
        await self._commit()

    async def evaluated(self, result: Mapping[str, Any]) -> None:
        """Record an evaluation (the fields of ``monitors.base.EvaluationResult``)."""
        self._book.journal.evaluated(result)
        await self._commit(urgent=False)

    async def failed(self, failure_kind: str, part_name: str, message: str) -> None:
        """Record a failure, whether or not the run continues."""
        self._book.journal.failed(failure_kind, part_name, message)
        await self._commit(urgent=False)

    def engine_changed(self, engine: str, change: str, reason: str) -> None:
        """Note that an engine began to serve (``join``) or left (``leave``). Nothing waits for the commit."""
        self._book.journal.engine_changed(engine, change, reason)
        self._request_commit(urgent=False)

    async def prune(self, checkpoints: int) -> None:
        """Delete tokens that neither the newest ``checkpoints`` checkpoints nor any checkpoint on disk needs. The
        commits are small, and other calls' commits come between them."""
        await self._commit()
        before_step = await self._disk.run(self._first_needed_step, checkpoints)
        while await self._disk.run(self._book.journal.prune, before_step):
            await self._commit()

    async def close(self) -> None:
        """Write everything into the one file and close it, in bounded time. Later calls raise ``JournalError``."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._commit()
        finally:
            closed = JournalError("the journal is closed", location=str(self._path), hint="`asyncrl resume`")
            self._broken = self._broken or closed
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._disk.run(self._book.journal.close)
            finally:
                self._disk.stop()

    def _first_needed_step(self, checkpoints: int) -> int:
        on_disk = [checkpoint.step for checkpoint in complete_checkpoints(self._path.parent / "checkpoints")]
        return self._book.journal.first_needed_step(checkpoints, on_disk)

    async def _commit(self, urgent: bool = True) -> None:
        """Return once everything noted so far is on disk. Unless ``urgent``, the commit waits up to ``LAZY_S`` for
        other calls to share it."""
        # Shielded, because other calls wait for the same commit: a cancelled call must not cancel it for them.
        await asyncio.shield(self._request_commit(urgent))

    def _request_commit(self, urgent: bool) -> asyncio.Future[None]:
        if self._broken is not None:
            raise self._broken
        self._commit_requested = True
        if urgent or self._book.journal.notes >= MANY:
            self._urgent.set()
        next_commit = self._next_commit
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit_all())
        return next_commit

    async def _commit_all(self) -> None:
        while self._commit_requested:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAZY_S):
                    await self._urgent.wait()
            self._urgent.clear()
            self._commit_requested = False
            # Take the notes together with the calls that wait for them. A call that notes something from now on waits
            # for the next commit: this one does not contain its notes.
            statements = self._book.journal.noted()
            this_commit, self._next_commit = self._next_commit, asyncio.get_running_loop().create_future()
            try:
                if statements:
                    self._busy_s += await self._disk.run(self._timed_commit, statements)
            except Exception as error:
                # Memory is ahead of the disk now. A later answer could depend on the lost notes, so this buffer answers
                # no further call (decision 0013).
                self._broken = error
                for waiting in (this_commit, self._next_commit):
                    waiting.set_exception(error)
                    waiting.exception()  # marks the error as retrieved; without a caller, asyncio would log it
                self._changed.set()
                return
            this_commit.set_result(None)

    def _timed_commit(self, statements: list[Statement]) -> float:
        started = time.monotonic()
        self._book.journal.commit(statements)
        return time.monotonic() - started
