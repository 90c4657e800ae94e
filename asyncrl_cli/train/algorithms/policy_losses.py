"""Policy losses of a token, before weights, penalties and means: what the ratio to the proximal policy may do.

With r = exp(log-prob − proximal log-prob) and advantage A each loss is −(some bounded function of r) · A. They differ
in what happens to a token whose ratio left the range 1 − clip_low to 1 + clip_high:

    clip    it has no gradient, if the gradient would lead further out
    gspo    the same, for the ratio of the whole sequence
    cispo   it keeps a gradient, with a weight at the edge of the range
    sapo    no edge: the gradient fades with the distance from r = 1

Invariant: at r = 1 the gradient by the log-prob is −A for all of them, so that one update on its own policy's tokens
is REINFORCE whichever loss is named. Log-ratios are cut at ±20.

A user's own loss is a function of the same form (``PolicyLoss``). Its inputs are right-padded matrices in which what
does not count has been set to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl_cli.train.algorithms.kl import limited


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Numbers of the policy losses.

    Args:
        clip_low: the ratio is clipped below 1 − this; above 0, at most 1.
        clip_high: the ratio is clipped above 1 + this; positive.
        dual_clip: with a negative advantage the ratio counts no more than this; above 1. None: no bound.
        sapo_temperatures: of positive and of other advantages; positive. The higher, the faster gradients fade.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low must be above 0 and at most 1, not {self.clip_low}")
        if not self.clip_high > 0:
            raise ValueError(f"clip_high must be positive, not {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, not {self.dual_clip}")
        if not all(temperature > 0 for temperature in self.sapo_temperatures):
            raise ValueError(f"sapo_temperatures must be positive, not {self.sapo_temperatures}")


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What a policy loss says of each token; all [rows, tokens].

    Args:
        loss: floating point, with gradient.
        clipped_low: bool; tokens whose ratio was held at the lower edge.
        clipped_high: bool; tokens whose ratio was held at the upper edge.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, LossSettings], TokenLosses]
"""Of (logprobs, proximal_logprobs, advantages, mask, settings): [rows, tokens] each, the mask bool. Gradients flow
through the first alone; 0 stands wherever the mask is false."""


def clip_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLosses:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A).

    PPO, arXiv 1707.06347, eq. 7; with an upper edge of its own (clip-higher) DAPO, arXiv 2503.14476, eq. 10. With
    ``dual_clip`` c the loss of a negative advantage is at most −c·A (arXiv 1912.09729): a token that became
    very likely although it was bad pulls no harder than c times.

    Args: as ``PolicyLoss``.
    """
    return _clipped(limited(logprobs - proximal_logprobs).exp(), advantages, settings)


def gspo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLosses:
    """``clip_loss`` with the ratio of the sequence, s = exp(mean over the row's tokens that count of log r).

    GSPO, arXiv 2507.18071, eq. 5 to 7. The gradient goes to each token by its own log-prob and advantage (GSPO-token,
    eq. 13 and 14), which with one advantage in a row is GSPO's gradient. Such ratios are far closer to 1: ranges are
    of the order of 3e-4.

    Args: as ``PolicyLoss``.
    """
    log_ratio = (logprobs - proximal_logprobs).detach().double() * mask
    of_row = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = limited(logprobs - logprobs.detach() + of_row.to(logprobs.dtype)).exp()
    return _clipped(ratio, advantages, settings)


def cispo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLosses:
    """−w·A·log-prob, where w = clip(r, 1 − clip_low, 1 + clip_high) carries no gradient.

    CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. REINFORCE with clipped weights: no token loses its gradient. The
    paper sets no lower edge, which is ``clip_low`` = 1.

    Args: as ``PolicyLoss``.
    """
    ratio = limited(logprobs.detach() - proximal_logprobs).exp()
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    return TokenLosses(-ratio.clamp(low, high) * advantages * logprobs, ratio < low, ratio > high)


def sapo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossSettings
) -> TokenLosses:
    """−(4 / τ)·sigmoid(τ·(r − 1))·A, where τ is the temperature of positive, or of other, advantages.

    SAPO, arXiv 2511.20347, section 3. With p the sigmoid, the gradient by the log-prob is −4·p·(1 − p)·r·A. Nothing is
    clipped.

    Args: as ``PolicyLoss``.
    """
    ratio = limited(logprobs - proximal_logprobs).exp()
    positive, other = settings.sapo_temperatures
    temperature = torch.where(advantages > 0, ratio.new_tensor(positive), ratio.new_tensor(other))
    loss = -(4.0 / temperature) * torch.sigmoid(temperature * (ratio - 1.0)) * advantages
    never = torch.zeros_like(mask)
    return TokenLosses(loss, never, never)


def _clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> TokenLosses:
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped_high = (advantages > 0) & (ratio > high)
    if settings.dual_clip is not None:
        bounded = (advantages < 0) & (ratio > settings.dual_clip)
        gain = torch.where(bounded, settings.dual_clip * advantages, gain)
        clipped_high = clipped_high | bounded
    return TokenLosses(-gain, (advantages < 0) & (ratio < low), clipped_high)


LOSSES: dict[str, PolicyLoss] = {"clip": clip_loss, "gspo": gspo_loss, "cispo": cispo_loss, "sapo": sapo_loss}
"""By the names that a spec uses."""
