"""Advantages from the rewards of a group: how much better a rollout did than the others of its prompt.

Invariant: a group whose rewards are all equal has advantages of exactly zero (``none`` aside, which has no baseline),
and so has a group of one. There is no value network; the group is the baseline. Everything is computed in float64.

A user's own estimator is a function of the same form (``Estimator``), whose result ``check_advantages`` looks at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl_cli.records.training import REWARD_TOLERANCE

DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation, so that rewards that differ by rounding only stay without effect."""

Estimator = Callable[[Tensor], Tensor]
"""Of rewards [groups, group_size], floating point; returns the same shape and dtype."""


def uniform_groups(rewards: Tensor) -> Tensor:
    """Which groups have rewards that are all equal up to ``REWARD_TOLERANCE``, and so nothing to learn from.

    Args:
        rewards: [groups, group_size].

    Returns:
        bool, [groups].
    """
    return torch.isclose(rewards, rewards[:, :1], rtol=REWARD_TOLERANCE, atol=REWARD_TOLERANCE).all(dim=1)


def group_norm(rewards: Tensor) -> Tensor:
    """(r − mean) / (s + 1e-6), with the sample's standard deviation s (divisor group_size − 1).

    GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.2, which leaves the divisor open.

    Args:
        rewards: [groups, group_size], floating point.

    Returns:
        [groups, group_size], dtype and device of ``rewards``.

    Raises:
        ValueError: ``rewards`` is not a floating-point matrix with at least one column, or not finite.
    """
    centred = _centred(rewards)
    variance = centred.square().sum(dim=1, keepdim=True) / max(1, rewards.shape[1] - 1)
    return (centred / (variance.sqrt() + DEVIATION_FLOOR)).to(rewards.dtype)


def group_mean(rewards: Tensor) -> Tensor:
    """r − mean. Dr. GRPO, arXiv 2503.20783, section 3.2: the deviation weighs up questions that are nearly always, or
    nearly never, answered.

    Args, returns and raises: as ``group_norm``.
    """
    return _centred(rewards).to(rewards.dtype)


def leave_one_out(rewards: Tensor) -> Tensor:
    """r − mean of the group's other rewards, which is (r − mean)·n / (n − 1) with n rollouts.

    RLOO, arXiv 2402.14740, section 3.2. A group of one has no others, and advantage 0.

    Args, returns and raises: as ``group_norm``.
    """
    size = rewards.shape[-1] if rewards.ndim else 0
    return (_centred(rewards) * (size / max(1, size - 1))).to(rewards.dtype)


def no_baseline(rewards: Tensor) -> Tensor:
    """The reward itself, as for REINFORCE++ (arXiv 2501.03262), where the batch is the baseline (``whiten``).

    Args, returns and raises: as ``group_norm``.
    """
    return check_rewards(rewards).clone()


ADVANTAGES: dict[str, Estimator] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "none": no_baseline,
}
"""By the names that a spec uses."""


def check_rewards(rewards: Tensor) -> Tensor:
    """``rewards``, or ``ValueError`` unless they are a finite floating-point [groups, group_size]."""
    if rewards.ndim != 2 or rewards.shape[1] < 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must be a floating-point [groups, group_size], not {rewards.dtype} {list(rewards.shape)}"
        )
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    return rewards


def check_advantages(result: object, rewards: Tensor) -> Tensor:
    """What an estimator of the user's own returned for ``rewards``, if it is what it has to be.

    Raises:
        ValueError: it is not a tensor of the rewards' shape and dtype, or not finite. Says which group is not.
    """
    if not isinstance(result, Tensor):
        raise ValueError(f"advantages must be a tensor, not {type(result).__name__}")
    if result.shape != rewards.shape or result.dtype != rewards.dtype:
        raise ValueError(
            f"advantages must be {rewards.dtype} {list(rewards.shape)} like the rewards, "
            f"not {result.dtype} {list(result.shape)}"
        )
    broken = ~torch.isfinite(result).all(dim=1)
    if broken.any():
        group = int(broken.int().argmax())
        found, given = result[group].tolist(), rewards[group].tolist()
        raise ValueError(f"advantages of group {group} are not finite: {found} for rewards {given}")
    return result


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """What a response loses for its length: 0 up to ``max_tokens`` − ``buffer_tokens``, from there linearly up to 1.

    Soft overlong punishment, DAPO, arXiv 2503.14476, eq. 13, where it is negative and added to the reward.

    Args:
        lengths: tokens of responses, any shape.
        max_tokens: length with the whole penalty.
        buffer_tokens: tokens before it in which the penalty grows; from 1 to ``max_tokens``.

    Returns:
        float32, shape of ``lengths``, from 0 to 1.

    Raises:
        ValueError: ``buffer_tokens`` is out of range.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must be from 1 to max_tokens {max_tokens}, not {buffer_tokens}")
    over = lengths.double() - (max_tokens - buffer_tokens)
    return (over / buffer_tokens).clamp(0.0, 1.0).float()


def _centred(rewards: Tensor) -> Tensor:
    """r − mean in float64; exactly 0 for uniform groups, as the mean of equal numbers can differ by rounding."""
    exact = check_rewards(rewards).double()
    return (exact - exact.mean(dim=1, keepdim=True)).masked_fill(uniform_groups(rewards)[:, None], 0.0)
