"""The generation client's state of engines and open requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl_cli.records.generation import (
    EngineActivity,
    EngineRequest,
    Placement,
    RequestEnding,
    Rollout,
    RolloutFailure,
    RolloutRequest,
    Segment,
)
from asyncrl_cli.records.token_prefix import TokenPrefix

EndedRequests = list[tuple[RolloutRequest, Rollout | RolloutFailure]]
OnEnd = Callable[[EndedRequests], None]
"""Callback with all requests of one owner that ended together."""
OnSegments = Callable[[list[Segment]], None]

MOST_LOSSES = 3
"""A request fails when so many engines were lost while they ran it, without a new token in between: it may be the
cause."""


class EngineHandle(Protocol):
    """One engine, across the restarts of its actor."""

    name: str
    node: str  # the Ray node's id, once it has started
    actor: Any  # has the methods of ``RolloutWorker``, to be called with ``.remote()``

    async def lose(self, actor: Any, cause: str) -> None:
        """End the process of an actor that no longer works. Raises ``RunError`` after too many failures."""

    async def running(self) -> Any:
        """Return the current actor, and start it if necessary. Raises ``RunError``."""

    def kill(self) -> None:
        """Kill the process, even one that hangs."""

    async def end(self) -> None:
        """End the engine permanently, in bounded time, and release its resources."""


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine as the driver sees it."""

    process: EngineHandle
    pending: dict[str, OpenRequest] = field(default_factory=dict)  # requests assigned to it
    outbox: dict[str, RolloutRequest] = field(default_factory=dict)  # assigned requests that have not been sent
    to_cancel: set[str] = field(default_factory=set)  # ids of requests that it must still cancel
    to_abort: bool = False
    activity: EngineActivity = field(default_factory=EngineActivity)  # the sum over the run
    serving: bool = False
    leaving: bool = False  # is returning its requests
    emptied: asyncio.Event = field(default_factory=asyncio.Event)  # set when the last request has left
    dead_because: str = ""  # why its process was killed
    sender: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.process.name

    def sent(self, rollout_id: str) -> OpenRequest | None:
        """The request that the engine has by this id. A result for one in the outbox is of an earlier request."""
        return None if rollout_id in self.outbox else self.pending.get(rollout_id)


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
    losses: int = 0  # engines that were lost while they ran it, since its last new token
    placement: tuple[float, Placement] | None = None  # unix time of its delivery, and the placement
    tokens: TokenPrefix = field(init=False)  # the request's prefix, and the tokens reported since it was sent

    def __post_init__(self) -> None:
        self.tokens = TokenPrefix(self.request.prefix)

    @property
    def is_suspect(self) -> bool:
        """True if the request fails with the next engine that is lost before its next token."""
        return self.losses >= MOST_LOSSES - 1

    def record_of_stay(self, engine: str, ending: RequestEnding, end: int | None) -> EngineRequest:
        """The record of a request that has left an engine. ``end``: its number of tokens, if more than were
        reported."""
        prefix_tokens = self.request.generated
        record = EngineRequest(
            request_id=self.request.rollout_id,
            engine=engine,
            begun_at=self.sent_at,
            ended_at=time.time(),
            ending=ending,
            tokens=(self.tokens.end if end is None else end) - prefix_tokens,
            context_tokens=len(self.request.prompt_ids) + prefix_tokens,
        )
        if self.placement is None:
            return record
        delivered_at, placement = self.placement
        return replace(
            record,
            cached_tokens=placement.cached_tokens,
            running_from=delivered_at - placement.since_s,
            running_until=delivered_at - placement.until_s,
        )

    def __lt__(self, other_request: OpenRequest) -> bool:
        return (self.request.priority, self.order) < (other_request.request.priority, other_request.order)
