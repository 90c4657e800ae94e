"""Computes what a step needs before its first update: old log-probs, values, and from them and the rewards advantages.

Nothing here has a gradient. Forward passes are made only where something needs them: the reference's for a KL penalty,
the policy's for a penalty in the reward and, where a step has several updates, for their ratio; the critic's where
there is one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.train.algorithms.advantages import (
    Moments,
    check_advantages,
    gae,
    last_token_rewards,
    rewards_to_go,
    whiten,
)
from asyncrl_cli.train.algorithms.objective import Objective
from asyncrl_cli.train.algorithms.reduced_sums import reduce_over_ranks, sum_over_ranks
from asyncrl_cli.train.packing import PaddedRows, TrainingRow


@dataclass(slots=True, eq=False)
class Precomputed:
    """What is known of a micro-batch before the first update; [rows, tokens], float32, without gradient."""

    old_logprobs: Tensor | None  # under the weights at the start of the step; None: not computed
    reference_logprobs: Tensor | None  # None without a reference
    advantages: Tensor  # 0 outside the mask
    values: Tensor | None = None  # the critic's at the start of the step; None without a critic
    returns: Tensor | None = None  # what the critic learns; None without a critic


@dataclass(slots=True, eq=False)
class Minibatch:
    """The rows of one optimizer update, over all ranks, and this rank's share of them. ``precompute`` fills in
    ``precomputed``, one for each micro-batch."""

    rows: list[TrainingRow]
    microbatches: list[PaddedRows]
    precomputed: list[Precomputed] = field(default_factory=list)


def precompute(
    objective: Objective,
    engine: Any,
    reference: Any | None,
    critic: Any | None,
    minibatches: Sequence[Minibatch],
    rewards: Tensor,
    keep_old_logprobs: bool,
    epochs: int = 1,
    group: Any = None,
) -> None:
    """Fill in what every micro-batch of the step needs before its update; collective over the ranks.

    ``engine`` is the policy at the start of the step, ``reference`` is for a KL penalty, ``critic`` for ``gae``.
    ``rewards``: float64 [groups, group_size], of all rollouts of the step. ``keep_old_logprobs``: whether updates after
    the first one need log-probs under the weights at the start of the step. The first one computes its own, so its
    minibatch needs them only if it is trained again (``epochs``). ``group``: the process group whose ranks together
    have all rows; None: all ranks. Raises ``ValueError`` when a user's function returned something else than
    advantages.
    """
    algorithm = objective.algorithm
    in_reward = reference is not None and algorithm.kl_placement == "reward"
    first = next((minibatch for minibatch in minibatches if minibatch.rows), None) if epochs == 1 else None
    rows: list[PaddedRows] = []
    results: list[Precomputed] = []
    penalties: list[Tensor] = []
    with torch.no_grad():
        for minibatch in minibatches:
            # A minibatch is empty on all ranks or on none, and has as many micro-batches on each. Under ZeRO-3 every
            # pass below gathers weights from all ranks: the three come in this order on each of them.
            for padded in minibatch.microbatches if minibatch.rows else ():
                inputs = (padded.input_ids, padded.response_mask)
                keeps = keep_old_logprobs and minibatch is not first
                old = engine(*inputs, **padded.replayed) if in_reward or keeps else None
                at_reference = None if reference is None else reference(*inputs, **padded.replayed)
                values = None if critic is None else critic(*inputs)
                zeros = torch.zeros_like(padded.behaviour_logprobs)
                minibatch.precomputed.append(Precomputed(old, at_reference, zeros, values))
                rows.append(padded)
                if in_reward:
                    kl = objective.kl(old, at_reference)  # type: ignore[arg-type]
                    penalties.append(algorithm.kl_coef * kl.masked_fill(~padded.response_mask, 0.0))
            results += minibatch.precomputed
        rewards = rewards.to(engine.device)
        if objective.advantage is None:
            _by_token(objective, rows, results, rewards, penalties)
        else:
            _by_rollout(objective, rows, results, rewards, penalties, group)
        # ``rows`` is empty on all ranks or on none, so all of them reach the collective call in it.
        if algorithm.whiten_advantages and rows:
            _whiten(rows, results, engine.device, group)


def _by_rollout(
    objective: Objective,
    rows: list[PaddedRows],
    results: list[Precomputed],
    rewards: Tensor,
    penalties: list[Tensor],
    group: Any,
) -> None:
    """Every token has its rollout's advantage; a penalty in the reward is summed over the rollout first."""
    if penalties:
        of_rollouts = torch.zeros_like(rewards).flatten()
        for padded, penalty in zip(rows, penalties, strict=True):
            of_rollouts.index_add_(0, padded.rollouts, penalty.sum(dim=1))
        # A group's rollouts are on several ranks: its baseline needs the penalties of all of them.
        rewards = rewards - sum_over_ranks(of_rollouts, group).view_as(rewards)
    assert objective.advantage is not None
    advantages = check_advantages(objective.advantage(rewards), rewards).flatten().float()
    for padded, one in zip(rows, results, strict=True):
        one.advantages = advantages[padded.rollouts][:, None] * padded.response_mask


def _by_token(
    objective: Objective, rows: list[PaddedRows], results: list[Precomputed], rewards: Tensor, penalties: list[Tensor]
) -> None:
    """Every row is an episode: its rollout's reward at its last token, penalties where they arise."""
    algorithm = objective.algorithm
    for index, (padded, one) in enumerate(zip(rows, results, strict=True)):
        mask = padded.response_mask
        token_rewards = last_token_rewards(rewards.flatten()[padded.rollouts].float(), mask)
        if penalties:
            token_rewards = token_rewards - penalties[index].float()
        if one.values is None:
            one.advantages = rewards_to_go(token_rewards, mask, algorithm.gamma)
        else:
            one.advantages, one.returns = gae(token_rewards, one.values, mask, algorithm.gamma, algorithm.gae_lambda)


def _whiten(rows: list[PaddedRows], results: list[Precomputed], device: torch.device, group: Any) -> None:
    """By the moments of all tokens of the step; collective."""
    moments = (Moments.of(one.advantages, padded.response_mask) for padded, one in zip(rows, results, strict=True))
    of_step = reduce_over_ranks(reduce(operator.add, moments), device, group)
    for padded, one in zip(rows, results, strict=True):
        one.advantages = whiten(one.advantages, padded.response_mask, of_step)
