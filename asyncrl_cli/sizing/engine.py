"""A vLLM engine's memory, and the number of sequences that its key-value cache can hold."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl_cli.rollout.engine_settings import BLOCK_SIZE, batched_tokens, kv_cache_bytes
from asyncrl_cli.sizing.memory_use import GB, NUMBER_BYTES, MemoryUse, nonzero_uses
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import engine_memory_share, tensor_parallel

GRAPH_BYTES = GB
"""CUDA graphs and the context of a GPU engine: assumed."""
ACTIVATION_WIDTHS = 16
"""Numbers per token in a layer's forward pass, as multiples of the model's width: assumed."""
MAX_ROLLOUTS = 512
"""Most rollouts that are chosen for an engine: vLLM records CUDA graphs for at most as many (twice on Blackwell), and
without graphs a decode step waits for the host."""
LOGIT_COPIES = 3
"""float32 tensors of running rollouts × vocabulary: logits, log-probs, and one in the sampler."""


@dataclass(frozen=True, slots=True)
class Cache:
    """An engine's key-value cache. ``bytes`` and ``tokens`` are negative if not even the weights fit."""

    bytes: int
    tokens: int
    longest_rollouts: int  # number of sequences of the longest length that fit
    average_rollouts: int  # number of running sequences that fit if rollouts end at uniformly distributed lengths


def engine_uses(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None = None) -> tuple[MemoryUse, ...]:
    """Return an engine's parts without its cache: on one of its GPUs (of ``gpu_bytes``), or in its processes."""
    rollout, ranks, lora = spec.rollout, tensor_parallel(spec), spec.model.published_adapter
    dtype_bytes = NUMBER_BYTES[rollout.dtype]
    nbytes = -(-base_numbers(spec, model) * dtype_bytes // ranks)
    weights = MemoryUse("weights", nbytes, f"{rollout.dtype}, tensor parallel over {ranks}")
    slots = 0 if lora is None else model.trained * lora.slot_rank // lora.rank
    adapters = MemoryUse("adapters", slots * dtype_bytes, f"slots of rank {lora.slot_rank if lora is not None else 0}")
    logits = min(rollout.running_rollouts, 1024) * model.vocabulary * 4 * LOGIT_COPIES // ranks
    tokens = int(rollout.engine_args.get("max_num_batched_tokens") or batched_tokens(spec, gpu_bytes))
    if rollout.gpus_per_engine:
        graphs, nbytes = GRAPH_BYTES, tokens * ACTIVATION_WIDTHS * model.hidden * dtype_bytes
        activations = MemoryUse("activations", nbytes, f"a batch of {tokens:,} tokens")
    else:
        graphs = 0
        activations = MemoryUse("next version", adapters.bytes, "prepared while this one serves")
    return nonzero_uses(
        [
            weights,
            adapters,
            activations,
            MemoryUse("logits", logits, f"of {rollout.running_rollouts} rollouts"),
            MemoryUse("CUDA graphs and context", graphs, "assumed"),
        ]
    )


def base_numbers(spec: ExperimentSpec, model: SizedModel) -> int:
    """Return the number of an engine's weights, without separate adapters."""
    return model.parameters - (model.trained if spec.model.lora is not None else 0)


def gpu_cache(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int) -> Cache | None:
    """Return a GPU engine's cache: the rest of vLLM's share of its GPUs after all other parts. None if the model's
    config does not give a token's size."""
    if model.cache_numbers is None:
        return None
    ranks = tensor_parallel(spec)
    cache_bytes = int(gpu_bytes * engine_memory_share(spec)) - sum(
        use.bytes for use in engine_uses(spec, model, gpu_bytes)
    )
    # vLLM copies key-value heads if there are fewer than GPUs.
    return _cache(spec, cache_bytes, -(-token_bytes(spec, model) // min(ranks, model.kv_heads)))


def choose_running_rollouts(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None) -> int | None:
    """Return the number of rollouts that fill an engine on GPUs of ``gpu_bytes``, and at least a group.

    Rollouts of average length fit, so vLLM rarely interrupts one. None without an estimate of the cache.
    """
    rollout = spec.rollout.model_copy(update={"max_running_rollouts": MAX_ROLLOUTS})  # with the largest logits
    full_spec = spec.model_copy(update={"rollout": rollout})
    cache = None if gpu_bytes is None else gpu_cache(full_spec, model, gpu_bytes)
    return None if cache is None else max(rollout.group_size, min(MAX_ROLLOUTS, cache.average_rollouts))


def cpu_cache(spec: ExperimentSpec, model: SizedModel) -> Cache | None:
    """Return a CPU engine's cache, or None if the model's config does not give a token's size."""
    per_token = token_bytes(spec, model)
    return _cache(spec, kv_cache_bytes(spec, per_token), per_token) if per_token else None


def token_bytes(spec: ExperimentSpec, model: SizedModel) -> int:
    """Return a token's bytes in an engine's cache; 0: unknown."""
    return (model.cache_numbers or 0) * NUMBER_BYTES[spec.rollout.dtype]


def _cache(spec: ExperimentSpec, nbytes: int, per_token: int) -> Cache:
    rollout = spec.rollout
    blocks = nbytes // (BLOCK_SIZE * per_token)
    max_tokens = min(spec.model.max_length, rollout.longest_rollout)
    # Over uniform lengths up to L, a running rollout has E[length²] / (2 E[length]) = L / 3 tokens on average.
    blocks_of_longest, blocks_of_average = -(-max_tokens // BLOCK_SIZE), -(-max_tokens // (3 * BLOCK_SIZE))
    return Cache(
        nbytes,
        tokens=blocks * BLOCK_SIZE,
        longest_rollouts=max(0, blocks // blocks_of_longest),
        average_rollouts=max(0, blocks // blocks_of_average),
    )
