"""One optimizer update of the policy, or of the critic, from a minibatch with known advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl_cli.spec.algorithm import CorrectionSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train import nonfinite_guard
from asyncrl_cli.train.algorithms.corrections import CorrectionSums, correct
from asyncrl_cli.train.algorithms.policy_loss import LossInputs, LossSums, policy_loss
from asyncrl_cli.train.algorithms.reduced_sums import ReducedSums, reduce_over_ranks
from asyncrl_cli.train.algorithms.value_loss import ValueSums, value_loss
from asyncrl_cli.train.deepspeed_engine import set_learning_rate
from asyncrl_cli.train.model.sequence_parallel import data_group
from asyncrl_cli.train.packing import PaddedRows, count_tokens
from asyncrl_cli.train.precompute import Learner, Minibatch

UNCORRECTED = CorrectionSpec(preset="decoupled")
"""Gives weights of 1; only the statistics are used."""
ROUNDING_NATS = 1e-3
"""A larger difference between trainer and engine in float32 is not rounding. Sound runs have at most 5e-5."""


@dataclass(frozen=True, slots=True)
class UpdateSums(ReducedSums):
    """Sums over the micro-batches of a step's updates."""

    loss: Tensor
    losses: LossSums
    corrections: CorrectionSums
    engine_gap: CorrectionSums

    def summary(self, losses: float) -> dict[str, float]:
        """Return metrics. ``losses``: number of losses summed in ``loss``.

        The engine's gap is omitted when no token could be compared.
        """
        gap = self.engine_gap.summary() if self.engine_gap.tokens.item() else {}
        return {
            "train/loss": self.loss.item() / losses,
            **{f"train/{name}": value for name, value in self.losses.summary().items()},
            **{f"correction/{name}": value for name, value in self.corrections.summary().items()},
            **{f"engine/{name}": gap[name] for name in ("logprob_gap_mean", "logprob_gap_max") if name in gap},
        }


def update_policy(
    learner: Learner, minibatch: Minibatch, is_first: bool
) -> tuple[nonfinite_guard.UpdateResult, UpdateSums]:
    """Forward, backward and one optimizer step over a minibatch; collective. An update that is not finite is skipped.

    ``is_first``: the weights have not changed since the start of the step, so the log-probs computed here are also the
    old log-probs.
    """
    engine, objective, spec = learner.engine, learner.objective, learner.spec
    algorithm = objective.algorithm
    # The whole minibatch's: micro-batches add up to its mean. Divided by the ranks because DeepSpeed averages gradients
    # over them, with sequence parallelism, too: there a rank has its group's loss, and a part of the gradient.
    denominator = _denominator(spec, minibatch) / spec.trainer.ranks
    total: UpdateSums | None = None
    for index, (microbatch, precomputed) in enumerate(zip(minibatch.microbatches, minibatch.precomputed, strict=True)):
        # At the boundary DeepSpeed reduces gradients over the ranks. All have as many micro-batches (packing.py).
        engine.set_gradient_accumulation_boundary(index == len(minibatch.microbatches) - 1)
        mask = microbatch.response_mask
        entropy_mode = "train" if algorithm.entropy_coef else "measure"
        logprobs, entropies = engine(microbatch.input_ids, mask, entropy_mode, **microbatch.policy_arguments)
        old_logprobs = logprobs.detach() if is_first else precomputed.old_logprobs
        corrected = _corrected(spec, microbatch, old_logprobs, current_logprobs=logprobs.detach())
        inputs = LossInputs(
            logprobs,
            proximal_logprobs=corrected.proximal_logprobs,
            advantages=precomputed.advantages,
            mask=mask,
            importance_weights=corrected.weights,
            reference_logprobs=precomputed.reference_logprobs,
            entropies=entropies,
        )
        loss, losses = policy_loss(inputs, algorithm, denominator, loss=objective.loss, kl=objective.kl)
        # Even if none of this rank's tokens counts: the other ranks wait in the collective calls of this pass.
        nonfinite_guard.backward(engine, loss)
        sums = UpdateSums(loss.detach().double(), losses, corrected.sums, corrected.engine_gap)
        total = sums if total is None else total + sums
        learner.finished_microbatches += 1
    assert total is not None
    return nonfinite_guard.step(engine), total


def update_critic(learner: Learner, minibatch: Minibatch, factor: float) -> dict[str, float]:
    """Make one optimizer step of the critic at ``factor`` times its learning rate; returns metrics. Collective."""
    critic, spec = learner.critic, learner.spec
    assert critic is not None
    settings = spec.algorithm.critic
    set_learning_rate(critic, settings.learning_rate * factor)
    total: ValueSums | None = None
    for index, (microbatch, precomputed) in enumerate(zip(minibatch.microbatches, minibatch.precomputed, strict=True)):
        critic.set_gradient_accumulation_boundary(index == len(minibatch.microbatches) - 1)
        assert precomputed.values is not None and precomputed.returns is not None
        loss, sums = value_loss(
            critic(microbatch.input_ids, microbatch.response_mask, **microbatch.model_arguments),
            old_values=precomputed.values,
            returns=precomputed.returns,
            mask=microbatch.response_mask,
            clip=settings.value_clip,
            denominator=count_tokens(minibatch.rows) / spec.trainer.ranks,
        )
        nonfinite_guard.backward(critic, loss)
        total = sums if total is None else total + sums
        learner.finished_microbatches += 1
    learner.limit.note(nonfinite_guard.step(critic), "algorithm.critic.learning_rate")
    assert total is not None
    of_update = reduce_over_ranks(total, critic.device, data_group(spec.trainer))
    return {f"critic/{name}": value for name, value in of_update.summary().items()}


def _denominator(spec: ExperimentSpec, minibatch: Minibatch) -> float:
    algorithm = spec.algorithm
    if algorithm.aggregation == "token_mean":
        return count_tokens(minibatch.rows)
    if algorithm.aggregation == "sequence_mean":
        return len(minibatch.rows)
    return len(minibatch.rows) * (algorithm.sequence_divisor or spec.rollout.max_response_tokens)


class _Corrected(NamedTuple):
    proximal_logprobs: Tensor
    weights: Tensor
    sums: CorrectionSums
    engine_gap: CorrectionSums  # of the engine's numerics alone


def _corrected(
    spec: ExperimentSpec, microbatch: PaddedRows, old_logprobs: Tensor | None, current_logprobs: Tensor
) -> _Corrected:
    """Compute a micro-batch's importance weights.

    In float32 trainer and engine agree to about 1e-5 on a token of the version being trained, and the engine's last
    bits depend on how it happened to batch. There the trainer's own log-prob replaces the engine's: the weight is
    exactly 1, and a run is reproducible to the bit (decision 0004). A difference above ``ROUNDING_NATS`` means that
    something is wrong, and the recorded log-prob counts.
    """
    mask, behaviour, correction = microbatch.response_mask, microbatch.behaviour_logprobs, spec.algorithm.correction
    # Without log-probs from the step's start, a difference could come from the updates as well as from the engine.
    comparable = microbatch.on_policy if old_logprobs is not None else torch.zeros_like(mask)
    trainer = current_logprobs if old_logprobs is None else old_logprobs
    _, engine_gap = correct(trainer, behaviour_logprobs=behaviour, mask=mask & comparable, correction=UNCORRECTED)
    if spec.trainer.dtype == spec.rollout.dtype == "float32":
        rounding = comparable & ((trainer - behaviour).abs() <= ROUNDING_NATS)
        behaviour = torch.where(rounding, trainer, behaviour)
    at_behaviour = correction.proximal == "behaviour"
    compared = current_logprobs if at_behaviour else trainer
    weights, corrections = correct(compared, behaviour_logprobs=behaviour, mask=mask, correction=correction)
    return _Corrected(behaviour if at_behaviour else trainer, weights, corrections, engine_gap)
