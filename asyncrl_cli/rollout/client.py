"""The generation client: callers request a rollout and get it, even if engines fail (decision 0005).

Abort and continue: when an engine abandons a request (on command, by failing or by dying), the tokens delivered so far
become the request's prefix, and any engine continues from there with the rest of its budget. A request without new
tokens is sent again unchanged; a request without a budget left ends here (``continuation.finished``).

An engine gets about as many requests as it runs at a time. The others wait here for any engine, the lowest priority
first. Invariant: an open request waits here or is at exactly one engine. Unless it is cancelled, it ends exactly once:
as a rollout, or as a failure after its retries, or after ``MOST_LOSSES`` engines that were lost while they ran it.

Engines may join and leave at any time (decision 0039). The ledger enforces the staleness bound, whatever the engines
do. An engine that is leaving gets no requests: it may have missed a publish, and a group admitted after that publish
must have no older token.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.records.generation import (
    Delivery,
    EngineActivity,
    EngineRequest,
    RequestEnding,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Segment,
)
from asyncrl_cli.rollout.continuation import finished
from asyncrl_cli.rollout.open_requests import (
    MOST_LOSSES,
    EndedRequests,
    EngineHandle,
    EngineState,
    OnEnd,
    OnSegments,
    OpenRequest,
)
from asyncrl_cli.system.remote import ActorDied, wait_for

POLL_S = 5.0
"""Longest wait (s) of one ``collect`` call. An empty answer shows that the engine is alive."""
PAUSE_SHARE = 0.02
LONGEST_PAUSE_S = 0.25
"""After a delivery, the client waits before the next ``collect``, because each call costs the driver about 1 ms. The
wait is at most this share of a request's usual duration, and at most this many seconds."""
AHEAD = 0.25
"""An engine gets this fraction more requests than it runs at a time. They fill slots as these become free."""
MAX_AFFINITIES = 10_000
"""Number of affinities with a remembered engine; the least recently used ones are dropped."""


class EngineLost(Exception):
    """An engine died, hangs, or serves wrong weights."""


class GenerationFailed(Exception):
    """A request failed and has no retries left; the message is the last reason."""


class GenerationClient:
    """Generates complete rollouts for requests, on any number of engines."""

    def __init__(
        self,
        engines: Iterable[EngineHandle],
        *,
        slots: int,
        retries: int,
        hang_s: float,
        decode: Callable[[Any], str],
        on_progress: Callable[[], None] = lambda: None,
        on_engine_request: Callable[[EngineRequest], None] = lambda _: None,
    ) -> None:
        """``slots``: requests that an engine runs at a time.

        ``hang_s``: seconds without a token, or without an answer, after which an engine counts as lost.
        ``decode(ids)`` gives the text of a response. ``on_progress`` is called when tokens were generated,
        and ``on_engine_request`` with every request that has left an engine.
        """
        self.engines: list[EngineState] = [EngineState(process) for process in engines]
        self._slots = slots
        self._limit = slots + max(1, int(slots * AHEAD))
        self._retries = retries
        self._hang_s = hang_s
        self.decode = decode
        self._on_progress = on_progress
        self._on_engine_request = on_engine_request
        self.room = asyncio.Event()
        """Set when there may be room for more requests; the rollout scheduler clears it."""
        self.pause_s = 0.0
        """Seconds that ended requests wait for others, to be delivered and scored together."""
        self._removed = EngineActivity()  # activity of removed engines
        self._open: dict[str, OpenRequest] = {}
        self._waiting: list[OpenRequest] = []  # a heap; entries that are no longer open are skipped
        self._order = count()
        self._engine_of: OrderedDict[str, EngineState] = OrderedDict()
        self._paused = False
        self._dispatch_due = False
        self._tasks: set[asyncio.Task[None]] = set()

    # -- requests

    async def generate(self, request: RolloutRequest, on_segments: OnSegments | None = None) -> Rollout:
        """Generate one rollout. Weight updates, pauses, aborts and engine failures do not end it.

        ``on_segments`` gets new tokens as engines report them; the last tokens come only with the rollout. Cancelling
        the waiting task cancels the request. Raises ``GenerationFailed`` after the retries, and ``ValueError`` when a
        request with this id is open.
        """
        if request.rollout_id in self._open:
            raise ValueError(f"request {request.rollout_id} is already open")
        future: asyncio.Future[Rollout | RolloutFailure] = asyncio.get_running_loop().create_future()

        def on_end(batch: EndedRequests) -> None:
            if not future.done():
                future.set_result(batch[0][1])

        entry = self._add(request, on_end, on_segments)
        try:
            result = await future
        finally:
            if self._open.get(request.rollout_id) is entry:
                self._drop(request.rollout_id)
        if isinstance(result, RolloutFailure):
            raise GenerationFailed(result.reason)
        return result

    def enqueue(self, requests: Iterable[RolloutRequest], on_end: OnEnd, on_segments: OnSegments | None = None) -> None:
        """Queue requests, to be sent in the event loop's next turn. ``on_segments`` gets new tokens of unfinished
        rollouts."""
        for request in requests:
            self._add(request, on_end, on_segments)

    async def cancel(self, rollout_ids: Iterable[str]) -> None:
        """Stop generating these requests and forget them."""
        for rollout_id in rollout_ids:
            self._drop(rollout_id)
        await self.flush()

    async def flush(self) -> None:
        """Send everything that can be sent now, and wait until the engines have accepted it."""
        self._dispatch()
        if senders := [engine.sender for engine in self.engines if engine.sender is not None]:
            await asyncio.wait(senders)

    async def pause(self) -> None:
        """Abort running requests, which keep their tokens, and send nothing until ``resume``.

        Returns when no engine is generating.
        """
        # Before the aborts: a request that an abort returns must wait here, not be sent again (decision 0005).
        self._paused = True
        for engine in self.engines:
            self._return_unsent(engine)
            engine.to_abort |= engine.serving
        await self.flush()

    async def resume(self) -> None:
        """Send waiting requests again."""
        self._paused = False
        self._dispatch_soon()
        self.room.set()

    # -- state

    @property
    def running(self) -> int:
        """Number of requests that have not ended, including waiting ones."""
        return len(self._open)

    @property
    def free(self) -> int:
        """Requests that the serving engines could run in addition to the open ones; 0 while paused."""
        return 0 if self._paused else max(0, self._slots * len(self.serving()) - self.running)

    def serving(self) -> list[EngineState]:
        return [engine for engine in self.engines if engine.serving]

    @property
    def activity(self) -> EngineActivity:
        """Activity summed over all engines of the run, including removed ones."""
        return sum((engine.activity for engine in self.engines), self._removed)

    # -- engines

    def add(self, process: EngineHandle) -> EngineState:
        """Add an engine. It gets requests once it is ``serving``."""
        self.engines.append(EngineState(process))
        return self.engines[-1]

    async def withdraw(self, engine: EngineState, limit_s: float) -> None:
        """Take an engine out of service; its requests continue on other engines with all their tokens.

        ``collect`` must be running for it. If the engine does not return all requests within ``limit_s`` seconds, they
        continue from the tokens that it had reported. It may serve again later.
        """
        # Not serving before the abort is sent: the requests that it returns must go to other engines.
        engine.to_abort, engine.leaving, engine.serving = engine.serving, True, False
        self._return_unsent(engine)
        engine.emptied.clear()
        self._dispatch()
        try:
            async with asyncio.timeout(limit_s):
                if engine.sender is not None:
                    await asyncio.wait([engine.sender])
                while engine.pending:
                    await engine.emptied.wait()
        except TimeoutError:
            # If it serves again later, it must not go on with requests that other engines have by then.
            engine.to_cancel.update(engine.pending)
            self._continue(list(engine.pending.values()), RequestEnding.LOST)
            self._dispatch_soon()
        engine.leaving = False

    def remove(self, engine: EngineState) -> None:
        """Forget an engine; requests that it still has continue on others."""
        self.engines.remove(engine)
        self._removed += engine.activity
        self.reclaim(engine)
        self._engine_of = OrderedDict(
            (key, engine_state) for key, engine_state in self._engine_of.items() if engine_state is not engine
        )

    async def collect(self, engine: EngineState) -> None:
        """Receive an engine's results until it is withdrawn. Raises ``EngineLost``."""
        while engine.serving or engine.pending or engine.dead_because:
            self._dispatch()
            limit_s = POLL_S + self._hang_s
            try:
                delivery: Delivery = await wait_for(engine.process.actor.collect.remote(POLL_S), engine.name, limit_s)
            except Exception as error:
                raise EngineLost(engine.dead_because or getattr(error, "message", str(error))) from error
            engine.activity += delivery.activity
            if delivery.rollouts or delivery.segments or delivery.activity.generated_tokens:
                self._on_progress()
            # Before ``_settle``: aborted and failed requests continue from these tokens.
            self._note_segments(engine, delivery.segments)
            received_at = time.time()
            for placement in delivery.placements:
                if (entry := engine.sent(placement.rollout_id)) is not None:
                    entry.placement = received_at, placement
            self._settle(engine, delivery)
            if delivery.activity.silent_s > self._hang_s:
                raise EngineLost(f"it has generated no token for {delivery.activity.silent_s:.0f} s")
            if delivery.rollouts and engine.serving:
                await asyncio.sleep(self.pause_s)

    def mark_dead(self, name: str, cause: str) -> None:
        """Kill the process of a misbehaving engine; the running ``collect`` then raises ``EngineLost``."""
        for engine in self.engines:
            if engine.name == name and engine.serving:
                # Before the kill: nothing may be sent to a dying process.
                engine.serving, engine.dead_because = False, cause
                engine.process.kill()

    def reclaim(self, engine: EngineState) -> None:
        """Continue a lost engine's requests on any serving engine, from the tokens reported so far.

        A request that it ran may be the cause, and fails with the last of ``MOST_LOSSES`` losses.
        """
        engine.serving = engine.leaving = engine.to_abort = False
        engine.dead_because, engine.sender = "", None
        engine.to_cancel.clear()
        failed: list[tuple[OpenRequest, Rollout | RolloutFailure]] = []
        for rollout_id, entry in islice(engine.pending.items(), self._slots):  # it runs requests in their order
            entry.losses += rollout_id not in engine.outbox
            if entry.losses == MOST_LOSSES:
                reason = f"{MOST_LOSSES} engines in a row were lost while they ran this request; see {engine.name}.log"
                failed.append((entry, RolloutFailure(rollout_id, reason)))
        self._end(failed)
        self._continue(list(engine.pending.values()), RequestEnding.LOST)
        self._dispatch_soon()

    # -- sending

    def _add(self, request: RolloutRequest, on_end: OnEnd, on_segments: OnSegments | None) -> OpenRequest:
        entry = OpenRequest(request, order=next(self._order), on_end=on_end, on_segments=on_segments)
        self._open[request.rollout_id] = entry
        heappush(self._waiting, entry)
        self._dispatch_soon()
        return entry

    def _drop(self, rollout_id: str) -> None:
        entry = self._open.pop(rollout_id, None)
        if entry is not None and (engine := entry.engine) is not None:
            if self._detach(entry, RequestEnding.CANCELLED):
                engine.to_cancel.add(rollout_id)
            self._dispatch_soon()
        self.room.set()

    def _dispatch_soon(self) -> None:
        """Schedule ``_dispatch``: requests of one turn of the event loop are sent together (decision 0006)."""
        if not self._dispatch_due:
            self._dispatch_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_due = False
        without_engine = list[OpenRequest]()
        while self._waiting and not self._paused:
            entry = heappop(self._waiting)
            if self._open.get(entry.request.rollout_id) is not entry:
                continue
            if (engine := self._engine_for(entry)) is None:
                without_engine.append(entry)
                if entry.is_suspect:  # engines without room for a suspect may have room for others
                    continue
                break
            entry.engine, entry.sent_at = engine, time.time()
            engine.pending[entry.request.rollout_id] = entry
            engine.outbox[entry.request.rollout_id] = entry.request
        for entry in without_engine:
            heappush(self._waiting, entry)
        for engine in self.engines:
            if (
                (engine.serving or engine.leaving)
                and engine.sender is None
                and (engine.outbox or engine.to_cancel or engine.to_abort)
            ):
                engine.sender = asyncio.create_task(self._send_all(engine))
                self._tasks.add(engine.sender)
                engine.sender.add_done_callback(self._tasks.discard)

    def _engine_for(self, entry: OpenRequest) -> EngineState | None:
        request = entry.request
        with_room = [engine for engine in self.serving() if len(engine.pending) < self._limit]
        if entry.is_suspect:  # one on an engine at a time: otherwise all of them would fail with the next loss
            with_room = [
                engine for engine in with_room if not any(pending.is_suspect for pending in engine.pending.values())
            ]
        engine_choice = self._engine_of.get(request.affinity)
        if engine_choice not in with_room:
            engine_choice = min(with_room, key=lambda engine: len(engine.pending), default=None)
        if request.affinity and engine_choice is not None:
            self._engine_of[request.affinity] = engine_choice
            self._engine_of.move_to_end(request.affinity)
            if len(self._engine_of) > MAX_AFFINITIES:
                self._engine_of.popitem(last=False)
        return engine_choice

    async def _send_all(self, engine: EngineState) -> None:
        """Send an engine everything pending, one call after another: only then is the calls' order certain."""
        actor = engine.process.actor
        while (engine.serving or engine.leaving) and engine.process.actor is actor:
            # Cancel before submit: a request that another engine returned has the same id as before.
            if engine.to_cancel:
                ids, engine.to_cancel = sorted(engine.to_cancel), set()
                await self._send(engine, actor.cancel.remote(ids))
            # Abort before submit: requests sent after ``resume`` must not be aborted with the old ones (decision 0005).
            elif engine.to_abort:
                engine.to_abort = False
                await self._send(engine, actor.abort.remote())
            elif engine.outbox:
                requests, engine.outbox = list(engine.outbox.values()), {}
                await self._send(engine, actor.submit.remote(requests))
            else:
                break
        # Otherwise the engine was restarted, and ``sender`` may already belong to its new actor.
        if engine.process.actor is actor:
            engine.sender = None

    async def _send(self, engine: EngineState, call: Any) -> None:
        actor = engine.process.actor
        try:
            await wait_for(call, engine.name, self._hang_s)
        except ActorDied:
            return  # ``collect`` raises as well, and ``reclaim`` then takes the requests back
        except UserError as error:
            if engine.process.actor is actor:
                self.mark_dead(engine.name, error.message)

    # -- receiving

    def _note_segments(self, engine: EngineState, segments: list[Segment]) -> None:
        by_listener: dict[OnSegments, list[Segment]] = {}
        for segment in segments:
            if (entry := engine.sent(segment.rollout_id)) is not None:
                entry.tokens.add(segment)
                entry.losses = 0
                if entry.on_segments is not None:
                    by_listener.setdefault(entry.on_segments, []).append(segment)
        for on_segments, listener_segments in by_listener.items():
            on_segments(listener_segments)

    def _settle(self, engine: EngineState, delivery: Delivery) -> None:
        results: list[tuple[OpenRequest, Rollout | RolloutFailure]] = []
        failed: list[OpenRequest] = []
        # Results of requests that are not pending come too late: they were cancelled, or continue elsewhere.
        for rollout in delivery.rollouts:
            if (entry := engine.sent(rollout.rollout_id)) is not None:
                request = entry.request
                results.append((entry, replace(rollout, prompt_ids=request.prompt_ids, images=request.images)))
                pause_s = min(PAUSE_SHARE * (time.time() - entry.sent_at), LONGEST_PAUSE_S)
                self.pause_s += 0.1 * (pause_s - self.pause_s)
        for failure in delivery.failures:
            if (entry := engine.sent(failure.rollout_id)) is None:
                continue
            if entry.attempt < self._retries:
                entry.attempt += 1
                failed.append(entry)
            else:
                results.append((entry, failure))
        self._end(results)
        self._continue(list(filter(None, map(engine.sent, delivery.aborted))), RequestEnding.ABORTED)
        self._continue(failed, RequestEnding.FAILED)

    def _continue(self, interrupted: Iterable[OpenRequest], ending: RequestEnding) -> None:
        """Queue requests that an engine abandoned for any engine, with all their tokens as prefix."""
        results: list[tuple[OpenRequest, Rollout | RolloutFailure]] = []
        for entry in interrupted:
            remaining = entry.request
            if entry.tokens.end > remaining.generated:
                remaining = replace(remaining, prefix=tuple(entry.tokens.segments))
            if remaining.remaining_tokens:
                self._detach(entry, ending)
                entry.request = remaining
                heappush(self._waiting, entry)
            else:  # the engine stopped after the last token and before it reported the end
                results.append((entry, finished(remaining, segments=[], reason="length", decode=self.decode)))
        self._end(results)

    def _return_unsent(self, engine: EngineState) -> None:
        # Otherwise they would be submitted after the abort, and would run.
        self._continue([engine.pending[rollout_id] for rollout_id in engine.outbox], RequestEnding.ABORTED)

    def _detach(self, entry: OpenRequest, ending: RequestEnding, end: int | None = None) -> bool:
        """Take a request from its engine; returns whether it had been sent there. ``end``: its number of tokens, if
        more than were reported."""
        engine, name = entry.engine, entry.request.rollout_id
        if engine is None:
            return False
        entry.engine = None
        del engine.pending[name]
        if not engine.pending:
            engine.emptied.set()
        if engine.outbox.pop(name, None) is not None:
            return False
        record = entry.record_of_stay(engine.name, ending, end)
        entry.placement = None  # before another engine gets it
        self._on_engine_request(record)
        return True

    def _end(self, results: Iterable[tuple[OpenRequest, Rollout | RolloutFailure]]) -> None:
        by_owner: dict[OnEnd, EndedRequests] = {}
        for entry, result in results:
            if isinstance(result, Rollout):
                self._detach(entry, RequestEnding(result.finish_reason), len(result.ids))
            else:
                self._detach(entry, RequestEnding.FAILED)
            del self._open[entry.request.rollout_id]
            by_owner.setdefault(entry.on_end, []).append((entry.request, result))
        for on_end, batch in by_owner.items():
            on_end(batch)
        if by_owner:
            self.room.set()
