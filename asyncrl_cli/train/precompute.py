"""Computes a step's inputs before its first update: old log-probs, values, and with the rewards the advantages.

Nothing here has a gradient. Forward passes are made only if needed: the reference's for a KL penalty, the policy's for
a penalty in the reward and for the ratio if a step has several updates, and the critic's if there is one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.spec.algorithm import AlgorithmSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.algorithms.advantages import (
    BASELINES_OF_TURNS,
    Moments,
    advantages_of_parts,
    gae,
    of_scored,
    rewards_at_turn_ends,
    rewards_to_go,
    turn_advantages,
    whiten,
)
from asyncrl_cli.train.algorithms.objective import Objective
from asyncrl_cli.train.algorithms.reduced_sums import reduce_over_ranks, sum_over_ranks
from asyncrl_cli.train.model.images import Vision
from asyncrl_cli.train.model.sequence_parallel import data_group
from asyncrl_cli.train.nonfinite_guard import SkipLimit
from asyncrl_cli.train.packing import PaddedRows, TrainingRow
from asyncrl_cli.train.prefix_trees import PrefixTree
from asyncrl_cli.train.step_rewards import StepRewards


@dataclass(slots=True, eq=False)
class Learner:
    """The parts that a rank trains with."""

    spec: ExperimentSpec
    rank: int
    objective: Objective
    engine: Any  # DeepSpeed's, around a ``Policy``
    limit: SkipLimit
    reference: Any | None = None  # called as a ``Policy``; None without a KL penalty
    critic: Any | None = None  # DeepSpeed's engine around a ``ValueModel``; None unless it estimates advantages
    vision: Vision | None = None  # None: the policy sees no images
    finished_microbatches: int = 0  # in all steps, counted anew in each phase of a step


@dataclass(slots=True, eq=False)
class Precomputed:
    """A micro-batch's values from before the first update; [rows, tokens], float32, without gradient."""

    old_logprobs: Tensor | None  # under the weights at the start of the step; None: not computed
    reference_logprobs: Tensor | None  # None without a reference
    advantages: Tensor  # 0 outside the mask
    values: Tensor | None  # the critic's at the start of the step; None without a critic
    penalties: Tensor | None  # in the reward, float64; None: it has none
    returns: Tensor | None = None  # the critic's targets; None without a critic


@dataclass(slots=True, eq=False)
class Minibatch:
    """One optimizer update's rows and trees, over all ranks, and this rank's micro-batches. ``precompute`` fills in
    ``precomputed``, one for each micro-batch."""

    rows: list[TrainingRow]
    trees: list[PrefixTree]
    microbatches: list[PaddedRows]
    precomputed: list[Precomputed] = field(default_factory=list)


Microbatches = list[tuple[PaddedRows, Precomputed]]
"""This rank's micro-batches of a step."""


def precompute(
    learner: Learner, minibatches: Sequence[Minibatch], rewards: StepRewards, keep_old_logprobs: bool
) -> None:
    """Fill in ``precomputed`` for all minibatches of the step; collective over the ranks.

    ``keep_old_logprobs``: updates after the first need log-probs under the weights at the start of the step. The first
    update computes its own, so its minibatch needs them only if it is trained again (``epochs``). Raises ``ValueError``
    when a user's function returned something other than advantages.
    """
    engine, reference, critic = learner.engine, learner.reference, learner.critic
    algorithm, trainer = learner.objective.algorithm, learner.spec.trainer
    in_reward = reference is not None and algorithm.kl_placement == "reward"
    first_minibatch = (
        next((minibatch for minibatch in minibatches if minibatch.rows), None) if trainer.epochs == 1 else None
    )
    microbatches: Microbatches = []
    with torch.no_grad():
        for minibatch in minibatches:
            # A minibatch is empty on all ranks or on none, and has the same number of micro-batches on each. Under
            # ZeRO-3 every pass below gathers weights from all ranks, so all ranks make the passes in this order.
            for microbatch in minibatch.microbatches if minibatch.rows else ():
                inputs = (microbatch.input_ids, microbatch.response_mask)
                keeps = keep_old_logprobs and minibatch is not first_minibatch
                old_logprobs = engine(*inputs, **microbatch.policy_arguments) if in_reward or keeps else None
                at_reference = None if reference is None else reference(*inputs, **microbatch.policy_arguments)
                penalties = None
                if in_reward:
                    kl = learner.objective.kl(old_logprobs, at_reference)  # type: ignore[arg-type]
                    penalties = algorithm.kl_coef * kl.masked_fill(~microbatch.response_mask, 0.0)
                precomputed = Precomputed(
                    old_logprobs=old_logprobs,
                    reference_logprobs=at_reference,
                    advantages=torch.zeros_like(microbatch.behaviour_logprobs),
                    values=None if critic is None else critic(*inputs, **microbatch.model_arguments),
                    penalties=penalties,
                )
                minibatch.precomputed.append(precomputed)
                microbatches.append((microbatch, precomputed))
                learner.finished_microbatches += 1
        group = data_group(trainer)
        if learner.objective.advantage is None:
            _by_token(algorithm, microbatches, rewards)
        else:
            _by_rollout(learner.objective, microbatches=microbatches, rewards=rewards, group=group)
        # Collective: ``microbatches`` is empty on all ranks or on none.
        if algorithm.whiten_advantages and microbatches:
            local_moments = (
                Moments.of(values.advantages, microbatch.response_mask) for microbatch, values in microbatches
            )
            of_step = reduce_over_ranks(reduce(operator.add, local_moments), engine.device, group)
            for microbatch, values in microbatches:
                values.advantages = whiten(values.advantages, microbatch.response_mask, of_step)


def _by_rollout(objective: Objective, microbatches: Microbatches, rewards: StepRewards, group: Any) -> None:
    """Give every token its rollout's or turn's advantage. A penalty in the reward is first summed over the tokens."""
    penalties = torch.zeros_like(rewards.turns)
    if any(precomputed.penalties is not None for _, precomputed in microbatches):
        of_turns = penalties.flatten(0, 1).to(microbatches[0][1].advantages.device)
        for microbatch, precomputed in microbatches:
            assert precomputed.penalties is not None
            for turn in range(of_turns.shape[1]):  # row by row: single tokens would be added in no fixed order
                of_rows = precomputed.penalties.masked_fill(microbatch.turns != turn, 0.0).sum(dim=1)
                of_turns[:, turn].index_add_(0, microbatch.rollouts, of_rows)
        # A group's rollouts are on several ranks, and its baseline needs all their penalties.
        penalties = sum_over_ranks(of_turns, group).cpu().view_as(penalties)
    advantages = _advantages(objective, rewards, penalties).flatten(0, 1).float()
    for microbatch, precomputed in microbatches:
        at_tokens = advantages.to(microbatch.turns.device)[microbatch.rollouts[:, None], microbatch.turns]
        precomputed.advantages = at_tokens * microbatch.response_mask


def _advantages(objective: Objective, rewards: StepRewards, penalties: Tensor) -> Tensor:
    """[groups, group_size, turns], like the ``penalties``, which are subtracted from the rewards."""
    algorithm = objective.algorithm
    assert objective.advantage is not None
    if algorithm.advantage in BASELINES_OF_TURNS:
        return turn_advantages(rewards.turns - penalties, algorithm.gamma, objective.advantage)
    if algorithm.parts_apart:
        of_rollouts = advantages_of_parts(rewards.reward_parts, list(algorithm.reward_parts.values()))
    else:
        optional_inputs = {"lengths": rewards.lengths, "metrics": rewards.metrics, "baseline": rewards.baseline}
        requested_inputs = {name: optional_inputs[name] for name in objective.asks}
        of_rollouts = of_scored(objective.advantage, rewards.rollouts - penalties.sum(dim=2), requested_inputs)
    return of_rollouts[..., None].expand(penalties.shape)


def _by_token(algorithm: AlgorithmSpec, microbatches: Microbatches, rewards: StepRewards) -> None:
    """Treat every row as an episode: turns are rewarded at their last tokens, penalties apply at their own tokens."""
    turns = rewards.turns.flatten(0, 1)
    for microbatch, precomputed in microbatches:
        mask = microbatch.response_mask
        token_rewards = rewards_at_turn_ends(turns.to(mask.device)[microbatch.rollouts], microbatch.turns, mask).float()
        if precomputed.penalties is not None:
            token_rewards = token_rewards - precomputed.penalties.float()
        if precomputed.values is None:
            precomputed.advantages = rewards_to_go(token_rewards, mask, algorithm.gamma)
        else:
            precomputed.advantages, precomputed.returns = gae(
                token_rewards, precomputed.values, mask, gamma=algorithm.gamma, lam=algorithm.gae_lambda
            )
