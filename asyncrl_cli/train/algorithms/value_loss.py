"""The critic's loss: squared error of the values, held near the values at the start of the step.

Invariant: as in policy_loss.py, losses of micro-batches add up to the minibatch's mean, and tokens that do not count
may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl_cli.train.algorithms.policy_loss import aggregate
from asyncrl_cli.train.algorithms.reduced_sums import ReducedSums, check_shapes


@dataclass(frozen=True, slots=True)
class ValueSums(ReducedSums):
    """Sums over tokens that count."""

    tokens: Tensor  # tokens that count
    clipped: Tensor  # tokens without gradient: the error at the clipped value is larger
    error: Tensor  # return - value
    error_squared: Tensor
    target: Tensor  # the returns
    target_squared: Tensor

    def summary(self) -> dict[str, float]:
        """Metrics, as Python floats; all 0 when no token counts.

        ``explained_variance`` is 1 − Var(return − value) / Var(return): 1 for a perfect critic, 0 for a constant critic
        or equal returns.
        """
        tokens = max(1.0, self.tokens.item())
        unexplained = self.error_squared.item() / tokens - (self.error.item() / tokens) ** 2
        variance = self.target_squared.item() / tokens - (self.target.item() / tokens) ** 2
        return {
            "clip_fraction": self.clipped.item() / tokens,
            "error_mean": self.error.item() / tokens,
            "return_mean": self.target.item() / tokens,
            # A smaller variance is only rounding: all returns are equal.
            "explained_variance": 1.0 - unexplained / variance if variance > 1e-12 else 0.0,
        }


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None, denominator: float
) -> tuple[Tensor, ValueSums]:
    """Compute half the squared error over tokens that count. For a token with value V and return R it is

        ½ · max((V − R)², (clip(V, V_old − clip, V_old + clip) − R)²)

    The clipping is OpenAI PPO2's: a value that has left the range around the old value has no gradient, unless the
    gradient leads back into it.

    Args:
        values: [rows, tokens], of the critic being trained; gradients flow only through these.
        old_values: [rows, tokens], of the critic at the start of the step.
        returns: [rows, tokens].
        mask: bool, [rows, tokens].
        clip: how far a value may move. None: the plain squared error.
        denominator: number of tokens that count in the whole minibatch (see ``aggregate``).

    Returns:
        The loss (no dimensions) and the sums for metrics.
    """
    check_shapes(mask, values, old_values, returns)
    values = values.masked_fill(~mask, 0.0)
    values_at_start = old_values.detach().masked_fill(~mask, 0.0)
    returns = returns.detach().masked_fill(~mask, 0.0)
    squared = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        squared_near = (values.clamp(values_at_start - clip, values_at_start + clip) - returns).square()
        clipped = squared_near > squared
        squared = torch.maximum(squared, squared_near)
    loss = aggregate(0.5 * squared, mask=mask, aggregation="token_mean", denominator=denominator)
    with torch.no_grad():
        target = returns.double()
        error = target - values.double()
        return loss, ValueSums(
            tokens=mask.sum().double(),
            clipped=clipped.sum().double(),
            error=error.sum(),
            error_squared=error.square().sum(),
            target=target.sum(),
            target_squared=target.square().sum(),
        )
