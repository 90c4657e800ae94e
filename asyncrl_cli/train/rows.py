"""From a batch's rollouts to the rows that a step trains on.

Every sequence of a rollout is a row. Only tokens that the policy sampled count; those that were given to it are
context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl_cli.records.generation import Rollout
from asyncrl_cli.records.training import TrainingBatch
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.algorithms.advantages import overlong_penalty, uniform_groups
from asyncrl_cli.train.packing import TrainingRow


def shaped_rewards(batch: TrainingBatch, spec: ExperimentSpec) -> Tensor:
    """The rewards that the step learns from, float64 [groups, group_size]: the recorded ones, less the punishment of
    responses that come near their limit."""
    rewards = torch.tensor([group.rewards for group in batch.groups], dtype=torch.float64)
    algorithm, most = spec.algorithm, spec.rollout.max_response_tokens
    if not algorithm.overlong_penalty:
        return rewards
    lengths = [[longest_response(rollout) for rollout in group.rollouts] for group in batch.groups]
    buffer = max(1, round(algorithm.overlong_buffer * most))
    return rewards - algorithm.overlong_penalty * overlong_penalty(torch.tensor(lengths), most, buffer)


def longest_response(rollout: Rollout) -> int:
    """Tokens of the longest response that one call of the policy gave, in any of the rollout's sequences."""
    longest = 0
    for sequence in rollout.sequences:
        edges = np.flatnonzero(np.diff(sequence.sampled, prepend=False, append=False))
        longest = max(longest, int((edges[1::2] - edges[::2]).max(initial=0)))
    return longest


def training_rows(batch: TrainingBatch, rewards: Tensor, spec: ExperimentSpec) -> list[list[TrainingRow]]:
    """The rows of each group that have something to teach, in the order of rollouts and their sequences.

    A token is on-policy when the trainer's weights at the start of the step are the very ones it was sampled
    with: those of its version, which the trainer has only in the first step after a publish. With ``keep``
    that takes a sequence whose sampled tokens are all of that version, as later tokens of another one saw keys and
    values of older weights.

    Args:
        batch: its groups all have ``group_size`` rollouts.
        rewards: as ``shaped_rewards``.
        spec: the experiment.

    Returns:
        A list for each group; empty where all rewards are equal and the spec skips such groups. A row's ``rollout``
        is its place in ``rewards.flatten()``.
    """
    at_a_version = batch.step % spec.pipeline.publish_every == 0
    leaves_out = uniform_groups(rewards) if spec.algorithm.uniform_groups == "skip" else rewards.new_zeros(len(rewards))
    rows: list[list[TrainingRow]] = []
    for index, group in enumerate(batch.groups):
        rows.append([])
        if leaves_out[index]:
            continue
        for place, rollout in enumerate(group.rollouts):
            if spec.algorithm.mask_truncated and not rollout.finished:
                continue
            for sequence in rollout.sequences:
                if sequence.sampled.any():
                    rows[-1].append(
                        _row(
                            sequence,
                            index * rewards.shape[1] + place,
                            batch.version,
                            at_a_version,
                            keeps_cache=spec.pipeline.weight_update == "keep",
                        )
                    )
    return rows


def _row(sequence: Rollout, rollout: int, version: int, at_a_version: bool, keeps_cache: bool) -> TrainingRow:
    sampled = sequence.sampled
    current = (sequence.versions == version) & at_a_version
    whole = current[sampled].all()
    # What was given before the first sampled token is its prompt; what came after the last one is not read.
    first, last = np.flatnonzero(sampled)[[0, -1]]
    response = slice(first, last + 1)
    return TrainingRow(
        prompt_ids=(*sequence.prompt_ids, *sequence.ids[:first].tolist()),
        response_ids=sequence.ids[response],
        behaviour_logprobs=sequence.logprobs[response],
        versions_behind=np.where(sampled, version - sequence.versions, 0)[response].astype(np.int16),
        on_policy=(current & (whole or not keeps_cache))[response],
        rollout=rollout,
        loss_mask=sampled[response],
    )


def count_tokens(rows: Sequence[TrainingRow]) -> int:
    """Tokens of the rows that count in the loss."""
    return sum(row.loss_tokens for row in rows)
