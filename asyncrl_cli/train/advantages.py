"""Advantages from the rewards of a group: how much better a rollout did than the others of its prompt.

Invariant: a group's advantages sum to zero (up to rounding), and a group whose rewards are all equal has
advantages of exactly zero. There is no value network; the group is the baseline.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation, so that rewards that differ by rounding only stay without effect."""


def uniform_groups(rewards: Tensor) -> Tensor:
    """Which groups have rewards that are all equal, and so nothing to learn from.

    Args:
        rewards: [groups, group_size].

    Returns:
        bool, [groups].
    """
    return (rewards == rewards[:, :1]).all(dim=1)


def group_advantages(rewards: Tensor, normalize: bool) -> Tensor:
    """Group-relative advantages.

    ``normalize``: (r − mean(r)) / (std(r) + 1e-6), with the population's standard deviation (divisor
    group_size); GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.2. Otherwise r − mean(r): Dr. GRPO,
    arXiv 2503.20783, which leaves the deviation out because it weighs up questions that are nearly always,
    or nearly never, answered.

    Args:
        rewards: [groups, group_size], floating point.
        normalize: whether to divide by the standard deviation.

    Returns:
        [groups, group_size], dtype and device of ``rewards``. Computed in float64.

    Raises:
        ValueError: ``rewards`` is not a floating-point matrix with at least one column, or not finite.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must be a floating-point [groups, group_size], not {rewards.dtype} {list(rewards.shape)}"
        )
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    exact = rewards.double()
    centred = exact - exact.mean(dim=1, keepdim=True)
    if normalize:
        centred = centred / (centred.square().mean(dim=1, keepdim=True).sqrt() + DEVIATION_FLOOR)
    # The mean of equal numbers can differ from them by rounding.
    centred = centred.masked_fill(uniform_groups(rewards)[:, None], 0.0)
    return centred.to(rewards.dtype)
