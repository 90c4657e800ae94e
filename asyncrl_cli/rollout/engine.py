"""One vLLM engine: token ids in, token ids with log-probs and weight versions out.

Only vLLM's own reinforcement-learning interface is used: pause, weight update, resume. A request that runs
while the weights change is one request for the caller, and its tokens say which version sampled each.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl_cli.rollout.records import Attestation, Rollout, RolloutRequest
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
BLOCK_SIZE = 32
"""Tokens per key-value block on CPU."""


def engine_environment(spec: ExperimentSpec) -> dict[str, str]:
    """Environment variables that the process of an engine must start with."""
    threads = str(spec.rollout.threads_per_engine)
    if spec.rollout.gpus_per_engine:
        return dict(ENVIRONMENT)
    return ENVIRONMENT | CPU_ENVIRONMENT | {"OMP_NUM_THREADS": threads}


def kv_cache_bytes(spec: ExperimentSpec, hf_config: Any) -> int:
    """Bytes of key-value cache for ``max_running_rollouts`` sequences of half the longest length.

    Per token: 2 (key and value) × layers × key-value heads × head size × bytes per number.
    """
    if spec.rollout.kv_cache_mb is not None:
        return spec.rollout.kv_cache_mb * 2**20
    heads = getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads
    head_size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    item = {"float32": 4, "bfloat16": 2}[spec.rollout.dtype]
    per_token = 2 * int(hf_config.num_hidden_layers) * int(heads) * int(head_size) * item
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    blocks_each = -(-longest // (2 * BLOCK_SIZE)) + 1
    least = -(-longest // BLOCK_SIZE) + 1
    return max(spec.rollout.max_running_rollouts * blocks_each, least) * BLOCK_SIZE * per_token


def engine_args(spec: ExperimentSpec, model_dir: str) -> AsyncEngineArgs:
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
        # The first publish brings the real weights, so none are read here.
        "load_format": "dummy",
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
            "kv_cache_memory_bytes": kv_cache_bytes(spec, AutoConfig.from_pretrained(model_dir)),
            # vLLM's CPU sampler cannot split a seeded request over chunks of its prompt.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(spec.model.max_length, 2048),
        }
    return AsyncEngineArgs(**(args | rollout.engine_args))


class Engine:
    """An engine with weights of a known version; none before the first ``update_weights``."""

    def __init__(self, spec: ExperimentSpec, model_dir: str) -> None:
        """Start vLLM (seconds). Raises whatever vLLM raises when it cannot."""
        from transformers import AutoTokenizer
        from vllm.v1.engine.async_llm import AsyncLLM

        self._vllm = AsyncLLM.from_engine_args(engine_args(spec, model_dir))
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._version = -1
        self._mapped: str | None = None
        self._probes = 0
        # vLLM gets no more requests than it runs at once, and none while it loads weights. So a request's
        # cache salt, chosen when vLLM gets it, names the version that it starts under.
        self._slots = asyncio.Semaphore(spec.rollout.max_running_rollouts)
        self._serving = asyncio.Event()

    async def generate(self, request: RolloutRequest) -> Rollout:
        """Generate one rollout, across any number of weight updates."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop=list(sampling.stop),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async with self._slots:
            output = await self._final_output(request.rollout_id, request.prompt_ids, params)
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"the engine ended the request with {output.finish_reason!r}")
        ids = np.asarray(output.token_ids, dtype=np.int32)
        return Rollout(
            rollout_id=request.rollout_id,
            prompt_ids=request.prompt_ids,
            response_ids=ids,
            logprobs=_sampled_logprobs(output),
            versions=_versions(output),
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="stop" if output.finish_reason == "stop" else "length",
        )

    async def update_weights(self, version: int, checksum: str, source: dict[str, Any], policy: str) -> float:
        """Load the mapped weights as ``version``; returns the seconds that no token was generated.

        ``source`` is what ``WeightMapping.describe`` says; ``policy`` is the spec's ``weight_update``.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        core = self._vllm.engine_core
        self._serving.clear()
        if policy == "drain":
            await core.pause_scheduler_async(mode="wait", clear_cache=True)
        else:
            await core.pause_scheduler_async(mode="keep", clear_cache=policy == "recompute")
        started = time.monotonic()
        try:
            if self._mapped != source["path"]:
                await self._vllm.init_weight_transfer_engine(WeightTransferInitRequest(source))
                self._mapped = source["path"]
            await self._vllm.start_weight_update()
            await self._vllm.update_weights(WeightTransferUpdateRequest({"checksum": checksum}))
            await self._vllm.finish_weight_update(str(version))
            self._version = version
        finally:
            await core.resume_scheduler_async()
            self._serving.set()
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
        async for output in self._vllm.generate(
            self._prompt(probe_ids), params, request_id=f"probe-{self._probes}", priority=0
        ):
            last = output
        logprobs = [entry[token].logprob for entry, token in zip(last.prompt_logprobs[1:], probe_ids[1:], strict=True)]
        return Attestation(self._version, np.asarray(logprobs, dtype=np.float32), stall_s)

    def shutdown(self) -> None:
        """Stop vLLM and its processes."""
        self._vllm.shutdown()

    async def _final_output(self, request_id: str, prompt_ids: tuple[int, ...], params: Any) -> CompletionOutput:
        await self._serving.wait()
        async for output in self._vllm.generate(self._prompt(prompt_ids), params, request_id=request_id):
            last = output
        return last.outputs[0]

    def _prompt(self, ids: tuple[int, ...]) -> Any:
        from vllm.inputs import TokensPrompt

        # With `keep` the prefix cache outlives a weight update; the salt makes sure that a request which
        # starts under this version never reads keys and values of an older one.
        return TokensPrompt(prompt_token_ids=list(ids), cache_salt=str(self._version))


def _sampled_logprobs(output: CompletionOutput) -> np.ndarray[Any, np.dtype[np.float32]]:
    flat = output.logprobs
    starts = flat.start_indices
    return np.asarray([flat.logprobs[start] for start in starts], dtype=np.float32)


def _versions(output: CompletionOutput) -> np.ndarray[Any, np.dtype[np.int32]]:
    versions = np.full(len(output.token_ids), -1, dtype=np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise RuntimeError("vLLM did not say which weights sampled every token")
    return versions
