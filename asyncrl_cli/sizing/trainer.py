"""A trainer rank's memory with DeepSpeed 0.19. docs/sizing.md has the table of ZeRO stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncrl_cli.sizing.memory_use import NUMBER_BYTES, MemoryUse, nonzero_uses
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.spec.sections import ExperimentSpec, TrainerSpec, needs_no_mask, shares_prefixes

FLOAT = 4
ADAM_BYTES = 8
"""Bytes per trained weight of Adam's two float32 moments."""
REUSE_NUMBERS, SUBGROUP_NUMBERS = 10**9, 10**9
"""DeepSpeed's defaults for ZeRO-3: a gathered weight stays if it is used again within this many numbers; the optimizer
works on this many at a time."""
OFFLOADED: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("float32 weights", "optimizer"),
    "all": ("float32 weights", "optimizer", "weights", "reference model"),
}
"""Names of the parts in host memory, by ``trainer.offload``; a critic's states are where the policy's are."""
CPU_RANK_BYTES = 25 * 10**6
"""Bytes that DeepSpeed and gloo take on a CPU in addition to the parts, measured on a rank with 0.3 M weights."""
SUM_NUMBERS = 5 * 10**8
"""Without ZeRO, DeepSpeed copies this many gradient values into one tensor to add them up over the ranks."""


class Rank(NamedTuple):
    """A rank's parts on its device, and in host memory (``trainer.offload``)."""

    device: tuple[MemoryUse, ...]
    host: tuple[MemoryUse, ...]


def rank_uses(spec: ExperimentSpec, model: SizedModel) -> Rank:
    """Return a rank's parts at its peak: in a micro-batch, or while the optimizer steps."""
    trainer = spec.trainer
    states = _states(spec, model.parameters, model.trained)
    # The critic's passes need less than the policy's, and happen at other times.
    backbone = model.parameters - model.head
    critic = _states(spec, backbone, backbone) if spec.algorithm.needs_critic else ()
    gathered = gathered_numbers(model, trainer) * NUMBER_BYTES[trainer.dtype]
    rows, length, positions = largest_microbatch(spec)
    # A rank computes its slice of the positions. Attention is over all positions with a share of the heads, which
    # takes the same memory.
    size = trainer.sequence_parallel
    slice_length, predicting = -(-length // size), -(-positions // size)
    activations = model.activations(rows, slice_length, predicting, trainer.recomputes)
    activations += _mask_bytes(spec, length)
    recomputed = ", recomputed" if trainer.recomputes else ""
    pass_uses = (
        MemoryUse("gathered layers", gathered, "of other ranks' weights, for a pass"),
        MemoryUse("activations", activations, f"{rows} × {slice_length:,} tokens{recomputed}"),
        MemoryUse("reduce buckets", _bucket_bytes(spec, model), "gradients on their way"),
    )
    step_uses = (
        MemoryUse("gradients for the step", _step_bytes(spec, model.trained), "a copy, while the optimizer steps"),
    )
    # Not the sum: the step reuses the memory that a pass has freed (decision 0047).
    peak_uses = max(pass_uses, step_uses, key=lambda uses: sum(use.bytes for use in uses))
    process_uses = (
        () if trainer.gpus_per_rank else (MemoryUse("DeepSpeed", CPU_RANK_BYTES, "its own memory, and gloo's"),)
    )
    stage = trainer.zero_stage
    reference = MemoryUse(
        "reference model", _reference_bytes(spec, model), f"{trainer.dtype}, ZeRO {stage}" if stage == 3 else "whole"
    )
    offloaded = OFFLOADED[trainer.offload]

    def uses_in(host: bool) -> list[MemoryUse]:
        critic_bytes = sum(use.bytes for use in critic if (use.name in offloaded) == host)
        uses = [use for use in (*states, reference) if (use.name in offloaded) == host]
        return [*uses, MemoryUse("critic", critic_bytes, "a second model's states")]

    return Rank(nonzero_uses([*uses_in(host=False), *peak_uses, *process_uses]), nonzero_uses(uses_in(host=True)))


def lasting_uses(spec: ExperimentSpec, model: SizedModel) -> tuple[MemoryUse, ...]:
    """Return the parts on a rank's device between two steps. Only ZeRO-3 keeps the gradients' memory."""
    freed = {"activations", "gathered layers", "reduce buckets", "gradients for the step"}
    if spec.trainer.zero_stage < 3:
        freed.add("gradients")
    return tuple(use for use in rank_uses(spec, model).device if use.name not in freed)


def gathered_numbers(model: SizedModel, trainer: TrainerSpec) -> int:
    """Return the most numbers of gathered weights on a rank under ZeRO-3.

    The last modules stay gathered between forward and backward pass, if fewer than ``REUSE_NUMBERS`` numbers are used
    in between. In addition there are the module that computes, and the modules gathered ahead. A single rank gathers
    nothing. If ranks divide the experts, a rank gathers its own share, and no experts at all if no other rank has the
    same ones.
    """
    from asyncrl_cli.train.deepspeed_engine import gathered_experts, prefetch_numbers

    if trainer.zero_stage < 3 or trainer.ranks == 1:
        return 0
    local_experts = [gathered_experts(trainer, weight_count) for weight_count in model.experts]
    layers = [
        layer_count - experts + local_count
        for layer_count, experts, local_count in zip(model.layers, model.experts, local_experts, strict=True)
    ]
    modules = (model.embeddings, *layers, model.head) if model.head else (*layers, model.embeddings)
    kept_count = 0
    for weight_count in reversed(modules):
        if 2 * kept_count >= REUSE_NUMBERS:
            break
        kept_count += weight_count
    remote_experts = sum(model.experts) - sum(local_experts)
    ahead = prefetch_numbers(trainer, max(layers))
    return min(model.parameters - remote_experts, kept_count + max(modules) + ahead)


def largest_microbatch(spec: ExperimentSpec) -> tuple[int, int, int]:
    """Return a run's largest micro-batch: rows or trees, tokens of each, positions that predict a response token."""
    rollout, trainer = spec.rollout, spec.trainer
    max_tokens = min(spec.model.max_length, rollout.longest_rollout)
    responses = rollout.max_response_tokens
    if shares_prefixes(spec):
        responses *= rollout.group_size
        max_tokens = longest_tree(spec)
    if trainer.packing:
        length = max(trainer.microbatch_tokens, max_tokens)
        return 1, length, length - 1
    rows = max(1, -(-trainer.microbatch_tokens // max_tokens))
    # Rows a little shorter than the longest fill the micro-batch.
    length = trainer.microbatch_tokens // rows if rows > 1 else max_tokens
    return rows, length, rows * min(length - 1, responses)


def longest_tree(spec: ExperimentSpec) -> int:
    """Return the most positions of a tree: a group with one prompt, a part of it, or the longest row."""
    from asyncrl_cli.train.prefix_trees import MASK_POSITIONS

    row_tokens = min(spec.model.max_length, spec.rollout.longest_rollout)
    group_tokens = row_tokens * spec.rollout.group_size
    return max(row_tokens, min(group_tokens, spec.trainer.microbatch_tokens, MASK_POSITIONS))


def _states(spec: ExperimentSpec, parameters: int, trained: int) -> tuple[MemoryUse, ...]:
    trainer = spec.trainer
    stage, ranks, dtype_bytes = trainer.zero_stage, trainer.ranks, NUMBER_BYTES[trainer.dtype]
    in_float32 = trainer.dtype == "float32"
    gradient_bytes = FLOAT if stage >= 2 else dtype_bytes
    # DeepSpeed's ZeRO keeps its own float32 copy of a rank's weights, even of float32 weights.
    copies = trained * FLOAT if stage or not in_float32 else 0
    return (
        MemoryUse(
            "weights", _rank_share(parameters * dtype_bytes, ranks, stage >= 3), f"{trainer.dtype}, ZeRO {stage}"
        ),
        MemoryUse(
            "gradients", _rank_share(trained * gradient_bytes, ranks, stage >= 2), f"{gradient_bytes} bytes each"
        ),
        MemoryUse("float32 weights", _rank_share(copies, ranks, stage >= 1), "updated by the optimizer"),
        MemoryUse("optimizer", _rank_share(trained * ADAM_BYTES, ranks, stage >= 1), "Adam's two moments"),
    )


def _reference_bytes(spec: ExperimentSpec, model: SizedModel) -> int:
    algorithm = spec.algorithm
    if not algorithm.kl_coef or (spec.model.lora is not None and algorithm.reference_path is None):
        return 0
    trainer = spec.trainer
    return _rank_share(
        (model.teacher or model.parameters) * NUMBER_BYTES[trainer.dtype], trainer.ranks, trainer.zero_stage == 3
    )


def _bucket_bytes(spec: ExperimentSpec, model: SizedModel) -> int:
    """Bytes of the buckets with which ZeRO 2 and 3 add up gradients over the ranks, even over a single rank.

    On a host only the written part of a bucket takes memory, on a GPU all of it. Ranks that add up bfloat16 gradients
    in float32 convert them, and copy them into one tensor. A gradient larger than a bucket is only converted.
    """
    from asyncrl_cli.train.deepspeed_engine import reduce_numbers, sums_in_float32

    if spec.trainer.zero_stage < 2:
        return 0
    bucket_numbers = reduce_numbers(spec.trainer)
    written_numbers = bucket_numbers if spec.trainer.gpus_per_rank else min(bucket_numbers, model.trained)
    if not sums_in_float32(spec.trainer):
        return written_numbers * NUMBER_BYTES[spec.trainer.dtype]
    experts = max(model.experts) // spec.trainer.expert_parallel
    largest_gradient = 0 if spec.model.lora is not None else max(model.embeddings, model.head, experts)
    return (
        written_numbers * NUMBER_BYTES[spec.trainer.dtype]
        + max(2 * min(bucket_numbers, model.trained), largest_gradient) * FLOAT
    )


def _step_bytes(spec: ExperimentSpec, trained: int) -> int:
    """Bytes of the gradients' copies: the optimizer gets a part's gradients as one float32 tensor. Without ZeRO, ranks
    add up copies."""
    from asyncrl_cli.train.deepspeed_engine import sums_in_float32

    stage, ranks, dtype_bytes = spec.trainer.zero_stage, spec.trainer.ranks, NUMBER_BYTES[spec.trainer.dtype]
    if stage:
        shard_numbers = -(-trained // ranks)
        return (min(shard_numbers, SUBGROUP_NUMBERS) if stage == 3 else shard_numbers) * FLOAT
    copy_bytes = min(trained, SUM_NUMBERS) * (dtype_bytes + FLOAT * sums_in_float32(spec.trainer)) if ranks > 1 else 0
    return max(copy_bytes, trained * FLOAT if dtype_bytes != FLOAT else 0)


def _mask_bytes(spec: ExperimentSpec, length: int) -> int:
    """Bytes of the masks that the traced micro-batch of ``length`` tokens does not have."""
    trainer = spec.trainer
    if trainer.attention == "varlen":  # packed rows have no mask; trees are padded, and each has its own
        return longest_tree(spec) * length * NUMBER_BYTES[trainer.dtype] if shares_prefixes(spec) else 0
    packed = trainer.packing and not needs_no_mask(trainer.attention)
    return length * length if packed and not shares_prefixes(spec) else 0  # a tree's mask is in the activations


def _rank_share(nbytes: int, ranks: int, is_shared: bool) -> int:
    return -(-nbytes // ranks) if is_shared else nbytes
