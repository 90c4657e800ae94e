"""Advantages of single tokens: rewards carried back along a row, with or without a critic, and whitened over a batch.

Rows are right-padded matrices [rows, tokens]. Only tokens that count (mask true: the policy sampled them) are steps of
the episode. What stands between them, a tool's answer say, is skipped: the step after a token is the next token that
counts, and no discount is lost on the way.

Invariant: where the mask is false results are 0, whatever the arguments hold there, NaN included. Everything is
computed in float64 and returned in the dtype of the first argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl_cli.train.algorithms.loss_aggregation import check_shapes
from asyncrl_cli.train.algorithms.reduced_sums import Sums

VARIANCE_FLOOR = 1e-8
"""Added to the variance that whitening divides by."""


def last_token_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """A rollout's reward at the last token of its row that counts, and 0 elsewhere.

    Args:
        rewards: [rows], floating point.
        mask: bool, [rows, tokens].

    Returns:
        [rows, tokens], dtype of ``rewards``. A row in which nothing counts has no reward.
    """
    check_shapes(mask)
    remaining = mask.flip(1).cumsum(dim=1).flip(1)  # tokens that count, from here on
    last = mask & (remaining == 1)
    return torch.where(last, rewards[:, None], torch.zeros_like(rewards[:, None]))


def rewards_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ·G of the next token that counts.

    Args:
        token_rewards: [rows, tokens], floating point.
        mask: bool, [rows, tokens].
        gamma: discount per token that counts, from 0 to 1.

    Returns:
        [rows, tokens].
    """
    check_shapes(mask, token_rewards)
    return _carried_back(_exact(token_rewards, mask), mask, gamma).to(token_rewards.dtype)


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, arXiv 1506.02438, eq. 16, and the returns that a critic learns.

    With V' the value of the next token that counts (0 after the last): δ_t = r_t + γ·V' − V_t, A_t = δ_t + γ·λ·A', and
    the return is A_t + V_t.

    Args:
        token_rewards: [rows, tokens], floating point.
        values: [rows, tokens]: what the critic expects from the token on, itself included; no gradient.
        mask: bool, [rows, tokens].
        gamma: discount per token that counts, from 0 to 1.
        lam: decay per token that counts, from 0 (one step ahead) to 1 (the whole row).

    Returns:
        Advantages and returns, [rows, tokens] each.
    """
    check_shapes(mask, token_rewards, values)
    exact = _exact(values, mask)
    delta = _exact(token_rewards, mask) + gamma * _next(exact, mask) - exact
    advantages = _carried_back(delta, mask, gamma * lam)
    returns = (advantages + exact).masked_fill(~mask, 0.0)
    return advantages.to(token_rewards.dtype), returns.to(token_rewards.dtype)


@dataclass(frozen=True, slots=True)
class Moments(Sums):
    """Sums from which mean and variance over tokens follow; they add over micro-batches and ranks with ``+``.

    All are float64 tensors without dimensions.

    Args:
        count: tokens that count.
        total: sum of the values.
        squares: sum of their squares.
    """

    count: Tensor
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Those of ``values`` [rows, tokens] where ``mask`` (bool) is true."""
        check_shapes(mask, values)
        exact = _exact(values, mask)
        return cls(mask.sum().double(), exact.sum(), exact.square().sum())

    @property
    def mean(self) -> Tensor:
        """float64; 0 when nothing counts."""
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """The sample's (divisor count − 1), float64; 0 for fewer than two tokens."""
        return (self.squares - self.total * self.mean).clamp(min=0) / (self.count - 1).clamp(min=1)


def whiten(advantages: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """(A − mean) / √(variance + 1e-8), with the moments of the whole batch.

    REINFORCE++, arXiv 2501.03262: global advantage normalization.

    Args:
        advantages: [rows, tokens], floating point.
        mask: bool, [rows, tokens].
        moments: of all advantages of the batch, over all micro-batches and ranks.

    Returns:
        [rows, tokens].
    """
    check_shapes(mask, advantages)
    whitened = (_exact(advantages, mask) - moments.mean) * (moments.variance + VARIANCE_FLOOR).rsqrt()
    return whitened.masked_fill(~mask, 0.0).to(advantages.dtype)


def _exact(values: Tensor, mask: Tensor) -> Tensor:
    return values.detach().double().masked_fill(~mask, 0.0)


def _carried_back(values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """x_t + decay·(the result at the next token that counts); 0 where the mask is false."""
    carried = torch.zeros_like(values)
    after = values.new_zeros(len(values))
    for token in reversed(range(values.shape[1])):
        counts = mask[:, token]
        after = torch.where(counts, values[:, token] + decay * after, after)
        carried[:, token] = after.masked_fill(~counts, 0.0)
    return carried


def _next(values: Tensor, mask: Tensor) -> Tensor:
    """The value at the next token that counts; 0 after the last."""
    following = torch.zeros_like(values)
    after = values.new_zeros(len(values))
    for token in reversed(range(values.shape[1])):
        following[:, token] = after
        after = torch.where(mask[:, token], values[:, token], after)
    return following
