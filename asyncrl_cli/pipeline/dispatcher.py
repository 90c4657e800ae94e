"""Routes rollout requests to engines and what comes back to whoever asked.

A request goes to one engine and ends exactly once: as a rollout, or as a failure after its retries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl_cli.pipeline.remote import wait_for
from asyncrl_cli.rollout.records import Delivery, EngineActivity, Rollout, RolloutFailure, RolloutRequest

OnEnd = Callable[[list[tuple[RolloutRequest, Rollout | RolloutFailure]]], None]
"""Called with everything of one owner that ended together."""

POLL_S = 5.0
"""Seconds after which ``collect`` answers with nothing, so that a dead engine is noticed."""


@dataclass(slots=True)
class _Pending:
    request: RolloutRequest
    on_end: OnEnd
    attempt: int = 0


@dataclass(slots=True)
class EngineState:
    """One engine as the driver sees it. ``activity`` adds up over the run."""

    name: str
    actor: Any
    pending: dict[str, _Pending] = field(default_factory=dict)
    outbox: list[RolloutRequest] = field(default_factory=list)
    activity: EngineActivity = field(default_factory=EngineActivity)


class Dispatcher:
    """Requests in, ended requests out, over any number of engines."""

    def __init__(self, engines: Iterable[tuple[str, Any]], retries: int, timeout_s: float) -> None:
        """``timeout_s``: seconds after which an engine's actor that does not answer counts as stalled."""
        self._timeout_s = timeout_s
        self.engines = [EngineState(name, actor) for name, actor in engines]
        self._retries = retries

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return sum(len(engine.pending) for engine in self.engines)

    def least_loaded(self) -> EngineState:
        """The engine with the fewest requests."""
        return min(self.engines, key=lambda engine: len(engine.pending))

    def enqueue(self, engine: EngineState, requests: Iterable[RolloutRequest], on_end: OnEnd) -> None:
        """Put requests in an engine's outbox; ``flush`` sends them."""
        for request in requests:
            engine.pending[request.rollout_id] = _Pending(request, on_end)
            engine.outbox.append(request)

    async def flush(self) -> None:
        """Send what lies in the outboxes."""
        for engine in self.engines:
            if engine.outbox:
                requests, engine.outbox = engine.outbox, []
                await wait_for(engine.actor.submit.remote(requests), engine.name, self._timeout_s)

    async def cancel(self, rollout_ids: Iterable[str]) -> None:
        """Forget these requests and stop generating them."""
        wanted = set(rollout_ids)
        for engine in self.engines:
            if found := wanted & engine.pending.keys():
                for rollout_id in found:
                    del engine.pending[rollout_id]
                engine.outbox = [request for request in engine.outbox if request.rollout_id not in found]
                await wait_for(engine.actor.cancel.remote(sorted(found)), engine.name, self._timeout_s)

    async def collect_forever(self, engine: EngineState) -> None:
        """Hand on what ends on one engine, until cancelled."""
        while True:
            delivery: Delivery = await wait_for(
                engine.actor.collect.remote(POLL_S), engine.name, POLL_S + self._timeout_s
            )
            engine.activity = _sum(engine.activity, delivery.activity)
            self._hand_on(engine, delivery)
            await self.flush()

    def _hand_on(self, engine: EngineState, delivery: Delivery) -> None:
        by_owner: dict[OnEnd, list[tuple[RolloutRequest, Rollout | RolloutFailure]]] = {}
        all_ended: list[Rollout | RolloutFailure] = [*delivery.rollouts, *delivery.failures]
        for ended in all_ended:
            pending = engine.pending.get(ended.rollout_id)
            if pending is None:  # cancelled while it was on its way
                continue
            if isinstance(ended, RolloutFailure) and pending.attempt < self._retries:
                pending.attempt += 1
                engine.outbox.append(pending.request)
                continue
            del engine.pending[ended.rollout_id]
            by_owner.setdefault(pending.on_end, []).append((pending.request, ended))
        for on_end, batch in by_owner.items():
            on_end(batch)


def _sum(one: EngineActivity, other: EngineActivity) -> EngineActivity:
    return replace(
        one,
        generated_tokens=one.generated_tokens + other.generated_tokens,
        busy_s=one.busy_s + other.busy_s,
        paused_s=one.paused_s + other.paused_s,
        wall_s=one.wall_s + other.wall_s,
    )
