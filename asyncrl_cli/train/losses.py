"""The policy loss: clipped surrogate with an asymmetric range, and a KL penalty.

Invariant: losses add. The caller passes the denominator of the whole minibatch (over all micro-batches and
ranks), so the sum of the micro-batches' losses is the minibatch's mean exactly, however it was cut up. A
framework that averages gradients over R ranks needs the denominator divided by R.

What does not count (mask false) may hold anything, NaN included: it adds nothing to the loss and its
gradient is exactly 0. A micro-batch in which nothing counts has loss 0 and can still run backward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut at ± this before exp: e^20 is far outside every clip range, and far from overflow."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over tokens that count; they add over micro-batches and ranks with ``+``.

    All are float64 tensors without dimensions, detached, so that adding them waits for no device.

    Args:
        tokens: tokens that count.
        ratio: sum of current / proximal.
        clipped_low: tokens with a negative advantage whose ratio is below 1 − clip_low: no gradient.
        clipped_high: tokens with a positive advantage whose ratio is above 1 + clip_high: no gradient.
        kl_proximal: sum of the k3 estimate of KL(proximal ‖ current): ratio − 1 − log ratio.
        kl_reference: sum of the k3 estimate of KL(current ‖ reference); 0 without a reference.
    """

    tokens: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl_proximal: Tensor
    kl_reference: Tensor

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def summary(self) -> dict[str, float]:
        """Means over tokens, as Python floats; all 0 when no token counts."""
        tokens = max(1.0, self.tokens.item())
        return {
            "ratio_mean": self.ratio.item() / tokens,
            "clip_low_fraction": self.clipped_low.item() / tokens,
            "clip_high_fraction": self.clipped_high.item() / tokens,
            "kl_proximal": self.kl_proximal.item() / tokens,
            "kl_reference": self.kl_reference.item() / tokens,
        }


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) on tokens sampled from the policy: e^d − 1 − d >= 0.

    d = reference − policy. Unbiased, with less variance than −d (J. Schulman, "Approximating KL divergence",
    2020, estimator k3; used as GRPO's penalty in arXiv 2402.03300, eq. 4). d is cut at ±20.

    Args:
        logprobs: any shape; gradients flow through it.
        reference_logprobs: same shape.

    Returns:
        float64, same shape: near d = 0 the terms cancel, which float32 does not survive.
    """
    gap = (reference_logprobs.double() - logprobs.double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(gap) - gap


def aggregate(per_token: Tensor, mask: Tensor, aggregation: Aggregation, denominator: float) -> Tensor:
    """This micro-batch's share of the minibatch's mean.

    ``token_mean``: the sum over tokens that count / denominator (the minibatch's tokens that count; DAPO,
    arXiv 2503.14476, section 3.3). ``sequence_mean``: the sum over rows of the row's mean over its tokens
    that count / denominator (the minibatch's sequences; GRPO, arXiv 2402.03300, eq. 3). A row in which
    nothing counts adds 0.

    Args:
        per_token: [rows, tokens].
        mask: bool, [rows, tokens].
        aggregation: which mean.
        denominator: of the whole minibatch, over all micro-batches and ranks; positive.

    Returns:
        No dimensions, dtype of ``per_token``.

    Raises:
        ValueError: the denominator is not positive or the aggregation unknown.
    """
    if not denominator > 0:
        raise ValueError(f"the denominator must be positive, not {denominator}")
    per_row = per_token.masked_fill(~mask, 0.0).sum(dim=1)
    if aggregation == "sequence_mean":
        per_row = per_row / mask.sum(dim=1).clamp(min=1)
    elif aggregation != "token_mean":
        raise ValueError(f"aggregation is token_mean or sequence_mean, not {aggregation!r}")
    return per_row.sum() / denominator


def policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    aggregation: Aggregation,
    denominator: float,
    importance_weights: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, LossSums]:
    """Clipped surrogate loss of one micro-batch.

    With r = exp(logprobs − proximal), advantage A and weight w, a token's loss is

        −w · min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) + kl_coef · k3

    The clip is PPO's (arXiv 1707.06347, eq. 7), with an upper range of its own (clip-higher, DAPO, arXiv
    2503.14476, section 3.1); w corrects for where the token was sampled (corrections.py) and does not
    weigh the penalty. log r is cut at ±20.

    Args:
        logprobs: [rows, tokens], of the weights being trained; gradients flow through it.
        proximal_logprobs: [rows, tokens], of the weights at the start of the step; no gradient.
        advantages: [rows] or [rows, tokens]; no gradient.
        mask: bool, [rows, tokens]; true where a token counts.
        clip_low: the ratio is clipped below 1 − this.
        clip_high: the ratio is clipped above 1 + this.
        aggregation: see ``aggregate``.
        denominator: see ``aggregate``.
        importance_weights: [rows, tokens]; no gradient. None: all 1.
        reference_logprobs: [rows, tokens], of the initial model; no gradient. Needed if ``kl_coef`` > 0.
        kl_coef: weight of the penalty.

    Returns:
        The loss (no dimensions) and the sums for metrics.

    Raises:
        ValueError: shapes differ, the mask is not bool, the penalty has no reference, or as ``aggregate``.
    """
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand(len(advantages), logprobs.shape[-1])
    _check(mask, logprobs, proximal_logprobs, advantages, importance_weights, reference_logprobs)
    if kl_coef and reference_logprobs is None:
        raise ValueError("a KL penalty needs reference_logprobs")

    # Masked values are replaced before exp: 0 · NaN would be NaN in the backward pass.
    logprobs = logprobs.masked_fill(~mask, 0.0)
    proximal = proximal_logprobs.detach().masked_fill(~mask, 0.0)
    advantages = advantages.detach().masked_fill(~mask, 0.0)

    ratio = (logprobs - proximal).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    if importance_weights is not None:
        per_token = per_token * importance_weights.detach().masked_fill(~mask, 0.0)
    penalty = torch.zeros_like(per_token, dtype=torch.float64)
    if reference_logprobs is not None:
        penalty = k3(logprobs, reference_logprobs.detach().masked_fill(~mask, 0.0))
        per_token = per_token + kl_coef * penalty.to(per_token.dtype)
    loss = aggregate(per_token, mask, aggregation, denominator)

    with torch.no_grad():
        sums = LossSums(
            tokens=mask.sum().double(),
            ratio=(ratio * mask).sum(dtype=torch.float64),
            clipped_low=(mask & (advantages < 0) & (ratio < 1.0 - clip_low)).sum().double(),
            clipped_high=(mask & (advantages > 0) & (ratio > 1.0 + clip_high)).sum().double(),
            kl_proximal=k3(proximal, logprobs).sum(),
            kl_reference=penalty.sum(),
        )
    return loss, sums


def _check(mask: Tensor, *others: Tensor | None) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool, not {mask.dtype}")
    shapes = [list(other.shape) for other in others if other is not None]
    if mask.ndim != 2 or any(shape != list(mask.shape) for shape in shapes):
        raise ValueError(f"shapes differ from the mask's {list(mask.shape)}: {shapes}")
