"""The generation client's state of engines and open requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from asyncrl_cli.records.generation import (
    EngineActivity,
    EngineRequest,
    RequestEnding,
    Residence,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Segment,
)
from asyncrl_cli.rollout.engine_handle import EngineHandle

Ended = list[tuple[RolloutRequest, Rollout | RolloutFailure]]
OnEnd = Callable[[Ended], None]
"""Callback with all requests of one owner that ended together."""
OnSegments = Callable[[list[Segment]], None]


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine as the driver sees it. ``activity`` adds up over the run.

    ``pending`` are the requests assigned to it; those in ``outbox`` have not been sent yet. ``to_cancel`` are ids that
    it still has to cancel. ``dead_because`` is why its process was ended. While it is ``leaving`` it returns its
    requests; ``emptied`` is set when the last has left it. ``asked_to_leave``: its process got SIGTERM.
    ``has_completed``: it has completed a request, in this process or in one before.
    """

    process: EngineHandle
    pending: dict[str, OpenRequest] = field(default_factory=dict)
    outbox: dict[str, RolloutRequest] = field(default_factory=dict)
    to_cancel: set[str] = field(default_factory=set)
    to_abort: bool = False
    activity: EngineActivity = field(default_factory=EngineActivity)
    serving: bool = False
    has_completed: bool = False
    leaving: bool = False
    asked_to_leave: bool = False
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    dead_because: str = ""
    sender: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.process.name


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended. ``engine`` has it; None while it waits."""

    request: RolloutRequest
    order: int
    on_end: OnEnd
    on_segments: OnSegments | None
    engine: EngineState | None = None
    sent_at: float = 0.0  # unix time at which its engine got it
    attempt: int = 0
    segments: list[Segment] = field(default_factory=list)  # reported since the request was sent
    residence: tuple[float, Residence] | None = None  # at the engine that has it, behind the unix time of its delivery

    def left(self, engine: str, ending: RequestEnding, end: int | None) -> EngineRequest:
        """The record of a request that has left an engine. ``end``: its number of tokens, if more than were
        reported."""
        before = self.request.generated
        if end is None:
            end = self.segments[-1].end if self.segments else before
        left = EngineRequest(
            *(self.request.rollout_id, engine, self.sent_at, time.time(), ending),
            tokens=end - before,
            context_tokens=len(self.request.prompt_ids) + before,
        )
        if self.residence is None:
            return left
        now, residence = self.residence
        return replace(
            left,
            cached_tokens=residence.cached_tokens,
            running_from=now - residence.since_s,
            running_until=now - residence.until_s,
            first_token_s=residence.first_token_s,
        )

    def __lt__(self, other: OpenRequest) -> bool:
        return (self.request.priority, self.order) < (other.request.priority, other.order)


def added(one: EngineActivity, other: EngineActivity) -> EngineActivity:
    """The sum of two activities."""
    return replace(
        one,
        generated_tokens=one.generated_tokens + other.generated_tokens,
        busy_s=one.busy_s + other.busy_s,
        paused_s=one.paused_s + other.paused_s,
        wall_s=one.wall_s + other.wall_s,
        sequence_s=one.sequence_s + other.sequence_s,
        cpu_s=one.cpu_s + other.cpu_s,
    )
