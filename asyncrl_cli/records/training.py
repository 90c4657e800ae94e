"""The trainer's inputs and reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isclose

import numpy as np
from numpy.typing import NDArray

from asyncrl_cli.records.generation import Rollout
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.rewards import Scored, Turn

CORRECT = 1.0
"""A reward of at least this counts as correct in the accuracies shown."""

REWARD_TOLERANCE = 1e-9
"""Rewards that differ by no more than this, relative to the larger one or absolutely, are equal: 0.1 + 0.2 and 0.3."""

FEWEST_SCORED = 2
"""A group with fewer rewards has no baseline and is rejected, unless all its rollouts have one."""

MOST_VISITS = 32
"""``TrainingGroup.earlier`` has at most this many results."""


def are_equal(rewards: Iterable[float]) -> bool:
    """Whether all of these rewards are equal: a group with them gives no learning signal. None are."""
    first, *others = [*rewards] or [0.0]
    return all(isclose(first, other, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE) for other in others)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a trainer rank runs: Ray's node, its address in the cluster, and the rank's GPUs there."""

    node_id: str
    address: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """The finished rollouts of one prompt with their rewards, by index.

    ``version`` is the weight version that the group was admitted at. A rollout with the reward None is masked: none of
    its tokens is trained on. ``metrics`` are the task's measurements other than the reward, a mapping per rollout;
    empty when it measures nothing.
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
    """The groups of one step, in admission order, and the version they are trained at."""

    step: int
    version: int
    groups: tuple[TrainingGroup, ...]

    @property
    def staleness(self) -> tuple[int, ...]:
        """Each group's staleness, in versions."""
        return tuple(self.version - group.version for group in self.groups)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one step. ``seconds`` is the wall time of the rank's call.

    ``trained_tokens`` count in the loss; ``computed_tokens`` go through the policy in a pass over the batch, prompts
    included, and a shared prefix once.

    Of this time, ``forward_s`` was spent on passes without a gradient, before the first update, and ``update_s`` on
    updates; the rest on packing and sums over ranks. ``cpu_s`` is the rank's processor time, summed over its threads.
    ``flops`` are the operations of the updates on all ranks (train/flops.py). ``peak_flops`` are those that the rank's
    GPU can do in a second; None on CPUs and where its data sheet is not known.
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
    """A fixed sequence and the trainer's own log-probs of it: an engine that serves the same weights agrees.

    ``logprobs`` are float32, of the tokens after the first one and after ``images``. ``base_logprobs`` are those of the
    model without its adapters, where engines get the adapters alone: an engine that does not apply them has these.
    """

    ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    base_logprobs: NDArray[np.float32] | None = None
    images: tuple[PlacedImage, ...] = ()
