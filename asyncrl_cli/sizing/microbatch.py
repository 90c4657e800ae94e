"""Chooses `trainer.tokens_per_microbatch: auto` and `trainer.gradient_checkpointing: auto` from the memory estimate.

Invariants: the estimate of the chosen micro-batch stays below ``WARNING_SHARE`` of the GPU, unless not even the longest
rollout fits; and more memory never gives fewer tokens. So recomputed micro-batches have at most the tokens that would
end recomputation.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncrl_cli.sizing.estimate import WARNING_SHARE, rank_gpu
from asyncrl_cli.sizing.host import host_kinds
from asyncrl_cli.sizing.model import SizedModel
from asyncrl_cli.spec.sections import ExperimentSpec, TrainerSpec

MAX_TOKENS = 2**16
"""Most tokens of a rank. Even a model with 0.4 billion weights keeps a large GPU busy with fewer."""
USEFUL_TOKENS, USEFUL_GATHERED_TOKENS, USEFUL_REMOTE_TOKENS = 2**13, 2**14, 2**15
"""Tokens of a rank from which on a micro-batch is worth more than the third of a step that recomputation costs. The
second for ZeRO-3 over several ranks: each micro-batch gathers all layers, and its products must hide that. The third
for ranks on several hosts, because their gathers take longer."""


class Microbatch(NamedTuple):
    tokens: int  # trainer.tokens_per_microbatch
    recompute: bool  # trainer.gradient_checkpointing

    def applied(self, spec: ExperimentSpec) -> ExperimentSpec:
        """Return the spec with these values."""
        values = {"tokens_per_microbatch": self.tokens, "gradient_checkpointing": self.recompute}
        return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=values)})


def is_auto(trainer: TrainerSpec) -> bool:
    """True if a start has to choose a value."""
    return "auto" in (trainer.tokens_per_microbatch, trainer.gradient_checkpointing)


def cautious_microbatch(spec: ExperimentSpec) -> Microbatch:
    """Return the values of a run without an estimate: on GPUs recomputation, on CPUs the defaults of CPUs."""
    trainer = spec.trainer
    tokens, recompute = trainer.tokens_per_microbatch, trainer.gradient_checkpointing
    useful_tokens = max(_longest_row(spec), USEFUL_TOKENS * trainer.sequence_parallel)
    return Microbatch(
        (useful_tokens if trainer.gpus_per_rank else USEFUL_TOKENS) if tokens == "auto" else tokens,
        bool(trainer.gpus_per_rank) if recompute == "auto" else recompute,
    )


def choose_microbatch(spec: ExperimentSpec, model: SizedModel, gpu_bytes: int | None) -> Microbatch:
    """Choose the values that are `auto` for GPUs of ``gpu_bytes``; for None as ``cautious_microbatch``.

    Recomputes only if a useful micro-batch does not fit otherwise. Then takes the largest power of two that fits, and
    at least the longest rollout, because a row is never divided. Raises like ``activation_bytes``.
    """
    trainer = spec.trainer
    if gpu_bytes is None or not trainer.gpus_per_rank:
        return cautious_microbatch(spec)

    def fits(microbatch: Microbatch) -> bool:
        device = rank_gpu(microbatch.applied(spec), model, gpu_bytes)
        return device.capacity is not None and device.total <= WARNING_SHARE * device.capacity

    fixed_tokens, recompute = trainer.tokens_per_microbatch, trainer.gradient_checkpointing
    choices = (False, True) if recompute == "auto" else (recompute,)
    if fixed_tokens != "auto":
        return Microbatch(fixed_tokens, next(filter(lambda c: fits(Microbatch(fixed_tokens, c)), choices), choices[-1]))
    smallest = _longest_row(spec)
    useful = max(smallest, _useful_tokens(spec) * trainer.sequence_parallel)
    for choice in choices:
        if fits(best := Microbatch(useful, choice)):
            # With a free choice, recomputation ends at ``useful``: see the module's second invariant.
            limit = useful if choice and recompute == "auto" else MAX_TOKENS * trainer.sequence_parallel
            while (larger := 2 ** best.tokens.bit_length()) <= limit and fits(Microbatch(larger, choice)):
                best = Microbatch(larger, choice)
            return best
    tokens = useful
    while (tokens := 2 ** ((tokens - 1).bit_length() - 1)) > smallest:
        if fits(Microbatch(tokens, choices[-1])):
            return Microbatch(tokens, choices[-1])
    return Microbatch(smallest, choices[-1])


def _useful_tokens(spec: ExperimentSpec) -> int:
    if spec.trainer.zero_stage < 3 or spec.trainer.ranks == 1:
        return USEFUL_TOKENS
    is_remote = any(host.ranks and host.host_count > 1 for host in host_kinds(spec))
    return USEFUL_REMOTE_TOKENS if is_remote else USEFUL_GATHERED_TOKENS


def _longest_row(spec: ExperimentSpec) -> int:
    return min(spec.model.max_length, spec.rollout.longest_rollout)
