"""The memory that a vLLM engine takes, and how many sequences its key-value cache has room for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from asyncrl_cli.rollout.engine_settings import BLOCK_SIZE, batched_tokens
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.sizing.parts import GB, NUMBER_BYTES, Part, some
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import memory_share, tensor_parallel

GRAPH_BYTES = GB
"""CUDA graphs and the context of a GPU engine: assumed."""
ACTIVATION_WIDTHS = 16
"""Numbers of a token in a layer's forward pass, as multiples of the model's width: assumed."""
LOGIT_COPIES = 3
"""float32 tensors with a number for each running rollout and token of the vocabulary: logits, log-probs, and one of the
sampler."""


@dataclass(frozen=True, slots=True)
class Cache:
    """An engine's key-value cache. ``tokens`` may be negative where not even the weights fit."""

    bytes: int
    tokens: int
    longest: int  # sequences of the longest length that it has room for
    average: int  # sequences of half that length


def engine_parts(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None = None) -> tuple[Part, ...]:
    """The parts of an engine without its cache: on one of its GPUs of ``gpu_bytes``, or in its processes."""
    rollout, ranks, lora = spec.rollout, tensor_parallel(spec), spec.model.published_adapter
    number = NUMBER_BYTES[rollout.dtype]
    nbytes = -(-base_numbers(spec, model) * number // ranks)
    weights = Part("weights", nbytes, f"{rollout.dtype}, tensor parallel over {ranks}")
    slots = 0 if lora is None else model.trained * lora.slot_rank // lora.rank
    adapters = Part("adapters", slots * number, f"slots of rank {lora.slot_rank if lora is not None else 0}")
    logits = min(rollout.max_running_rollouts, 1024) * model.vocabulary * 4 * LOGIT_COPIES // ranks
    tokens = int(_argument(spec, "max_num_batched_tokens", batched_tokens(spec, gpu_bytes)))
    images = _image_parts(model, tokens, number)
    if not rollout.gpus_per_engine:
        # It is made next to the weights that serve (decision 0052).
        following = Part("next version", adapters.bytes or weights.bytes, "prepared while this one serves")
        return some(
            [
                weights,
                adapters,
                following,
                *images,
                Part("logits", logits, f"of {rollout.max_running_rollouts} rollouts"),
            ]
        )
    return some(
        [
            weights,
            adapters,
            Part("activations", tokens * ACTIVATION_WIDTHS * model.hidden * number, f"a batch of {tokens:,} tokens"),
            *images,
            Part("logits", logits, f"of {rollout.max_running_rollouts} rollouts"),
            Part("CUDA graphs and context", GRAPH_BYTES, "assumed"),
        ]
    )


def _image_parts(model: SizedModel, tokens: int, number: int) -> tuple[Part, ...]:
    """The tower's pass over the images of a batch, and vLLM's cache of its results: as many tokens as a batch has, or
    the largest image's."""
    if (tower := model.tower) is None:
        return ()
    cached = max(tokens, tower.tokens)
    images = cached // tower.tokens
    activations = replace(tower, frozen=True).activations(images, number)
    return (
        Part("vision tower's activations", activations, f"{images} × {tower.patches:,} patches, assumed"),
        Part("encoder cache", cached * model.hidden * number, f"the features of {cached:,} tokens"),
    )


def base_numbers(spec: ExperimentSpec, model: SizedModel) -> int:
    """How many weights engines have, without separate adapters."""
    return model.parameters - (model.trained if spec.model.lora is not None else 0)


def gpu_cache(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int) -> Cache | None:
    """The cache of a GPU engine, which gets what the other parts leave of vLLM's share of its GPUs. None where the
    model's config does not give a token's size."""
    if model.cache_numbers is None:
        return None
    ranks = tensor_parallel(spec)
    left = int(gpu_bytes * gpu_share(spec)) - sum(part.bytes for part in engine_parts(spec, model, gpu_bytes))
    # vLLM copies key-value heads where there are fewer than GPUs.
    return _cache(spec, left, -(-token_bytes(spec, model) // min(ranks, model.kv_heads)))


def cpu_cache(spec: ExperimentSpec, model: SizedModel, nbytes: int) -> Cache | None:
    """The cache of a CPU engine. The spec gives its size."""
    return None if model.cache_numbers is None else _cache(spec, nbytes, token_bytes(spec, model))


def token_bytes(spec: ExperimentSpec, model: SizedModel) -> int:
    """Bytes that a token takes in an engine's cache; 0 where that is not known."""
    return (model.cache_numbers or 0) * NUMBER_BYTES[spec.rollout.dtype]


def gpu_share(spec: ExperimentSpec) -> float:
    """The share of each of its GPUs' memory that an engine takes."""
    return float(_argument(spec, "gpu_memory_utilization", memory_share(spec.rollout.gpus_per_engine)))


def _cache(spec: ExperimentSpec, nbytes: int, per_token: int) -> Cache:
    rollout = spec.rollout
    blocks = nbytes // (BLOCK_SIZE * per_token)
    longest = min(spec.model.max_length, rollout.longest_rollout)
    of_longest, of_average = -(-longest // BLOCK_SIZE), -(-longest // (2 * BLOCK_SIZE))
    return Cache(
        nbytes, tokens=blocks * BLOCK_SIZE, longest=max(0, blocks // of_longest), average=max(0, blocks // of_average)
    )


def _argument(spec: ExperimentSpec, name: str, default: Any) -> Any:
    value = spec.rollout.engine_args.get(name)
    return default if value is None else value
