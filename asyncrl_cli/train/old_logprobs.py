"""What a step knows before its first update: log-probs, values and, from them and the rewards, advantages.

Nothing here has a gradient. Forward passes are made only where something asks for them: the reference's for a KL
penalty, the policy's for a penalty in the reward and, where a step has several updates, for their ratio; the critic's
where there is one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.train.algorithms.advantages import check_advantages
from asyncrl_cli.train.algorithms.objective import Objective
from asyncrl_cli.train.algorithms.reduced_sums import add_over_ranks, over_ranks
from asyncrl_cli.train.algorithms.returns import Moments, gae, last_token_rewards, rewards_to_go, whiten
from asyncrl_cli.train.model.critic import Critic
from asyncrl_cli.train.packing import PaddedRows, TrainingRow


@dataclass(slots=True, eq=False)
class Known:
    """What is known of a micro-batch; matrices are [rows, tokens], float32, without gradient.

    Args:
        start: log-probs under the weights at the start of the step. None: not computed.
        reference: log-probs under the reference. None without one.
        advantages: 0 outside the mask.
        values: the critic's at the start of the step. None without one.
        returns: what the critic learns. None without one.
    """

    start: Tensor | None
    reference: Tensor | None
    advantages: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None


@dataclass(slots=True, eq=False)
class Minibatch:
    """The rows of one optimizer update, over all ranks, and this rank's share of them. ``estimate`` fills in ``known``,
    one for each micro-batch."""

    rows: list[TrainingRow]
    microbatches: list[PaddedRows]
    known: list[Known] = field(default_factory=list)


def estimate(
    objective: Objective,
    engine: Any,
    reference: Any | None,
    critic: Critic | None,
    minibatches: Sequence[Minibatch],
    rewards: Tensor,
    keep_start: bool,
) -> None:
    """Fill in what is known of every micro-batch; collective over the ranks.

    Args:
        objective: the algorithm.
        engine: the policy at the start of the step.
        reference: for the KL penalty.
        critic: for ``gae``.
        minibatches: of the step.
        rewards: float64 [groups, group_size], of all rollouts of the step.
        keep_start: whether log-probs at the start of the step are needed after its first update.

    Raises:
        ValueError: a user's estimator returned something else than advantages.
    """
    algorithm = objective.algorithm
    in_reward = reference is not None and algorithm.kl_placement == "reward"
    needs_start = in_reward or keep_start
    rows: list[PaddedRows] = []
    known: list[Known] = []
    penalties: list[Tensor] = []
    with torch.no_grad():
        for minibatch in minibatches:
            for padded in minibatch.microbatches if minibatch.rows else ():
                asked = (padded.input_ids, padded.response_mask)
                start = engine(*asked) if needs_start else None
                at_reference = None if reference is None else reference(*asked)
                values = None if critic is None else critic.values(padded)
                minibatch.known.append(Known(start, at_reference, torch.zeros_like(padded.behaviour_logprobs), values))
                rows.append(padded)
                if start is not None and at_reference is not None and algorithm.kl_placement == "reward":
                    kl = objective.kl(start, at_reference)
                    penalties.append(algorithm.kl_coef * kl.masked_fill(~padded.response_mask, 0.0))
            known += minibatch.known
        rewards = rewards.to(engine.device)
        if objective.estimator is None or algorithm.advantage == "none":
            _by_token(objective, rows, known, rewards, penalties)
        else:
            _by_rollout(objective, rows, known, rewards, penalties)
        if algorithm.whiten_advantages and rows:
            _whiten(rows, known, engine.device)


def _by_rollout(
    objective: Objective, rows: list[PaddedRows], known: list[Known], rewards: Tensor, penalties: list[Tensor]
) -> None:
    """Every token has its rollout's advantage; a penalty in the reward is summed over the rollout first."""
    if penalties:
        of_rollouts = torch.zeros_like(rewards).flatten()
        for padded, penalty in zip(rows, penalties, strict=True):
            of_rollouts.index_add_(0, padded.rollouts, penalty.sum(dim=1))
        rewards = rewards - add_over_ranks(of_rollouts).view_as(rewards)
    assert objective.estimator is not None
    advantages = check_advantages(objective.estimator(rewards), rewards).flatten().float()
    for padded, one in zip(rows, known, strict=True):
        one.advantages = advantages[padded.rollouts][:, None] * padded.response_mask


def _by_token(
    objective: Objective, rows: list[PaddedRows], known: list[Known], rewards: Tensor, penalties: list[Tensor]
) -> None:
    """Every row is an episode: its rollout's reward at its last token, penalties where they arise."""
    algorithm = objective.algorithm
    for index, (padded, one) in enumerate(zip(rows, known, strict=True)):
        mask = padded.response_mask
        token_rewards = last_token_rewards(rewards.flatten()[padded.rollouts].float(), mask)
        if penalties:
            token_rewards = token_rewards - penalties[index].float()
        if one.values is None:
            one.advantages = rewards_to_go(token_rewards, mask, algorithm.gamma)
        else:
            one.advantages, one.returns = gae(token_rewards, one.values, mask, algorithm.gamma, algorithm.gae_lambda)


def _whiten(rows: list[PaddedRows], known: list[Known], device: torch.device) -> None:
    """By the moments of all tokens of the step; collective."""
    moments = (Moments.of(one.advantages, padded.response_mask) for padded, one in zip(rows, known, strict=True))
    of_step = over_ranks(reduce(operator.add, moments), device)
    for padded, one in zip(rows, known, strict=True):
        one.advantages = whiten(one.advantages, padded.response_mask, of_step)
