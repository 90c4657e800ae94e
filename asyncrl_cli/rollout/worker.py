"""The Ray actor around one engine (``Engine``).

``submit``, ``cancel``, ``abort``   what the engine generates
``collect``                     everything new: ended rollouts, tokens, activity
``update_weights``              load a version from the host's memory, and prove it
``sleep``, ``wake_up``          give the GPU to a trainer rank, and take it back

Requests are submitted and results collected in bulk: the cost of remote calls does not grow with the number of
rollouts (decision 0006).

Deliveries also carry tokens of unfinished rollouts, which then survive this process: at every weight update, every
``journal.segment_seconds``, when a rollout failed or was aborted, and every ``STREAM_S`` for streamed rollouts.

Invariant: for each rollout in ``_tokens``, the segments delivered so far and those that wait here hold each token from
the end of its request's prefix to the end of ``_tokens[rollout_id]`` exactly once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from asyncrl_cli.core.files import require_folder
from asyncrl_cli.core.imports import large_imports, set_environment
from asyncrl_cli.records.generation import EVALUATION, Attestation, Delivery, RolloutFailure, RolloutRequest, Segment
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.token_prefix import TokenPrefix
from asyncrl_cli.rollout.activity import ActivityClock
from asyncrl_cli.rollout.continuation import Aborted
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import shares_gpus
from asyncrl_cli.system.logs import redirect_output
from asyncrl_cli.weights.layout import TensorSlot

COALESCE_S = 0.05
"""Seconds that ``collect`` waits after a finished rollout for others to join its delivery. ``awaited`` rollouts are
delivered immediately."""
STREAM_S = 0.05
"""Longest time (s) between two deliveries of a streamed rollout's new tokens."""


class RolloutWorker:
    """Hosts an engine; every method is a Ray call. One event loop runs them all."""

    def __init__(
        self, name: str, spec: ExperimentSpec, log_dir: str, environment: Mapping[str, str] | None = None
    ) -> None:
        set_environment(environment or {})
        redirect_output(log_dir, name)
        self._spec = spec
        self._log = Path(log_dir) / f"{name}.log"
        self._next_delivery = Delivery()  # collects ended rollouts
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tokens: dict[str, TokenPrefix] = {}  # tokens to deliver
        self._tokens_read_at = time.monotonic()
        self._streamed: set[str] = set()
        self._streamed_at = time.monotonic()
        self._deliverable = asyncio.Event()
        self._urgent = asyncio.Event()
        self._clock = ActivityClock()

    async def preload(self) -> int:
        """Import vLLM ahead of ``start``; returns the process id."""
        from asyncrl_cli.rollout.vllm_core import fork_core, use_as_main

        with large_imports():
            import vllm.v1.engine.async_llm  # noqa: F401

        if self._spec.rollout.gpus_per_engine:
            use_as_main()  # CUDA does not work in a forked process
        else:
            fork_core()

        return os.getpid()

    async def start(
        self, model_dir: str, version: int | None = None, cache_bytes: int | None = None
    ) -> tuple[str, int | None]:
        """Start the engine on the config and tokenizer in ``model_dir``; with ``version``, serve its weights, too.

        Returns the Ray node's id, and the ``cache_bytes`` for the next start if the engine shares its GPU.
        """
        import ray

        from asyncrl_cli.rollout.engine import Engine
        from asyncrl_cli.rollout.engine_settings import CACHE_ARGUMENT, with_cache

        if os.path.isabs(model_dir):
            require_folder(model_dir, "model.path" if model_dir == self._spec.model.path else "runs_dir")

        spec = self._spec if cache_bytes is None else with_cache(self._spec, cache_bytes)
        self._engine = Engine(spec, model_dir, own_weights=version is not None, log=self._log)
        if shares_gpus(spec) and CACHE_ARGUMENT not in spec.rollout.engine_args:
            cache_bytes = await self._engine.measured_cache()
        if version is not None:
            await self._engine.serve_own(version)
            await self._engine.attest((0, 0), 0.0)  # a model that the engine cannot run fails here
        return str(ray.get_runtime_context().get_node_id()), cache_bytes

    async def submit(self, requests: list[RolloutRequest]) -> None:
        """Start generating these rollouts."""
        for request in requests:
            if request.streamed:
                if not self._streamed:  # ``collect`` is waiting without a deadline for streamed tokens
                    self._streamed_at = time.monotonic()
                    self._deliverable.set()
                self._streamed.add(request.rollout_id)
            if request.streamed or not request.rollout_id.startswith(EVALUATION):
                self._tokens[request.rollout_id] = TokenPrefix(start=request.generated)
            self._running[request.rollout_id] = asyncio.create_task(self._run(request))
        self._clock.set_busy(bool(self._running))

    async def cancel(self, rollout_ids: list[str]) -> None:
        """Stop generating these rollouts; they are not delivered. Another request may have the same id."""
        for rollout_id in rollout_ids:
            if task := self._running.pop(rollout_id, None):
                task.cancel()
            self._forget(rollout_id)
        undelivered = self._next_delivery
        self._next_delivery = Delivery(
            rollouts=[rollout for rollout in undelivered.rollouts if rollout.rollout_id not in rollout_ids],
            failures=[failure for failure in undelivered.failures if failure.rollout_id not in rollout_ids],
            aborted=[rollout_id for rollout_id in undelivered.aborted if rollout_id not in rollout_ids],
        )
        self._clock.set_busy(bool(self._running))

    async def abort(self) -> None:
        """Abort all running and waiting rollouts. They are delivered as aborted, with all their tokens."""
        aborted = list(self._running.values())
        # Otherwise a task that has not started yet would count as submitted after the abort, and would run.
        await asyncio.sleep(0)
        await self._engine.abort()
        if aborted:
            await asyncio.wait(aborted)

    async def collect(self, timeout_s: float) -> Delivery:
        """Return everything that ended since the last call, and new segments; wait up to ``timeout_s`` for them.

        When vLLM dies, its rollouts are not reported as failed, because they continue elsewhere. One more delivery has
        their tokens; after it ``collect`` raises ``ActorDied`` with the cause.
        """
        await self._wait_for_delivery(timeout_s)
        delivery, self._next_delivery = self._next_delivery, Delivery()
        dead = self._engine.dead
        time_s = time.monotonic()
        if dead or delivery.failures or time_s >= self._segments_due:
            self._read_tokens(self._tokens)
            self._tokens_read_at = self._streamed_at = time_s
        elif time_s >= self._stream_due:
            self._read_tokens(self._streamed)
            self._streamed_at = time_s
        segments = [segment for tokens in self._tokens.values() for segment in tokens.take()]
        # Aborted and failed rollouts were tracked until here, for their last tokens.
        self._tokens = {name: tokens for name, tokens in self._tokens.items() if name in self._running}
        self._streamed &= self._running.keys()
        if not dead:
            self._deliverable.clear()
            self._urgent.clear()
        elif not (delivery.rollouts or segments):
            raise await self._engine.death()
        activity = replace(
            self._clock.take_activity(self._engine.sampled_tokens(), self._engine.generating),
            sequence_s=self._engine.sequence_s(),
        )
        return replace(
            delivery,
            failures=[] if dead else delivery.failures,
            segments=segments,
            activity=activity,
            placements=self._engine.placements(),
        )

    async def update_weights(
        self,
        version: int,
        path: str,
        slots: tuple[TensorSlot, ...],
        policy: str,
        probe_ids: tuple[int, ...],
        probe_images: tuple[PlacedImage, ...] = (),
    ) -> Attestation:
        """Load ``version`` from the host's replica, and prove it.

        Raises ``ReplicaGone`` when the replica's memory is gone, and ``ActorDied`` when vLLM dies during the update.
        """
        stall_s = 0.0
        try:
            try:
                stall_s = await self._engine.update_weights(version, path, slots, policy, self._on_pause)
            finally:
                self._clock.end_update(stall_s)
            resumed = time.monotonic()
            attestation = await self._engine.attest(probe_ids, stall_s, probe_images)
            return replace(attestation, resumed_s=time.monotonic() - resumed)
        except Exception as error:
            if self._engine.dead:
                raise await self._engine.death() from error
            raise

    async def sleep(self) -> None:
        """Release the GPU's memory until ``wake_up``; running rollouts keep their tokens and wait."""
        self._clock.begin_update()  # a sleeping engine is not silent
        await self._engine.sleep()

    async def wake_up(self) -> None:
        await self._engine.wake_up()
        self._clock.end_update()

    async def stop(self) -> None:
        """Stop the engine and its processes."""
        if hasattr(self, "_engine"):
            self._engine.shutdown()

    @property
    def _segments_due(self) -> float:
        return self._tokens_read_at + self._spec.journal.segment_seconds

    @property
    def _stream_due(self) -> float:
        return self._streamed_at + STREAM_S if self._streamed else float("inf")

    async def _wait_for_delivery(self, timeout_s: float) -> None:
        """Wait until a rollout ended and others had time to join it, until tokens are due, or until time is up."""
        latest = min(time.monotonic() + timeout_s, self._segments_due, self._stream_due)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(latest - time.monotonic(), 0.0)):
                await self._deliverable.wait()
            if self._running:
                joined_by = min(time.monotonic() + COALESCE_S, max(self._stream_due, time.monotonic()))
                async with asyncio.timeout(joined_by - time.monotonic()):
                    await self._urgent.wait()

    async def _run(self, request: RolloutRequest) -> None:
        rollout_id = request.rollout_id
        try:
            rollout = await self._engine.generate(request)
        except Aborted as aborted:
            self._add(aborted.segments)
            self._clock.add_ended(sum(len(segment.ids) for segment in aborted.segments))
            self._next_delivery.aborted.append(rollout_id)
        except Exception as error:
            self._next_delivery.failures.append(RolloutFailure(rollout_id, f"{type(error).__name__}: {error}"))
        else:
            # Without the prompt, which the caller knows: a long prompt costs more to send than a response.
            self._next_delivery.rollouts.append(replace(rollout, prompt_ids=()))
            self._clock.add_ended(len(rollout.ids) - request.generated)
            self._forget(rollout_id)
        self._running.pop(rollout_id, None)
        self._clock.set_busy(bool(self._running))
        self._deliverable.set()
        if request.awaited or request.streamed:
            self._urgent.set()

    def _on_pause(self) -> None:
        self._clock.begin_update()
        self._read_tokens(self._tokens)
        self._tokens_read_at = time.monotonic()
        if any(tokens.segments for tokens in self._tokens.values()):
            self._deliverable.set()

    def _read_tokens(self, rollout_ids: Iterable[str]) -> None:
        """Add the engine's new tokens of these rollouts to the next delivery."""
        self._add(self._engine.segments({rollout_id: self._tokens[rollout_id].end for rollout_id in rollout_ids}))

    def _add(self, segments: Iterable[Segment]) -> None:
        for segment in segments:  # evaluations are not tracked before they are aborted
            self._tokens.setdefault(segment.rollout_id, TokenPrefix(start=segment.start)).add(segment)

    def _forget(self, rollout_id: str) -> None:
        self._tokens.pop(rollout_id, None)
        self._streamed.discard(rollout_id)
