"""The trainer's inputs and reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isclose
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.records.generation import Rollout
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.rewards import Scored, Turn

CORRECT = 1.0
"""The smallest reward that counts as correct in accuracies."""
REWARD_TOLERANCE = 1e-9
"""Rewards that differ by at most this, absolutely or relative to the larger one, are equal: 0.1 + 0.2 and 0.3."""
FEWEST_SCORED = 2
"""A group with fewer rewards has no baseline and is rejected, unless all its rollouts have a reward."""
MOST_VISITS = 32
"""Largest number of results in ``TrainingGroup.earlier``."""


def are_equal(rewards: Iterable[float]) -> bool:
    """True if all rewards are equal, also if there are none. A group with equal rewards gives no learning signal."""
    reward, *other_rewards = [*rewards] or [0.0]
    return all(
        isclose(reward, other_reward, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE)
        for other_reward in other_rewards
    )


@dataclass(frozen=True, slots=True)
class RankLocation:
    """A trainer rank's Ray node, the node's address in the cluster, and the rank's GPUs there."""

    node_id: str
    address: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """The finished rollouts of one prompt with their rewards, by index.

    ``version`` is the weight version at the group's admission. A rollout with the reward None is masked: none of its
    tokens is trained on. ``metrics`` has the task's other measurements, a mapping per rollout; empty if there are none.
    """

    group_id: int
    uid: str
    version: int
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float | None, ...]
    metrics: tuple[Mapping[str, float], ...] = ()
    turns: tuple[tuple[Turn, ...], ...] = ()
    """The turns of each rollout, if the task is an environment; empty otherwise."""
    earlier: tuple[Scored, ...] = ()
    """For a running baseline: the results of the prompt's groups in earlier batches, newest admission first."""

    @property
    def known_rewards(self) -> list[float]:
        """The rewards of the rollouts that are not masked, by index."""
        return [reward for reward in self.rewards if reward is not None]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The groups of one step in admission order, and the trainer's version at this step."""

    step: int
    version: int
    groups: tuple[TrainingGroup, ...]
    tokens_per_microbatch: int | None = None
    """Smaller micro-batches than the spec's, because a rank ran out of memory in this step; recorded for a replay."""

    @property
    def staleness(self) -> tuple[int, ...]:
        """Each group's staleness, in versions."""
        return tuple(self.version - group.version for group in self.groups)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest rollout, or of the longest branch of one."""
        sequences = (sequence for group in self.groups for rollout in group.rollouts for sequence in rollout.sequences)
        return max((len(sequence.prompt_ids) + len(sequence.ids) for sequence in sequences), default=0)


class SupervisedRow(NamedTuple):
    """A row of supervised training: token ids, and for each whether it is learned. The first one never is."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class SupervisedBatch:
    """The rows of one supervised update, and its learning rate. None: only their loss is measured."""

    rows: tuple[SupervisedRow, ...]
    learning_rate: float | None


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one step.

    ``seconds`` is the wall time of the rank's call: ``forward_s`` for passes without a gradient before the first
    update, ``update_s`` for updates, the rest for packing and sums over ranks. ``cpu_s`` is the processor time of all
    its threads. ``trained_tokens`` count in the loss; ``computed_tokens`` pass through the policy, prompts included, a
    shared prefix once. ``flops``: operations of the updates on all ranks (train/flops.py). ``peak_flops``: operations
    per second of the rank's GPU; None on CPUs and if its data sheet is not known.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    trained_tokens: int = 0
    computed_tokens: int = 0
    forward_s: float = 0.0
    update_s: float = 0.0
    cpu_s: float = 0.0
    flops: float = 0.0
    peak_flops: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A fixed sequence with the trainer's log-probs. An engine that serves the same weights gets the same log-probs.

    ``logprobs`` (float32) are the log-probs of the tokens after the first one and after ``images``. If engines get only
    adapters, ``base_logprobs`` are the log-probs without them, which an engine that does not apply adapters would get.
    """

    ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    base_logprobs: NDArray[np.float32] | None = None
    images: tuple[PlacedImage, ...] = ()
