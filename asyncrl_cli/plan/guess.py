"""Guesses costs from data sheets if nothing was measured. docs/planning.md has their errors.

Symbols: p GPUs of an engine, n sequences that it runs, N parameters that a token uses, W(n) parameters that a batch of
n tokens reads. Rates are per GPU, in bf16 without sparsity. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl_cli.plan.costs import Costs, EngineCost, Overheads, PublishCost, TrainerCost
from asyncrl_cli.plan.lengths import Groups
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.spec.sections import ExperimentSpec, shares_prefixes
from asyncrl_cli.spec.sharing import tensor_parallel
from asyncrl_cli.train.flops import Amounts, Gpu, chosen

NUMBER_BYTES = 2
"""Bytes of a weight in bf16."""
SCHEDULER_S = 3e-3
"""Seconds per iteration for scheduling, sampling and answers, whatever the number of sequences."""
PER_SEQUENCE_S = 10e-6
"""Seconds that the scheduler and the sampler add for each sequence of an iteration."""
LAYER_S = 40e-6
"""Seconds to start a layer's kernels from CUDA graphs."""
HOST_GPUS = 8
"""GPUs per host in usual servers."""
ALL_REDUCE_S, ACROSS_HOSTS_S = 12e-6, 60e-6
"""Seconds of a small all-reduce within a host, and between hosts. A layer has two."""
BANDWIDTH_SHARE = 0.7
"""Share of a GPU's memory bandwidth that decoding reaches."""
DECODING_SHARE, PREFILL_SHARE = 0.5, 0.4
"""Shares of a GPU's arithmetic rate that decoding and prefill reach."""
TRAINING_SHARE, EXPERTS_TRAINING_SHARE = 0.4, 0.2
"""Shares of a GPU's arithmetic rate that training reaches (MFU): for dense models, and for mixtures of experts."""
UPDATE_S = 1.0
"""Seconds per step for the optimizer's update and other work that does not grow with the tokens."""
WRITE_RATE, LOAD_RATE = 5e9, 20e9
"""Bytes per second at which a rank writes its shard for the engines, and a GPU loads its part of the weights."""
OVERHEADS = Overheads(start_s=0.02, settle_s=0.1, step_s=0.1)


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that determine a model's speed."""

    parameters: float
    active: float  # weights that a token uses, without the input embeddings
    layers: int
    attention: int  # query heads · head width in one layer; the cost of contexts is proportional to it
    cache_bytes: float  # bytes of a token's keys and values in all layers
    experts: float = 0.0  # weights of all routed experts; 0 in a dense model
    chosen: float = 1.0  # share of the routed experts that a token uses

    def read(self, tokens: int) -> float:
        """Return the number of weights that an iteration reads: dense weights, and experts chosen by any token."""
        return self.active - self.experts * self.chosen + self.experts * (1 - (1 - self.chosen) ** tokens)


@dataclass(frozen=True, slots=True)
class DataSheetIteration:
    """Seconds of a decode iteration without contexts: fixed work, plus the longer of reading weights and computing."""

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
    """Guess the cost of an engine with ``gpus`` GPUs."""
    return EngineCost(
        DataSheetIteration(shape, gpu, gpus),
        per_context_token_s=shape.cache_bytes / (gpus * gpu.bandwidth * BANDWIDTH_SHARE),
        prefill_s=2 * shape.active / (gpus * gpu.flops * PREFILL_SHARE),
        kv_tokens=kv_tokens,
    )


def training_flops(shape: Shape, groups: Groups, passes: float, shares: bool) -> tuple[float, float]:
    """Return the floating-point operations per token: the mean for these rollouts, and for the longest rollout.

    A forward pass takes 2·N per token, and in each layer 2·L·attention for the mean of its L causal predecessors.
    ``passes`` counts forward passes; a backward pass counts as two. ``shares``: a group's prompt is computed once.
    """
    lengths = [rollout.prompt + rollout.response for group in groups for rollout in group.rollouts]
    known = [rollout.prompt for group in groups for rollout in group.rollouts[1:] if shares]
    forward = Amounts(tokens=2 * shape.active, pairs=4 * shape.attention * shape.layers)

    def squares(numbers: list[int]) -> int:
        return sum(number * number for number in numbers)

    computed = Amounts(tokens=sum(lengths) - sum(known), pairs=(squares(lengths) - squares(known)) / 2)
    longest = Amounts(tokens=1, pairs=max(lengths) / 2)
    return passes * forward.times(computed) / sum(lengths), passes * forward.times(longest)


def training_share(shape: Shape) -> float:
    """Return the assumed MFU of a model."""
    return EXPERTS_TRAINING_SHARE if shape.experts else TRAINING_SHARE


def trainer_cost(
    shape: Shape,
    gpu: Gpu,
    ranks: int,
    *,
    groups: Groups,
    recompute: bool,
    sequence_parallel: int = 1,
    shares: bool = False,
) -> TrainerCost:
    """Guess the cost of ranks that share the batch.

    A step takes at least as long as its longest sequence, which only ``sequence_parallel`` ranks train. ``shares``: as
    in ``training_flops``.
    """
    of_mean, of_longest = training_flops(shape, groups, 4.0 if recompute else 3.0, shares)
    rate = gpu.flops * training_share(shape)
    return TrainerCost(
        per_step_s=UPDATE_S,
        per_token_s=of_mean / (ranks * rate),
        longest_token_s=of_longest / (sequence_parallel * rate),
    )


def publish_cost(shape: Shape, ranks: int, gpus: int) -> PublishCost:
    """Guess the cost of a publish: every rank writes its shard, and every GPU of an engine loads its part."""
    nbytes = NUMBER_BYTES * shape.parameters
    stall_s = nbytes / (gpus * LOAD_RATE)
    return PublishCost(nbytes / (ranks * WRITE_RATE), stall_s, stall_s)


def guessed_costs(spec: ExperimentSpec, shape: Shape, gpu: Gpu, *, groups: Groups, kv_tokens: int | None) -> Costs:
    """Guess the costs of a spec. ``kv_tokens``: tokens that fit into an engine's cache; None if not known."""
    trainer, engine_gpus = spec.trainer, tensor_parallel(spec)
    return Costs(
        engine=engine_cost(shape, gpu=gpu, gpus=engine_gpus, kv_tokens=kv_tokens),
        trainer=trainer_cost(
            shape,
            gpu,
            trainer.ranks,
            groups=groups,
            recompute=trainer.gradient_checkpointing,
            sequence_parallel=trainer.sequence_parallel,
            shares=shares_prefixes(spec),
        ),
        publish=publish_cost(shape, trainer.ranks, engine_gpus),
        overheads=OVERHEADS,
    )


def guesses(name: str, shape: Shape) -> str:
    """Warn that nothing is measured. ``name``: the GPU's name."""
    return (
        f"nothing is measured: speeds follow from the data sheet of {name} ({BANDWIDTH_SHARE:.0%} of its bandwidth, "
        f"{training_share(shape):.0%} of its arithmetic rate in training), and may be off by half"
    )


def shape_of(model: SizedModel, config: Any) -> Shape:
    """Return the shape of a causal language model, from its sizes and its transformers config.

    Shared experts count as dense.
    """
    text = config.get_text_config()
    layers = len(model.layers)
    heads = int(getattr(text, "num_attention_heads", 1))
    width = int(getattr(text, "head_dim", None) or model.hidden // heads)
    used = chosen(text)
    routed = float(sum(model.experts)) if used < 1 else 0.0
    # Every token uses the matrix of a tied head. Untied input embeddings are only looked up.
    looked_up = model.embeddings if model.head else 0
    return Shape(
        parameters=float(model.parameters),
        active=model.parameters - looked_up - routed * (1 - used),
        layers=layers,
        attention=heads * width,
        cache_bytes=float(NUMBER_BYTES * (model.cache_numbers or 0)),
        experts=routed,
        chosen=used,
    )
