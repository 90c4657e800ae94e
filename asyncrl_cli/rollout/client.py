"""Routes rollout requests to engines and what comes back to whoever asked.

A request ends exactly once: as a rollout, or as a failure after its retries. When its engine is lost it goes on
elsewhere, or there after the restart, from the tokens that were reported of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from asyncrl_cli.rollout.records import Delivery, EngineActivity, Rollout, RolloutFailure, RolloutRequest, Segment
from asyncrl_cli.runs.remote import ActorDied, NoAnswer, wait_for

OnEnd = Callable[[list[tuple[RolloutRequest, Rollout | RolloutFailure]]], None]
"""Called with everything of one owner that ended together."""

POLL_S = 5.0
"""Seconds after which ``collect`` answers with nothing, so that a dead engine is noticed."""


class EngineLost(Exception):
    """An engine died, hangs, or does not serve what it should."""


class EngineHandle(Protocol):
    """One engine's actor, and the ones that take its place after it."""

    name: str
    actor: Any
    """Has the methods of ``RolloutWorker``, to be called with ``.remote()``."""

    async def replace(self, folder: Path) -> None:
        """Make sure that the process is gone, and start another on a model's skeleton."""

    def kill(self) -> None:
        """End the process, also one that hangs."""


@dataclass(slots=True)
class _Pending:
    request: RolloutRequest
    on_end: OnEnd
    attempt: int = 0
    segments: list[Segment] = field(default_factory=list)  # reported since the request was sent

    def continued(self) -> RolloutRequest:
        """The request for what is still missing."""
        self.request = replace(self.request, prefix=(*self.request.prefix, *self.segments))
        self.segments = []
        return self.request


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine as the driver sees it. ``activity`` adds up over the run.

    Requests of an engine that is not ``serving`` stay in its outbox. ``condemned`` says why it has to go.
    """

    process: EngineHandle
    pending: dict[str, _Pending] = field(default_factory=dict)
    outbox: list[RolloutRequest] = field(default_factory=list)
    activity: EngineActivity = field(default_factory=EngineActivity)
    serving: bool = False
    condemned: str = ""

    @property
    def name(self) -> str:
        return self.process.name


class GenerationClient:
    """Requests in, ended requests out, over any number of engines."""

    def __init__(
        self,
        engines: Iterable[EngineHandle],
        retries: int,
        hang_s: float,
        on_progress: Callable[[], None],
    ) -> None:
        """``hang_s``: seconds without a token, or without an answer, after which an engine counts as lost.

        ``on_progress`` hears that tokens were made. ``on_segments`` gets the new tokens of unfinished rollouts and
        ``on_room`` hears that requests have ended; whoever starts training groups sets the two.
        """
        self.engines = [EngineState(process) for process in engines]
        self._retries = retries
        self._hang_s = hang_s
        self.on_room: Callable[[], None] = lambda: None
        self.on_segments: Callable[[list[Segment]], None] = lambda _: None
        self._on_progress = on_progress

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return sum(len(engine.pending) for engine in self.engines)

    def serving(self) -> list[EngineState]:
        """The engines that serve."""
        return [engine for engine in self.engines if engine.serving]

    def least_loaded(self) -> EngineState:
        """The engine with the fewest requests; one that serves, if any does."""
        return min(self.serving() or self.engines, key=lambda engine: len(engine.pending))

    def enqueue(self, engine: EngineState, requests: Iterable[RolloutRequest], on_end: OnEnd) -> None:
        """Put requests in an engine's outbox; ``flush`` sends them."""
        for request in requests:
            engine.pending[request.rollout_id] = _Pending(request, on_end)
            engine.outbox.append(request)

    async def flush(self) -> None:
        """Send what lies in the outboxes of serving engines."""
        for engine in self.engines:
            if engine.serving and engine.outbox:  # as of now: sending takes its time
                requests, engine.outbox = engine.outbox, []
                await self._tell(engine, "submit", requests)

    async def cancel(self, rollout_ids: Iterable[str]) -> None:
        """Forget these requests and stop generating them."""
        wanted = set(rollout_ids)
        for engine in self.engines:
            if found := wanted & engine.pending.keys():
                for rollout_id in found:
                    del engine.pending[rollout_id]
                engine.outbox = [request for request in engine.outbox if request.rollout_id not in found]
                if engine.serving:
                    await self._tell(engine, "cancel", sorted(found))

    async def collect(self, engine: EngineState) -> None:
        """Hand on what ends on a serving engine, until it is lost: raises ``EngineLost``."""
        while True:
            limit_s = POLL_S + self._hang_s
            try:
                delivery: Delivery = await wait_for(engine.process.actor.collect.remote(POLL_S), engine.name, limit_s)
            except Exception as error:
                raise EngineLost(engine.condemned or getattr(error, "message", str(error))) from error
            engine.activity = _sum(engine.activity, delivery.activity)
            if delivery.rollouts or delivery.segments or delivery.activity.generated_tokens:
                self._on_progress()
            self._note_segments(engine, delivery.segments)
            self._hand_on(engine, delivery)
            if delivery.activity.silent_s > self._hang_s:
                raise EngineLost(f"it has made no token for {delivery.activity.silent_s:.0f} s")
            await self.flush()

    def condemn(self, name: str, cause: str) -> None:
        """An engine does not do what it should: end its process, so that it is found lost."""
        for engine in self.engines:
            if engine.name == name and engine.serving:
                engine.serving, engine.condemned = False, cause
                engine.process.kill()

    def take_back(self, engine: EngineState) -> None:
        """An engine is lost: its requests go on elsewhere from the tokens reported, or wait in its outbox."""
        engine.serving, engine.condemned = False, ""
        pending, engine.pending, engine.outbox = engine.pending, {}, []
        for rollout_id, entry in pending.items():
            target = self.least_loaded()
            target.pending[rollout_id] = entry
            target.outbox.append(entry.continued())

    async def _tell(self, engine: EngineState, method: str, argument: object) -> None:
        try:
            await wait_for(getattr(engine.process.actor, method).remote(argument), engine.name, self._hang_s)
        except ActorDied:
            return  # whoever collects from it sees to its requests
        except NoAnswer as error:
            self.condemn(engine.name, error.message)

    def _note_segments(self, engine: EngineState, segments: list[Segment]) -> None:
        known = [segment for segment in segments if segment.rollout_id in engine.pending]
        for segment in known:
            engine.pending[segment.rollout_id].segments.append(segment)
        if known:
            self.on_segments(known)

    def _hand_on(self, engine: EngineState, delivery: Delivery) -> None:
        by_owner: dict[OnEnd, list[tuple[RolloutRequest, Rollout | RolloutFailure]]] = {}
        all_ended: list[Rollout | RolloutFailure] = [*delivery.rollouts, *delivery.failures]
        for ended in all_ended:
            pending = engine.pending.get(ended.rollout_id)
            if pending is None:  # cancelled while it was on its way
                continue
            if isinstance(ended, RolloutFailure) and pending.attempt < self._retries:
                pending.attempt += 1
                engine.outbox.append(pending.continued())
                continue
            del engine.pending[ended.rollout_id]
            by_owner.setdefault(pending.on_end, []).append((pending.request, ended))
        for on_end, batch in by_owner.items():
            on_end(batch)
        if by_owner:
            self.on_room()


def _sum(one: EngineActivity, other: EngineActivity) -> EngineActivity:
    return replace(
        one,
        generated_tokens=one.generated_tokens + other.generated_tokens,
        busy_s=one.busy_s + other.busy_s,
        paused_s=one.paused_s + other.paused_s,
        wall_s=one.wall_s + other.wall_s,
    )
