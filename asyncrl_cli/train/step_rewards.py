"""A step's rewards as tensors: for rollouts, for their turns, and for the reward's parts.

Every tensor is on the CPU, has a row for each group and an entry for each rollout (all groups have ``group_size``
rollouts), and is float64 unless its field says otherwise. NaN stands for a missing reward: all rewards of a masked
rollout, a metric that the task did not report, turns after a rollout's last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from asyncrl_cli.records.rewards import REWARD, part_of_reward, unknown_metric, weighted_reward
from asyncrl_cli.records.training import TrainingBatch
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.algorithms.advantages import overlong_penalty, running_means, uniform_groups
from asyncrl_cli.train.packing import longest_response


@dataclass(frozen=True, slots=True, eq=False)
class StepRewards:
    """The rewards of all rollouts of a step."""

    rollouts: Tensor
    """[groups, group_size]: ``reward_coef`` times the recorded rewards, or times the weighted sums of their parts,
    minus the penalty for overlong responses."""
    turns: Tensor
    """[groups, group_size, turns]: they sum to ``rollouts``. A rollout without recorded turns has one turn. The rest of
    a rollout's reward (parts, a penalty) is added to its last turn."""
    reward_parts: Tensor
    """[parts, groups, group_size], in the order of ``algorithm.reward_parts``."""
    metrics: Mapping[str, Tensor]
    """The task's metrics by name, each [groups, group_size]."""
    lengths: Tensor
    """int64 [groups, group_size]: sampled tokens in all sequences of a rollout."""
    uniform: Tensor
    """bool [groups]: a group's rewards are equal, or each of their parts is if parts are normalized one by one."""
    baseline: Tensor
    """[groups, group_size]: running means of the prompts' earlier rewards (``running_means``). Without groups of one,
    just the step's mean."""

    @classmethod
    def of(cls, batch: TrainingBatch, spec: ExperimentSpec) -> StepRewards:
        """Compute the rewards of a batch.

        Raises ``ConfigError`` when a part in ``algorithm.reward_parts`` is missing in all rollouts of the run's first
        batch. The tasks of a mix may have different metrics, so there only ``train/missing_parts`` shows it.
        """
        algorithm, groups, recorded_rewards = spec.algorithm, batch.groups, _reward_part(REWARD, batch)
        weights = {name: algorithm.reward_coef * w for name, w in (algorithm.reward_parts or {REWARD: 1.0}).items()}
        reward_parts = torch.stack([_reward_part(name, batch) for name in weights])
        names = sorted({name for group in groups for metrics in group.metrics for name in metrics})
        for name, reward_part in zip(weights, reward_parts, strict=True):
            if name != REWARD and reward_part.isnan().all() and batch.step == 0 and not spec.task.mix:
                raise unknown_metric(name, names, "no rollout of the first batch")
        masked = recorded_rewards.isnan()
        if algorithm.mask_truncated and algorithm.kl_coef and algorithm.kl_placement == "reward":
            # Without rows there is no penalty, and such a reward would raise the baseline of the other rollouts.
            masked |= torch.tensor([[not rollout.finished for rollout in group.rollouts] for group in groups])
        rewards = torch.zeros_like(recorded_rewards).masked_fill(masked, math.nan)
        for weight, reward_part in zip(weights.values(), reward_parts, strict=True):
            rewards += weight * reward_part.nan_to_num()
        if algorithm.overlong_penalty:
            max_tokens = spec.rollout.max_response_tokens
            longest_responses = torch.tensor(
                [[longest_response(rollout) for rollout in group.rollouts] for group in groups]
            )
            buffer = max(1, round(algorithm.overlong_buffer * max_tokens))
            rewards -= algorithm.overlong_penalty * overlong_penalty(longest_responses, max_tokens, buffer)
        earlier = [[weighted_reward(weights, scored) for scored in group.earlier] for group in groups]
        return cls(
            rollouts=rewards,
            turns=_turns(batch, rewards, weight=weights.get(REWARD, 0.0)),
            reward_parts=reward_parts,
            metrics={name: _reward_part(name, batch) for name in names},
            lengths=torch.tensor([[len(rollout.sampled_versions) for rollout in group.rollouts] for group in groups]),
            uniform=torch.stack(
                [uniform_groups(compared) for compared in (reward_parts if algorithm.parts_apart else rewards[None])]
            ).all(dim=0),
            baseline=running_means(rewards, earlier, algorithm.baseline_half_life),
        )

    @property
    def missing_parts(self) -> int:
        """Number of parts missing in rollouts that have a reward."""
        return int((self.reward_parts.isnan() & ~self.rollouts.isnan()).sum())


def _reward_part(name: str, batch: TrainingBatch) -> Tensor:
    values = [
        [part_of_reward(name, reward, metrics) for reward, metrics in zip_longest(group.rewards, group.metrics)]
        for group in batch.groups
    ]
    numbers_or_nan = [[math.nan if value is None else value for value in row] for row in values]
    return torch.tensor(numbers_or_nan, dtype=torch.float64)


def _turns(batch: TrainingBatch, rewards: Tensor, weight: float) -> Tensor:
    """Compute ``StepRewards.turns``; ``weight``: the part ``reward``'s weight."""
    turn_count = max((len(turns) for group in batch.groups for turns in group.turns), default=1)
    turn_rewards = np.full((*rewards.shape, max(1, turn_count)), np.nan)
    for group_index, group in enumerate(batch.groups):
        for index, turns in enumerate(group.turns or [()] * len(group.rollouts)):
            reward = rewards[group_index, index].item()
            rewards_of_turns = [weight * turn.reward for turn in turns] or [0.0]
            if not math.isnan(reward):
                turn_rewards[group_index, index, : len(rewards_of_turns)] = rewards_of_turns
                turn_rewards[group_index, index, len(rewards_of_turns) - 1] += reward - sum(rewards_of_turns)
    return torch.from_numpy(turn_rewards)
