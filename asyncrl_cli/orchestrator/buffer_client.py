"""The driver's client of the buffer: its calls survive the death of the buffer's actor.

A call whose actor died is repeated on a new actor, which has read the journal. All calls may be repeated
(``buffer.durable``), so the caller gets one answer. Before the repetition, ``on_reopen`` gets the journal's state,
which may contain groups that were admitted in a call whose answer was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from asyncrl_cli.monitors.base import EvaluationResult
from asyncrl_cli.records.generation import EngineRequest, Rollout, Segment
from asyncrl_cli.records.groups import (
    Admitted,
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
from asyncrl_cli.system.remote import ActorDied, wait_for
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor

NAME = "buffer"
ATTEMPTS = 3
"""How often the first opening is tried: a buffer that dies while the run starts is started again twice."""
PATIENCE_S = 2.0
"""Seconds after which the buffer reports what a batch waits for."""
CLOSE_S = 10.0
"""Seconds that the buffer may take to close the journal."""

T = TypeVar("T")


class BufferClient:
    """The methods of ``buffer.actor.Buffer``. They wait until ``open`` was called. Each raises ``JournalError``, and
    ``RunError`` after too many deaths of the actor."""

    def __init__(self, make_actor: Callable[[], Any], limit_s: float, budget: RestartBudget) -> None:
        """``limit_s``: seconds that one call may take."""
        # A buffer that does not answer is not replaced: the disk would not answer another one either (decision 0014).
        self._buffer = SupervisedActor("buffer", NAME, make_actor, self._reopen, budget, losses=ActorDied)
        self._buffer.ask()
        self._limit_s = limit_s
        self._opened = asyncio.Event()
        self.on_reopen: Callable[[Opening], None] = lambda _: None

    async def open(self, kind: str, note: str, base: dict[str, Any] | None) -> Opening:
        """Open the journal for this driver. Raises ``JournalError``, and ``ActorDied`` after some deaths."""
        for attempt in range(1, ATTEMPTS + 1):
            self._buffer.ask()
            try:
                opening: Opening = await wait_for(self._buffer.actor.open.remote(kind, note, base), NAME, self._limit_s)
                break
            except ActorDied:
                self._buffer.actor = None
                if attempt == ATTEMPTS:
                    raise
        self._buffer.started = True
        self._opened.set()
        return opening

    async def _reopen(self, actor: Any) -> None:
        opening: Opening = await wait_for(actor.open.remote("restart"), NAME, self._limit_s)
        # Before any call is made again: its answer may build on groups that only this opening names (decision 0013).
        self.on_reopen(opening)

    async def _call(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        await self._opened.wait()
        while True:
            try:
                return await self._buffer.call(lambda actor: wait_for(ask(actor), NAME, self._limit_s))
            except ActorDied:
                continue

    async def admit(self, candidates: Sequence[Candidate]) -> Admitted:
        """Admit the first of these prompts, as many as there is room for."""
        return await self._call(lambda buffer: buffer.admit.remote(list(candidates)))

    async def record(
        self,
        rollouts: Sequence[Rollout] = (),
        segments: Sequence[Segment] = (),
        outcomes: Sequence[Outcome] = (),
        requests: Sequence[EngineRequest] = (),
    ) -> Settled:
        """Record finished rollouts, outcomes, new tokens and engine requests; returns the groups that have ended."""
        arguments = list(rollouts), list(segments), list(outcomes), list(requests)
        return await self._call(lambda buffer: buffer.record.remote(*arguments))

    async def take(self, step: int, patience_s: float = PATIENCE_S) -> Taken | Waiting:
        """The batch of a step, or after ``patience_s`` seconds what it waits for."""
        return await self._call(lambda buffer: buffer.take.remote(step, patience_s))

    async def batch(self, step: int) -> TrainingBatch:
        """A batch that was taken, read from the journal."""
        return await self._call(lambda buffer: buffer.batch.remote(step))

    async def requeue(self, group_ids: Sequence[int]) -> list[tuple[int, int, int]]:
        """Abandon overdue groups and start their prompts again; returns (old index, new index, version) for each."""
        return await self._call(lambda buffer: buffer.requeue.remote(list(group_ids)))

    async def trained(self, record: StepRecord) -> None:
        """Record a trained step."""
        await self._call(lambda buffer: buffer.trained.remote(record))

    async def publish(self, record: PublishRecord) -> None:
        """Record that every serving engine has proved a version."""
        await self._call(lambda buffer: buffer.publish.remote(record))

    async def fallback(self, step: int) -> dict[str, Any]:
        """The state that the checkpoint of ``step`` stores, to resume from it without the journal."""
        return await self._call(lambda buffer: buffer.fallback.remote(step))

    async def checkpointed(self, step: int, folder: str, seconds: float, removed: Sequence[int] = ()) -> None:
        """Record that a checkpoint is complete, and that older ones (``removed``) are deleted."""
        await self._call(lambda buffer: buffer.checkpointed.remote(step, folder, seconds, list(removed)))

    async def evaluated(self, result: EvaluationResult) -> None:
        """Record an evaluation."""
        await self._call(lambda buffer: buffer.evaluated.remote(asdict(result)))

    async def failed(self, kind: str, part: str, message: str) -> None:
        """Record a failure, whether or not the run continues."""
        await self._call(lambda buffer: buffer.failed.remote(kind, part, message))

    async def engine_changed(self, engine: str, change: str, reason: str) -> None:
        """Record that an engine began to serve (``join``), or left (``leave``)."""
        await self._call(lambda buffer: buffer.engine_changed.remote(engine, change, reason))

    async def prune(self, checkpoints: int) -> None:
        """Delete the tokens that neither the newest ``checkpoints`` checkpoints nor any checkpoint on disk needs."""
        await self._call(lambda buffer: buffer.prune.remote(checkpoints))

    async def close(self) -> None:
        """Close the journal, in bounded time; the last call. If it fails, nothing that was acknowledged is lost."""
        await asyncio.wait_for(self._call(lambda buffer: buffer.close.remote()), CLOSE_S)
