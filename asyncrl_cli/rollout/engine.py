"""One vLLM engine: token ids in, token ids with log-probs and weight versions out.

Weights are updated through vLLM's own reinforcement-learning interface: pause, update, resume. A request that runs
during an update stays one request for the caller, and so does one that continues where another engine stopped.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.records.experts import Experts, join_experts
from asyncrl_cli.records.generation import (
    EVALUATION,
    Attestation,
    FinishReason,
    Placement,
    Rollout,
    RolloutRequest,
    Segment,
    TokenSequence,
)
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.rollout.activity import Occupancy
from asyncrl_cli.rollout.continuation import Aborted, finished, split_by_version
from asyncrl_cli.rollout.engine_death import LogSince, death
from asyncrl_cli.rollout.engine_settings import start_vllm
from asyncrl_cli.rollout.response_text import decoder, end_tokens
from asyncrl_cli.rollout.vllm_core import HOLD_S, LONGEST_HOLD_S
from asyncrl_cli.rollout.vllm_images import VllmImages
from asyncrl_cli.rollout.vllm_inflight import (
    newest_experts,
    request_id,
    requests_without_tokens,
    running_segments,
    running_tokens,
    sampled_logprobs,
)
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import ActorDied
from asyncrl_cli.weights.layout import TensorSlot
from asyncrl_cli.weights.manifest import ReplicaGone

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput

ABORT_POLL_S = 0.02
"""Seconds that an abort waits for requests to return. It is then repeated, for requests that reached vLLM since."""

PROBE_PRIORITY = -1
"""vLLM runs it before rollouts, which have priority 0."""
PREPARED_CHECK_S = 1.0
"""Seconds without a worker's signal after which the engine asks whether the update is prepared: a process that died
sends no signal. Each question waits for the core, between two of its steps."""


class Engine:
    """One vLLM engine. It has no weight version before the first ``update_weights`` or ``serve_own``."""

    def __init__(
        self, spec: ExperimentSpec, model_dir: str, own_weights: bool = False, log: Path | None = None
    ) -> None:
        """Start vLLM, which takes seconds. Raises the errors of ``start_vllm``. ``log``: this process's output.

        ``own_weights``: serve the weights in ``model_dir``. Otherwise the first publish brings the weights; with
        adapters it brings the adapter, for the weights in ``model_dir``.
        """
        from transformers import AutoTokenizer

        self._lora = spec.model.published_adapter
        self._adapter: LoRARequest | None = None
        if self._lora is not None:
            from asyncrl_cli.weights.adapter import adapter_request

            self._adapter = adapter_request()
        self._log = LogSince(log)
        self._vllm = start_vllm(
            spec, model_dir=model_dir, load_format="auto" if own_weights or self._lora else "dummy", log=self._log
        )
        self._children = multiprocessing.active_children()
        self._images = VllmImages(self._vllm)
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._shows_special = spec.task.special_tokens == "shown"
        self._decode = decoder(tokenizer, end_tokens(model_dir, tokenizer), self._shows_special)
        self._draws_by_position = False  # set before the first request
        self._records_experts = spec.algorithm.router_replay
        # Tokens that wait in vLLM's core cannot be recorded, so they wait no longer than a segment may take.
        self._hold_s = min(LONGEST_HOLD_S, spec.journal.segment_seconds)
        self._version = -1
        self._layout: tuple[TensorSlot, ...] | None = None
        self._probes = 0
        # vLLM never queues requests: it gets only as many as it runs at a time, and none while it loads weights. Those
        # without a token at a pause are submitted again. So the cache salt, chosen when a request is submitted, names
        # the version of its first token (decision 0005).
        self._slots = asyncio.Semaphore(spec.rollout.running_rollouts)
        self._loading = True
        self._aborts = 0
        self._changed = asyncio.Condition()  # notified when _loading, _aborts or _version has changed
        self._scheduler = asyncio.Lock()  # held to pause vLLM, or to keep others from pausing it
        self._asleep = False  # while it is true, ``_scheduler`` is held
        self._occupancy = Occupancy()  # requests in vLLM
        self._returned: list[Placement] = []  # since the last ``placements``, in seconds of the monotonic clock
        self._all_returned = asyncio.Event()
        self._ended_tokens = 0

    async def generate(self, request: RolloutRequest) -> Rollout:
        """Generate one rollout, or the rest of one, across any number of weight updates.

        Raises ``Aborted`` when ``abort`` ended it first, ``ValueError`` when the request's prefix does not begin at
        token 0 or has gaps, and ``RuntimeError`` when vLLM counts an image's tokens differently.
        """
        prefix_ids = tuple(TokenSequence.join(request.prefix).ids.tolist())
        if not request.remaining_tokens:
            return finished(request, segments=[], reason="length", decode=self._decode)
        aborts = self._aborts
        processed = await self._images.processed(request.images)
        # During a publish, the engine that sampled the prefix or the earlier turns may be one version ahead. Wait for
        # that version: within a rollout, versions must never fall (decision 0010). Wait before taking a slot, which a
        # request for this engine's version can use.
        min_version = max(request.min_version, request.prefix[-1].version if request.prefix else 0)
        async with self._changed:
            await self._changed.wait_for(lambda: self._aborts > aborts or self._version >= min_version)
        async with self._slots:
            while True:
                output = await self._final_output(request, prefix_ids, processed, aborts)
                if output.finish_reason != "abort" or output.token_ids or self._aborts > aborts:
                    break  # otherwise ``_load`` ended it before its first token
        self._ended_tokens += len(output.token_ids)
        earlier_experts, experts = _experts(request, output)
        if self._records_experts and output.token_ids and output.routed_experts is None:
            raise RuntimeError("vLLM returned no experts for the tokens (algorithm.router_replay)")
        segments = _segments(request, output, experts)
        if output.finish_reason == "abort":
            raise Aborted(segments)
        reason: FinishReason = output.finish_reason
        if reason not in ("stop", "length"):
            raise RuntimeError(f"the engine ended the request with {reason!r}")
        return finished(request, segments=segments, reason=reason, decode=self._decode, earlier_experts=earlier_experts)

    async def abort(self) -> None:
        """Make every running or waiting request raise ``Aborted``. On return, none of them is being generated."""
        async with self._scheduler:
            # First: requests that wait for a slot or a version find this before they reach vLLM (``_final_output``).
            self._aborts += 1
            await self._wake()
            try:
                while self._occupancy.requests:  # repeated: a request may have been on its way (decision 0005)
                    await self._vllm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_POLL_S):
                            await self._all_returned.wait()
            finally:
                await self._vllm.engine_core.resume_scheduler_async()

    def segments(self, since: Mapping[str, int]) -> list[Segment]:
        """Return new tokens of running rollouts: from index ``since[rollout_id]`` on. Other rollouts are skipped.

        The final rollout has the same tokens, bit for bit.
        """
        return running_segments(self._vllm, since)

    @property
    def generating(self) -> bool:
        """True if vLLM has requests. Others wait for a slot or for a weight version."""
        return self._occupancy.requests > 0

    def sampled_tokens(self) -> int:
        """Number of tokens generated so far for rollouts that were not cancelled."""
        return self._ended_tokens + running_tokens(self._vllm)

    def sequence_s(self) -> float:
        """The integral over time of the number of requests in vLLM, since the last call."""
        return self._occupancy.take()

    def placements(self) -> list[Placement]:
        """The requests that vLLM has returned since the last call."""
        delivery_time = time.monotonic()
        returned, self._returned = self._returned, []
        return [
            replace(placement, since_s=delivery_time - placement.since_s, until_s=delivery_time - placement.until_s)
            for placement in returned
        ]

    @property
    def dead(self) -> bool:
        """True if vLLM's core process has ended. ``segments`` still returns the tokens that arrived before."""
        return bool(self._vllm.errored)

    async def death(self) -> ActorDied:
        """Return why vLLM's core process has ended. Only for an engine that is ``dead``."""
        return await asyncio.to_thread(death, self._children, self._log)

    async def serve_own(self, version: int) -> None:
        """Serve the weights in the engine's model folder, as ``version``."""
        await self._set_up_sampling()
        await self._vllm.update_weight_version(str(version))
        self._version, self._loading = version, False
        await self._wake()

    async def update_weights(
        self,
        version: int,
        path: str,
        slots: tuple[TensorSlot, ...],
        policy: str,
        on_pause: Callable[[], None] = lambda: None,
    ) -> float:
        """Load ``version`` from the host's replica; returns for how many seconds no token was generated.

        The replica at ``path`` is complete and laid out as ``slots``. ``policy``: the spec's ``weight_update``.
        ``on_pause`` is called just before the weights load, when ``segments`` has all tokens of the old version.
        """
        await self._set_up_sampling()
        await self._prepare(version, path, slots)
        async with self._scheduler:
            return await self._load(version, path=path, policy=policy, on_pause=on_pause)

    async def measured_cache(self) -> int:
        """Bytes of the key-value cache that vLLM chose for its GPU."""
        return int((await self._vllm.collective_rpc("measured_cache"))[0])

    async def _set_up_sampling(self) -> None:
        if not self._draws_by_position:
            self._draws_by_position = all(await self._vllm.collective_rpc("sample_by_position"))
            if not self._draws_by_position:  # a continued rollout would get other tokens (decision 0064)
                raise ConfigError(
                    "vLLM's sampler for this machine cannot draw tokens by seed and position",
                    location="rollout.engines",
                    hint="use engines on x86 or ARM CPUs, or on GPUs with Triton",
                )

    async def _prepare(self, version: int, path: str, slots: tuple[TensorSlot, ...]) -> None:
        # Called before the pause: everything here happens while vLLM generates.
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if slots != self._layout:
            setup: dict[str, Any] = {"slots": list(map(asdict, slots))}
            if self._lora is not None:
                setup |= {"rank": self._lora.rank, "alpha": self._lora.alpha}
            await self._vllm.init_weight_transfer_engine(WeightTransferInitRequest(setup))
            if self._lora is not None:
                unserved = (await self._vllm.collective_rpc("unserved_adapters"))[0]
                if unserved:  # vLLM would silently ignore them
                    further_layers = f" and {len(unserved) - 1} more" if len(unserved) > 1 else ""
                    raise ConfigError(
                        f"vLLM cannot apply the adapter of {unserved[0]}{further_layers}",
                        location="model.lora.serve",
                        hint="set it to merged, or remove these layers from model.lora.target_modules",
                    )
            self._layout = slots
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as signals:
                signals.setblocking(False)
                signals.bind("")  # the kernel chooses an address, which is no file
                await self._vllm.collective_rpc("prepare_weights", args=(version, path, signals.getsockname()))
                while not all(await self._vllm.collective_rpc("weights_prepared")):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PREPARED_CHECK_S):
                            await asyncio.get_running_loop().sock_recv(signals, 1)
        except Exception as error:
            # The host's agent may die at any moment. vLLM passes on only the text of its core's errors, so look at the
            # path. The engine has changed nothing yet and can continue; after the pause it could not.
            if os.path.exists(path):
                raise
            raise ReplicaGone(f"the memory of weight version {version} is gone", location=path) from error

    async def _load(self, version: int, path: str, policy: str, on_pause: Callable[[], None]) -> float:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        core = self._vllm.engine_core
        # Before the pause: a request submitted from now on must wait, or its salt would name the old version.
        self._loading = True
        while policy == "drain" and self._occupancy.requests:
            # Not vLLM's mode "wait", which leaves requests behind that it interrupted for lack of cache.
            await self._all_returned.wait()
        await core.pause_scheduler_async(mode="keep", clear_cache=policy != "keep")
        started = time.monotonic()
        # vLLM sent the last tokens before it answered the pause. Once it has answered this call, they have arrived, and
        # ``on_pause`` sees all of them (decision 0010).
        await self._vllm.start_weight_update()
        on_pause()
        if policy == "keep":
            # Their prompts, or prompts in the cache that their salt names, have the old version's keys, values and
            # images. All their tokens would have the new version, so they begin again under it (decision 0005).
            await self._vllm.abort(requests_without_tokens(self._vllm))
        await self._vllm.update_weights(WeightTransferUpdateRequest({"version": version, "path": path}))
        await self._vllm.finish_weight_update(str(version))
        if self._adapter is not None:
            await self._vllm.collective_rpc("install_adapter")
        self._version = version
        # Not reached if a call above failed: an engine with weights of two versions must not generate. The driver then
        # ends this process and continues its requests elsewhere.
        await core.resume_scheduler_async()
        self._loading = False  # last: waiting requests must start under the new version
        await self._wake()
        return time.monotonic() - started

    async def sleep(self, level: int = 1) -> None:
        """Release the GPU's memory until ``wake_up``: weights move to host memory, and the KV cache is discarded.

        Running requests keep their tokens; new ones wait. Weight updates, probes and aborts wait, too: vLLM must not
        touch its memory. ``level``: vLLM's sleep level. CPU engines have only level 0, which releases no memory.
        """
        await self._scheduler.acquire()
        self._loading = True
        try:
            await self._vllm.sleep(level, mode="keep")
        except BaseException:
            self._loading = self._version < 0
            self._scheduler.release()
            raise
        self._asleep = True

    async def wake_up(self) -> None:
        """End ``sleep``. Does nothing if the engine is awake."""
        if not self._asleep:
            return
        await self._vllm.wake_up()
        self._asleep, self._loading = False, self._version < 0
        self._scheduler.release()
        await self._wake()

    async def attest(
        self, probe_ids: tuple[int, ...], stall_s: float, images: tuple[PlacedImage, ...] = ()
    ) -> Attestation:
        """Compute the log-probs of the tokens in ``Probe.logprobs``, through the path that serves rollouts."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._probes += 1
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        processed = await self._images.processed(images)
        async with self._scheduler:
            async for output in self._vllm.generate(
                self._prompt(probe_ids, images, processed),
                params,
                request_id=f"probe-{self._probes}",
                lora_request=self._adapter,
                priority=PROBE_PRIORITY,
            ):
                final_output = output
        logprobs = [
            entry[token].logprob for entry, token in zip(final_output.prompt_logprobs[1:], probe_ids[1:], strict=True)
        ]
        first_token = max([1, *(placed_image.end for placed_image in images)])
        return Attestation(self._version, np.asarray(logprobs[first_token - 1 :], dtype=np.float32), stall_s)

    def shutdown(self) -> None:
        """Stop vLLM and its processes."""
        self._vllm.shutdown()

    async def _final_output(
        self, request: RolloutRequest, prefix_ids: tuple[int, ...], processed: list[Any], aborts: int
    ) -> CompletionOutput:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async with self._changed:
            await self._changed.wait_for(lambda: self._aborts > aborts or not self._loading)
        if self._aborts > aborts:
            raise Aborted([])
        sampling = request.sampling
        may_wait = not (request.streamed or sampling.stop)
        params = SamplingParams(
            max_tokens=request.remaining_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop=list(sampling.stop),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=not self._shows_special,  # vLLM searches this text for stop strings
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # no other request has these parameters
            extra_args={HOLD_S: self._hold_s} if may_wait else None,
        )
        self._occupancy.add(1)
        self._all_returned.clear()
        since = time.monotonic()
        try:
            async for output in self._vllm.generate(
                self._prompt(request.prompt_ids + prefix_ids, request.images, processed),
                params,
                request_id=request_id(request.rollout_id, request.generated),
                lora_request=self._adapter,
            ):
                final_output = output
        finally:
            self._occupancy.add(-1)
            if not self._occupancy.requests:
                self._all_returned.set()
        self._returned.append(
            Placement(
                request.rollout_id,
                since_s=since,
                until_s=time.monotonic(),
                cached_tokens=final_output.num_cached_tokens or 0,
            )
        )
        return final_output.outputs[0]

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _prompt(self, ids: tuple[int, ...], images: Sequence[PlacedImage] = (), processed: Sequence[Any] = ()) -> Any:
        from vllm.inputs import tokens_input

        # With `keep` the prefix cache outlives a weight update. The salt keeps a request that starts under this version
        # from reading an older version's keys and values (decision 0005).
        if images:
            return self._images.prompt(ids, images=images, processed=processed, version=self._version)
        return tokens_input(list(ids), cache_salt=str(self._version))


def _segments(request: RolloutRequest, output: CompletionOutput, experts: Experts | None = None) -> list[Segment]:
    prefix_tokens = request.generated
    starts = [(int(span.version), prefix_tokens + span.start) for span in output.weight_versions or ()]
    return split_by_version(
        request.rollout_id,
        start=prefix_tokens,
        ids=output.token_ids,
        logprobs=sampled_logprobs(output.logprobs),
        version_starts=starts,
        experts=experts,
    )


def _experts(request: RolloutRequest, output: CompletionOutput) -> tuple[Experts | None, Experts | None]:
    """Experts of the tokens before the first one generated here, and from it on."""
    if output.routed_experts is None or request.rollout_id.startswith(EVALUATION):
        return None, None
    context_tokens = len(request.prompt_ids) + request.generated
    rows = newest_experts([output.routed_experts], context_tokens + len(output.token_ids) - 1)
    assert rows is not None
    return join_experts([(1, None), (context_tokens - 1, rows[: context_tokens - 1])]), rows[context_tokens - 1 :]
