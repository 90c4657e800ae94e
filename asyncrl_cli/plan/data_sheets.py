"""Costs from data sheets, where nothing is measured: guesses, and labelled so. docs/planning.md has sources and errors.

Symbols: p GPUs of an engine, n sequences that it runs, N parameters that a token uses, W(n) those that a batch of n
tokens reads. Rates are of one GPU, in bf16 without sparsity. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl_cli.plan.costs import Costs, EngineCost, Overheads, PublishCost, TrainerCost
from asyncrl_cli.plan.lengths import Groups

NUMBER_BYTES = 2
"""Of a weight in bf16."""
SCHEDULER_S = 3e-3
"""Of an engine's iteration: scheduling, sampling, answers."""
LAYER_S = 40e-6
"""Of a layer's kernels, started from CUDA graphs."""
HOST_GPUS = 8
"""GPUs of a host, as servers with these GPUs have."""
ALL_REDUCE_S, ACROSS_HOSTS_S = 12e-6, 60e-6
"""Of a small all-reduce within a host, and of an engine with more GPUs than a host has; there are two in a layer."""
PER_SEQUENCE_S = 10e-6
"""Of the sampler and the scheduler, for each sequence of an iteration."""
BANDWIDTH_SHARE = 0.7
"""Of the memory bandwidth that decoding gets."""
DECODING_SHARE, PREFILL_SHARE = 0.5, 0.4
"""Of the arithmetic rate."""
TRAINING_SHARE, EXPERTS_TRAINING_SHARE = 0.4, 0.2
"""Of the arithmetic rate that training gets (MFU): dense models, and mixtures of experts."""
UPDATE_S = 1.0
"""Of the optimizer's update and the step's other work."""
WRITE_RATE, LOAD_RATE = 5e9, 20e9
"""Bytes a second: a rank writes its shard for the engines, a GPU loads its part."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's data sheet: bytes of memory, bytes a second, bf16 operations a second."""

    memory: float
    bandwidth: float
    flops: float


GPUS = {
    "a100": Gpu(80e9, 2.04e12, 312e12),
    "h100": Gpu(80e9, 3.35e12, 989e12),
    "h200": Gpu(141e9, 4.8e12, 989e12),
    "h20": Gpu(96e9, 4.0e12, 148e12),
    "b200": Gpu(180e9, 8.0e12, 2250e12),
    "l40s": Gpu(48e9, 0.864e12, 362e12),
    "mi300x": Gpu(192e9, 5.3e12, 1307e12),
}
"""Of the vendors' data sheets, dense bf16, the versions with the fastest memory (SXM)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's speed follows from.

    Attributes:
        parameters: all weights. active: those that a token uses, without the input embeddings.
        experts: weights of all routed experts; 0 in a dense model. chosen: share of them that a token uses.
        attention: query heads · their width, of a layer; contexts cost in proportion to it.
        cache_bytes: of a token's keys and values in all layers.
    """

    parameters: float
    active: float
    layers: int
    attention: int
    cache_bytes: float
    experts: float = 0.0
    chosen: float = 1.0

    def read(self, tokens: int) -> float:
        """Weights that an iteration of so many tokens reads: the dense ones and the experts that any of them chose."""
        return self.active - self.experts * self.chosen + self.experts * (1 - (1 - self.chosen) ** tokens)


@dataclass(frozen=True, slots=True)
class DataSheetIteration:
    """Seconds of a decode iteration without contexts: fixed work, and reading weights or computing, whichever is
    longer."""

    shape: Shape
    gpu: Gpu
    gpus: int

    def __call__(self, sequences: int) -> float:
        reading = NUMBER_BYTES * self.shape.read(sequences) / (self.gpus * self.gpu.bandwidth * BANDWIDTH_SHARE)
        computing = 2 * self.shape.active * sequences / (self.gpus * self.gpu.flops * DECODING_SHARE)
        all_reduce_s = ACROSS_HOSTS_S if self.gpus > HOST_GPUS else ALL_REDUCE_S
        communicating = 2 * all_reduce_s if self.gpus > 1 else 0.0
        fixed = SCHEDULER_S + self.shape.layers * (LAYER_S + communicating) + PER_SEQUENCE_S * sequences
        return fixed + max(reading, computing)


def engine_cost(shape: Shape, gpu: Gpu, gpus: int, kv_tokens: int | None) -> EngineCost:
    """An engine of ``gpus`` GPUs."""
    return EngineCost(
        DataSheetIteration(shape, gpu, gpus),
        per_context_token_s=shape.cache_bytes / (gpus * gpu.bandwidth * BANDWIDTH_SHARE),
        prefill_s=2 * shape.active / (gpus * gpu.flops * PREFILL_SHARE),
        kv_tokens=kv_tokens,
    )


def training_flops(shape: Shape, groups: Groups, passes: float) -> tuple[float, float]:
    """Operations for a token, of rollouts like these, and for one token of the longest of them.

    A forward pass is 2·N for a token, and 2·L·attention in each layer for the mean of its L causal predecessors;
    ``passes`` counts forward passes, of which a backward pass is two.
    """
    lengths = [rollout.prompt + rollout.response for group in groups for rollout in group.rollouts]
    weighted = sum(length * length for length in lengths) / sum(lengths)

    def of_token(length: float) -> float:
        return passes * (2 * shape.active + 2 * length * shape.attention * shape.layers)

    return of_token(weighted), of_token(max(lengths))


def training_share(shape: Shape) -> float:
    """MFU that is assumed."""
    return EXPERTS_TRAINING_SHARE if shape.experts else TRAINING_SHARE


def trainer_cost(
    shape: Shape, gpu: Gpu, ranks: int, groups: Groups, recompute: bool, sequence_parallel: int = 1
) -> TrainerCost:
    """Ranks that share the batch. One sequence is trained by ``sequence_parallel`` of them, which is the floor."""
    of_mean, of_longest = training_flops(shape, groups, 4.0 if recompute else 3.0)
    rate = gpu.flops * training_share(shape)
    return TrainerCost(
        per_step_s=UPDATE_S,
        per_token_s=of_mean / (ranks * rate),
        longest_token_s=of_longest / (sequence_parallel * rate),
    )


def publish_cost(shape: Shape, ranks: int, gpus: int) -> PublishCost:
    """Every rank writes its shard; every engine's GPU loads its part of the weights."""
    nbytes = NUMBER_BYTES * shape.parameters
    stall_s = nbytes / (gpus * LOAD_RATE)
    return PublishCost(nbytes / (ranks * WRITE_RATE), stall_s, stall_s)


def costs(
    shape: Shape,
    gpu: Gpu,
    split: tuple[int, int],
    groups: Groups,
    kv_tokens: int | None = None,
    recompute: bool = False,
    sequence_parallel: int = 1,
) -> Costs:
    """All costs of a run; ``split``: GPUs of an engine, and trainer ranks."""
    gpus, ranks = split
    return Costs(
        engine_cost(shape, gpu, gpus, kv_tokens),
        trainer_cost(shape, gpu, ranks, groups, recompute, sequence_parallel),
        publish_cost(shape, ranks, gpus),
        Overheads(0.02, 0.1, 0.1),
    )


def guesses(name: str, shape: Shape) -> Sequence[str]:
    """What is not measured, in sentences."""
    return (
        f"nothing is measured: speeds follow from the data sheet of {name} ({BANDWIDTH_SHARE:.0%} of its bandwidth, "
        f"{training_share(shape):.0%} of its arithmetic rate in training), and may be off by half",
    )
