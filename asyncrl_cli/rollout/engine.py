"""One vLLM engine: token ids in, token ids with log-probs and weight versions out.

vLLM's own reinforcement-learning interface does the work: pause, weight update, resume. A request that runs while the
weights change is one request for the caller, and its tokens say which version sampled each. So is one that goes on
where another engine left it: the caller gets the whole rollout. running.py reads what a running request has so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl_cli.records.generation import Attestation, Rollout, RolloutRequest, Sampling, Segment, TokenSequence
from asyncrl_cli.rollout.continuation import finished, rest_of, split_by_version
from asyncrl_cli.rollout.engine_start import start_vllm
from asyncrl_cli.rollout.priority_semaphore import Aborted, Slots
from asyncrl_cli.rollout.vllm_inflight import request_id, running_segments, running_tokens, sampled_logprobs
from asyncrl_cli.spec.sections import ExperimentSpec

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import CompletionOutput

CPU_ENVIRONMENT = {
    # With 1, vLLM's CPU platform puts the worker in a process of its own behind the engine core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
ABORT_LOOK_S = 0.02
"""Seconds that an abort waits for the requests to come back before it looks whether vLLM got another one."""
BLOCK_SIZE = 32
"""Tokens per key-value block on CPU."""


def engine_environment(spec: ExperimentSpec) -> dict[str, str]:
    """Environment variables that the process of an engine must start with."""
    threads = str(spec.rollout.threads_per_engine)
    if spec.rollout.gpus_per_engine:
        return dict(ENVIRONMENT)
    return ENVIRONMENT | CPU_ENVIRONMENT | {"OMP_NUM_THREADS": threads}


def cache_bytes_per_token(spec: ExperimentSpec, hf_config: Any) -> int:
    """2 (key and value) × layers × key-value heads × head size × bytes per number."""
    heads = getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads
    head_size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    item = {"float32": 4, "bfloat16": 2}[spec.rollout.dtype]
    return 2 * int(hf_config.num_hidden_layers) * int(heads) * int(head_size) * item


def kv_cache_bytes(spec: ExperimentSpec, hf_config: Any) -> int:
    """Bytes of key-value cache for ``max_running_rollouts`` sequences of half the longest length, and for at least one
    of ``model.max_length``, without which vLLM does not start."""
    if spec.rollout.kv_cache_mb is not None:
        return spec.rollout.kv_cache_mb * 2**20
    per_token = cache_bytes_per_token(spec, hf_config)
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    blocks_each = -(-longest // (2 * BLOCK_SIZE)) + 1
    least = -(-max(longest, spec.model.max_length) // BLOCK_SIZE) + 1
    return max(spec.rollout.max_running_rollouts * blocks_each, least) * BLOCK_SIZE * per_token


def engine_args(spec: ExperimentSpec, model_dir: str, load_format: str) -> AsyncEngineArgs:
    """vLLM's arguments for a spec."""
    from transformers import AutoConfig
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from asyncrl_cli.weights import vllm_worker

    rollout = spec.rollout
    args: dict[str, Any] = {
        "model": model_dir,
        "dtype": rollout.dtype,
        "max_model_len": spec.model.max_length,
        "max_num_seqs": rollout.max_running_rollouts,
        "seed": spec.seed,
        "load_format": load_format,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": f"{vllm_worker.__name__}.{vllm_worker.WorkerExtension.__name__}",
        "weight_transfer_config": WeightTransferConfig(backend=vllm_worker.BACKEND),
    }
    if rollout.gpus_per_engine:
        args["tensor_parallel_size"] = rollout.gpus_per_engine
    else:
        args |= {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": kv_cache_bytes(spec, AutoConfig.from_pretrained(model_dir).get_text_config()),
            # vLLM's CPU sampler cannot split a seeded request over chunks of its prompt.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(spec.model.max_length, 2048),
        }
    return AsyncEngineArgs(**(args | rollout.engine_args))


class Engine:
    """An engine with weights of a known version; none before the first ``update_weights`` or ``serve_own``."""

    def __init__(
        self, spec: ExperimentSpec, model_dir: str, own_weights: bool = False, log: Path | None = None
    ) -> None:
        """Start vLLM (seconds). Raises as ``start_vllm`` does; ``log`` is where this process writes its output.

        ``own_weights``: read those in the folder. Otherwise the first publish brings them.
        """
        from transformers import AutoTokenizer

        self._vllm = start_vllm(spec, model_dir, "auto" if own_weights else "dummy", log)
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._version = -1
        self._mapped: str | None = None
        self._probes = 0
        # vLLM gets no more requests than it runs at once, and none while it loads weights. So a request's
        # cache salt, chosen when vLLM gets it, names the version that it starts under.
        self._slots = Slots(spec.rollout.max_running_rollouts)
        self._loading = True
        self._aborts = 0
        self._changed = asyncio.Condition()  # one of the two, or the version
        self._scheduler = asyncio.Lock()  # whoever pauses vLLM, or must not be paused, has it
        self._handed_over = 0  # requests that vLLM has
        self._all_returned = asyncio.Event()
        self._ended_tokens = 0

    async def generate(self, request: RolloutRequest) -> Rollout:
        """Generate one rollout, or the rest of one, across any number of weight updates.

        Raises ``Aborted`` when ``abort`` ended it first, and ``ValueError`` when the request's prefix is no beginning
        of a rollout.
        """
        prefix_ids = tuple(TokenSequence.join(request.prefix).ids.tolist())
        rest = rest_of(request.sampling, request.generated)
        if not rest.max_tokens:
            return finished(request, [], "length", self._decode)
        aborts = self._aborts
        async with self._slots.one(request.priority):
            output = await self._final_output(request, rest, prefix_ids, aborts)
        self._ended_tokens += len(output.token_ids)
        segments = _segments(request, output)
        if output.finish_reason == "abort":
            raise Aborted(segments)
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"the engine ended the request with {output.finish_reason!r}")
        return finished(request, segments, "stop" if output.finish_reason == "stop" else "length", self._decode)

    async def abort(self) -> None:
        """End every request that runs or waits: it raises ``Aborted``. When this returns, none of them is generated."""
        core = self._vllm.engine_core
        async with self._scheduler:
            self._aborts += 1
            self._slots.turn_away()
            await self._wake()
            try:
                while self._handed_over:  # vLLM may get one more that was on its way to it
                    await core.pause_scheduler_async(mode="abort", clear_cache=False)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._all_returned.wait(), ABORT_LOOK_S)
            finally:
                await core.resume_scheduler_async()

    def segments(self, since: Mapping[str, int]) -> list[Segment]:
        """New tokens of the rollouts that run: from the token index on that ``since`` has for a rollout's id.

        They are a part of the final rollout, bit for bit. Rollouts that ``since`` does not name are left out.
        """
        return running_segments(self._vllm, since)

    def sampled_tokens(self) -> int:
        """Tokens generated so far, for rollouts that ended or run. Those of a cancelled one drop out."""
        return self._ended_tokens + running_tokens(self._vllm)

    @property
    def dead(self) -> bool:
        """Whether vLLM's core process is gone; ``segments`` still gives what had arrived from it."""
        return bool(self._vllm.errored)

    async def serve_own(self, version: int) -> None:
        """Serve the weights of the folder that the engine was started on, as ``version``."""
        await self._vllm.update_weight_version(str(version))
        self._version, self._loading = version, False
        await self._wake()

    async def update_weights(
        self,
        version: int,
        checksum: str,
        source: dict[str, Any],
        policy: str,
        on_pause: Callable[[], None] = lambda: None,
    ) -> float:
        """Load the mapped weights as ``version``; returns the seconds that no token was generated.

        ``source`` is what ``WeightMapping.describe`` says; ``policy`` is the spec's ``weight_update``. ``on_pause``
        is called before the weights load, when ``segments`` has all tokens of the version that is replaced.
        """
        async with self._scheduler:
            return await self._load(version, checksum, source, policy, on_pause)

    async def _load(
        self, version: int, checksum: str, source: dict[str, Any], policy: str, on_pause: Callable[[], None]
    ) -> float:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        core = self._vllm.engine_core
        self._loading = True
        if policy == "drain":
            await core.pause_scheduler_async(mode="wait", clear_cache=True)
        else:
            await core.pause_scheduler_async(mode="keep", clear_cache=policy == "recompute")
        started = time.monotonic()
        try:
            if self._mapped != source["path"]:
                await self._vllm.init_weight_transfer_engine(WeightTransferInitRequest(source))
                self._mapped = source["path"]
            # The last tokens left vLLM's process before its answer to the pause; by the time that it has answered
            # this call, too, they are in.
            await self._vllm.start_weight_update()
            on_pause()
            await self._vllm.update_weights(WeightTransferUpdateRequest({"checksum": checksum}))
            await self._vllm.finish_weight_update(str(version))
            self._version = version
        finally:
            await core.resume_scheduler_async()
            self._loading = False
            await self._wake()
        return time.monotonic() - started

    async def attest(self, probe_ids: tuple[int, ...], stall_s: float) -> Attestation:
        """Log-probs of a fixed sequence, through the path that serves rollouts."""
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
        async with self._scheduler:
            async for output in self._vllm.generate(
                self._prompt(probe_ids), params, request_id=f"probe-{self._probes}", priority=0
            ):
                last = output
        logprobs = [entry[token].logprob for entry, token in zip(last.prompt_logprobs[1:], probe_ids[1:], strict=True)]
        return Attestation(self._version, np.asarray(logprobs, dtype=np.float32), stall_s)

    def shutdown(self) -> None:
        """Stop vLLM and its processes."""
        self._vllm.shutdown()

    async def _final_output(
        self, request: RolloutRequest, rest: Sampling, prefix_ids: tuple[int, ...], aborts: int
    ) -> CompletionOutput:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=rest.max_tokens,
            temperature=rest.temperature,
            seed=rest.seed,
            stop=list(rest.stop),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(rest.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # While weights travel, the engine that left the prefix, or sampled the turns before, may have been a version
        # ahead of this one.
        newest = max(request.newest, request.prefix[-1].version if request.prefix else 0)
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._aborts > aborts or (not self._loading and self._version >= newest)
            )
        if self._aborts > aborts:
            raise Aborted([])
        self._handed_over += 1
        self._all_returned.clear()
        try:
            async for output in self._vllm.generate(
                self._prompt(request.prompt_ids + prefix_ids),
                params,
                request_id=request_id(request.rollout_id, request.generated),
            ):
                last = output
        finally:
            self._handed_over -= 1
            if not self._handed_over:
                self._all_returned.set()
        return last.outputs[0]

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _decode(self, ids: Any) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _prompt(self, ids: tuple[int, ...]) -> Any:
        from vllm.inputs import TokensPrompt

        # With `keep` the prefix cache outlives a weight update; the salt makes sure that a request which
        # starts under this version never reads keys and values of an older one.
        return TokensPrompt(prompt_token_ids=list(ids), cache_salt=str(self._version))


def _segments(request: RolloutRequest, output: CompletionOutput) -> list[Segment]:
    first = request.generated
    starts = [(int(span.version), first + span.start) for span in output.weight_versions or ()]
    return split_by_version(request.rollout_id, first, output.token_ids, sampled_logprobs(output.logprobs), starts)
