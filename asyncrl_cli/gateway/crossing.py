"""What crosses between the gateway's process and the driver: token ids, in bulk.

The gateway asks for generations and tells what sessions recorded; the driver opens and closes sessions and answers.
Each direction is one call at a time (``tell`` and ``collect`` of ``actor.GatewayActor``), which carries everything
there is, so the order in which things happened is kept (docs/decisions/0022-gateway-process.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from asyncrl_cli.gateway.session import Limits
from asyncrl_cli.records.generation import Rollout, RolloutFailure, RolloutRequest, Sampling, Segment
from asyncrl_cli.rollout.client import GenerationFailed, OnSegments

MOST_TOKENS = 200_000
"""Prompt tokens after which ``collect`` leaves further requests to its next call, so that no answer takes the driver
long to read."""


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """A session to open. ``name`` is that of its URL, and may be used again when the session has ended; ``number`` is
    its own, which ``GatewayClient`` gives. The other fields are those of ``session.Session``."""

    name: str
    rollout_id: str
    sampling: Sampling
    limits: Limits
    number: int = -1
    priority: int = 0
    recorded: Mapping[int, tuple[Segment, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """What a session comes to: its rollout (None: nothing was sampled), the text of its last reply, and the first limit
    that a call was refused for."""

    number: int
    rollout: Rollout | None = None
    last_text: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A request of a session (None: a call without one). ``number`` names it: request ids are used again when an
    episode is played again."""

    number: int
    session: int | None
    request: RolloutRequest


@dataclass(slots=True)
class Orders:
    """From the driver: sessions to open or (by number) to end, in this order; new tokens of generations; and the whole
    of those that ended."""

    sessions: list[SessionOpening | int] = field(default_factory=list)
    segments: list[tuple[int, list[Segment]]] = field(default_factory=list)
    results: list[tuple[int, Rollout | RolloutFailure]] = field(default_factory=list)


@dataclass(slots=True)
class News:
    """To the driver: segments to record by session, generations that nobody waits for any more, those that are asked
    for, and sessions that ended. To be handled in this order."""

    segments: list[tuple[int, list[Segment]]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    requests: dict[int, Generation] = field(default_factory=dict)
    ends: list[SessionEnd] = field(default_factory=list)


class Crossing:
    """The gateway's end."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[int, tuple[asyncio.Future[Rollout | RolloutFailure], OnSegments | None]] = {}
        self._news = News()
        self._there = asyncio.Event()

    async def generate(
        self, session: int | None, request: RolloutRequest, on_segments: OnSegments | None = None
    ) -> Rollout:
        """Have the driver generate this, as ``GenerationClient.generate`` does. Raises ``GenerationFailed``."""
        number = next(self._numbers)
        result: asyncio.Future[Rollout | RolloutFailure] = asyncio.get_running_loop().create_future()
        self._open[number] = (result, on_segments)
        self._news.requests[number] = Generation(number, session, request)
        self._there.set()
        try:
            generated = await result
        finally:
            if self._open.pop(number, None) is not None and self._news.requests.pop(number, None) is None:
                self._news.cancelled.append(number)
                self._there.set()
        if isinstance(generated, RolloutFailure):
            raise GenerationFailed(generated.reason)
        return generated

    def record(self, session: int, segments: list[Segment]) -> None:
        """Tell the driver new tokens of a session."""
        self._news.segments.append((session, segments))
        self._there.set()

    def ended(self, end: SessionEnd) -> None:
        """Tell the driver what a session came to, after everything else about it."""
        self._news.ends.append(end)
        self._there.set()

    def answer(self, orders: Orders) -> None:
        """Hand on what the driver generated."""
        for number, segments in orders.segments:
            if number in self._open and (on_segments := self._open[number][1]) is not None:
                on_segments(segments)
        for number, generated in orders.results:
            if (entry := self._open.pop(number, None)) is not None and not entry[0].done():
                entry[0].set_result(generated)

    async def collect(self, timeout_s: float) -> News:
        """Everything since the last call; waits up to ``timeout_s`` for the first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._there.wait()
        news, self._news = self._news, News()
        tokens, now = 0, {}
        while news.requests and tokens < MOST_TOKENS:
            number = next(iter(news.requests))
            now[number] = news.requests.pop(number)
            tokens += len(now[number].request.prompt_ids)
        self._news.requests, news.requests = news.requests, now
        if not self._news.requests:
            self._there.clear()
        return news
