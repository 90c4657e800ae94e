"""The Ray actor round one engine.

The conductor submits requests in bulk and collects what has ended in bulk: one call each per scheduling
round instead of one per rollout, so that the cost of remote calls does not grow with short rollouts.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from asyncrl_cli.rollout.records import Attestation, Delivery, EngineActivity, Rollout, RolloutFailure, RolloutRequest
from asyncrl_cli.runs.logs import redirect_output
from asyncrl_cli.spec.sections import ExperimentSpec

COALESCE_S = 0.05
"""Seconds that ``collect`` waits after the first finished rollout for others to join its delivery."""


class RolloutWorker:
    """Hosts an engine; every method is a Ray call. One event loop runs them all."""

    def __init__(self, name: str, spec: ExperimentSpec, log_dir: str) -> None:
        redirect_output(log_dir, name)
        self._spec = spec
        self._ended: list[Rollout | RolloutFailure] = []
        self._some_ended = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._clock = _BusyClock()

    async def preload(self) -> int:
        """Import vLLM ahead of ``start``; returns the process id."""
        import vllm.v1.engine.async_llm  # noqa: F401

        return os.getpid()

    async def start(self, model_dir: str) -> str:
        """Start the engine on a model directory's config and tokenizer; returns the Ray node's id."""
        import ray

        from asyncrl_cli.rollout.engine import Engine

        self._engine = Engine(self._spec, model_dir)
        return str(ray.get_runtime_context().get_node_id())

    async def submit(self, requests: list[RolloutRequest]) -> None:
        """Begin to generate."""
        for request in requests:
            self._running[request.rollout_id] = asyncio.create_task(self._run(request))
        self._clock.set_busy(bool(self._running))

    async def cancel(self, rollout_ids: list[str]) -> None:
        """Stop generating these; they are not delivered."""
        for rollout_id in rollout_ids:
            if task := self._running.pop(rollout_id, None):
                task.cancel()
        self._clock.set_busy(bool(self._running))

    async def collect(self, timeout_s: float) -> Delivery:
        """Everything that ended since the last call; waits up to ``timeout_s`` for the first."""
        try:
            await asyncio.wait_for(self._some_ended.wait(), timeout_s)
            if self._running:
                await asyncio.sleep(COALESCE_S)
        except TimeoutError:
            pass
        ended, self._ended = self._ended, []
        self._some_ended.clear()
        rollouts = [entry for entry in ended if isinstance(entry, Rollout)]
        return Delivery(
            rollouts=rollouts,
            failures=[entry for entry in ended if isinstance(entry, RolloutFailure)],
            activity=self._clock.read(sum(len(rollout.response_ids) for rollout in rollouts)),
        )

    async def update_weights(
        self, version: int, checksum: str, source: dict[str, Any], policy: str, probe_ids: tuple[int, ...]
    ) -> Attestation:
        """Load the mapped weights as ``version`` and prove it."""
        stall_s = await self._engine.update_weights(version, checksum, source, policy)
        self._clock.add_pause(stall_s)
        return await self._engine.attest(probe_ids, stall_s)

    async def stop(self) -> None:
        """Stop the engine and its processes."""
        if hasattr(self, "_engine"):
            self._engine.shutdown()

    async def _run(self, request: RolloutRequest) -> None:
        try:
            ended: Rollout | RolloutFailure = await self._engine.generate(request)
        except Exception as error:
            ended = RolloutFailure(request.rollout_id, f"{type(error).__name__}: {error}")
        self._running.pop(request.rollout_id, None)
        self._clock.set_busy(bool(self._running))
        self._ended.append(ended)
        self._some_ended.set()


class _BusyClock:
    """Adds up how long the engine had work, and how long updates held it."""

    def __init__(self) -> None:
        self._mark = self._since = self._busy_from = time.monotonic()
        self._busy = False
        self._busy_s = self._paused_s = 0.0

    def set_busy(self, busy: bool) -> None:
        now = time.monotonic()
        if self._busy:
            self._busy_s += now - self._since
        elif busy:
            self._busy_from = now
        self._since, self._busy = now, busy

    def add_pause(self, seconds: float) -> None:
        if self._busy:  # an idle engine is not held up
            self._paused_s += min(seconds, time.monotonic() - self._busy_from)

    def read(self, tokens: int) -> EngineActivity:
        self.set_busy(self._busy)
        now = time.monotonic()
        activity = EngineActivity(tokens, self._busy_s, self._paused_s, now - self._mark)
        self._mark, self._busy_s, self._paused_s = now, 0.0, 0.0
        return activity
