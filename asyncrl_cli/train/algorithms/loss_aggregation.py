"""The loss of a micro-batch: a policy loss, importance weights, a KL penalty and an entropy bonus, and their mean.

Invariant: losses add. The caller passes the denominator of the whole minibatch (over all micro-batches and
ranks), so the sum of the micro-batches' losses is the minibatch's mean exactly, however it was cut up. A
framework that averages gradients over R ranks needs the denominator divided by R.

What does not count (mask false) may hold anything, NaN included: it adds nothing to the loss and its
gradient is exactly 0. A micro-batch in which nothing counts has loss 0 and can still run backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl_cli.train.algorithms.kl import KLEstimator, k3, limited
from asyncrl_cli.train.algorithms.policy_losses import LossSettings, PolicyLoss
from asyncrl_cli.train.algorithms.reduced_sums import Sums

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


@dataclass(frozen=True, slots=True)
class LossSums(Sums):
    """Sums over tokens that count; they add over micro-batches and ranks with ``+``.

    All are float64 tensors without dimensions, detached, so that adding them waits for no device.

    Args:
        tokens: tokens that count.
        ratio: sum of current / proximal.
        clipped_low: tokens whose ratio the policy loss held at the lower edge.
        clipped_high: tokens whose ratio the policy loss held at the upper edge.
        kl_proximal: sum of the k3 estimate of KL(proximal ‖ current): ratio − 1 − log ratio.
        kl_reference: sum of the penalty's estimate of KL(current ‖ reference); 0 without a reference.
        entropy: sum of the entropies; 0 when they are not given.
    """

    tokens: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl_proximal: Tensor
    kl_reference: Tensor
    entropy: Tensor

    def summary(self) -> dict[str, float]:
        """Means over tokens, as Python floats; all 0 when no token counts."""
        tokens = max(1.0, self.tokens.item())
        return {
            "ratio_mean": self.ratio.item() / tokens,
            "clip_low_fraction": self.clipped_low.item() / tokens,
            "clip_high_fraction": self.clipped_high.item() / tokens,
            "kl_proximal": self.kl_proximal.item() / tokens,
            "kl_reference": self.kl_reference.item() / tokens,
            "entropy": self.entropy.item() / tokens,
        }


def aggregate(per_token: Tensor, mask: Tensor, aggregation: Aggregation, denominator: float) -> Tensor:
    """This micro-batch's share of the minibatch's mean.

    ``token_mean``: the sum over tokens that count / denominator (the minibatch's tokens that count; DAPO,
    arXiv 2503.14476, section 3.3). ``sequence_mean``: the sum over rows of the row's mean over its tokens
    that count / denominator (the minibatch's sequences; GRPO, arXiv 2402.03300, eq. 3). ``sequence_sum``: the sum over
    tokens that count / denominator (the minibatch's sequences times a fixed number of tokens, whatever their
    lengths; Dr. GRPO, arXiv 2503.20783, section 3.2). A row in which nothing counts adds 0.

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
    elif aggregation not in ("token_mean", "sequence_sum"):
        raise ValueError(f"aggregation is token_mean, sequence_mean or sequence_sum, not {aggregation!r}")
    return per_row.sum() / denominator


def policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss: PolicyLoss,
    settings: LossSettings,
    aggregation: Aggregation,
    denominator: float,
    importance_weights: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl: KLEstimator = k3,
    kl_coef: float = 0.0,
    entropies: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, LossSums]:
    """The loss of one micro-batch, to be minimized. A token's is

        w · (policy loss) + kl_coef · (KL estimate) − entropy_coef · (entropy)

    The weight w corrects for where the token was sampled (corrections.py). It does not weigh the penalty and the
    bonus, which keep the policy near the reference, and wide, at tokens that are left out of the policy loss, too.

    Args:
        logprobs: [rows, tokens], of the weights being trained; gradients flow through it.
        proximal_logprobs: [rows, tokens], of the proximal policy, mostly that of the start of the step; no gradient.
        advantages: [rows] or [rows, tokens]; no gradient.
        mask: bool, [rows, tokens]; true where a token counts.
        loss: the policy loss, of ``surrogates.LOSSES`` or the user's own.
        settings: its numbers.
        aggregation: see ``aggregate``.
        denominator: see ``aggregate``.
        importance_weights: [rows, tokens]; no gradient. None: all 1.
        reference_logprobs: [rows, tokens], of the reference model; no gradient. Needed if ``kl_coef`` > 0.
        kl: estimator of the penalty, of ``kl.KL``.
        kl_coef: weight of the penalty.
        entropies: [rows, tokens], nats, of the distribution that each token was sampled from, under the weights being
            trained; with gradient if ``entropy_coef`` > 0. None: not measured.
        entropy_coef: weight of the bonus.

    Returns:
        The loss (no dimensions) and the sums for metrics.

    Raises:
        ValueError: shapes differ, the mask is not bool, the penalty has no reference, the bonus no entropies, the
            policy loss gave another shape, or as ``aggregate``.
    """
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand(len(advantages), logprobs.shape[-1])
    check_shapes(mask, logprobs, proximal_logprobs, advantages, importance_weights, reference_logprobs, entropies)
    if kl_coef and reference_logprobs is None:
        raise ValueError("a KL penalty needs reference_logprobs")
    if entropy_coef and entropies is None:
        raise ValueError("an entropy bonus needs entropies")

    # Masked values are replaced before exp: 0 · NaN would be NaN in the backward pass.
    logprobs = logprobs.masked_fill(~mask, 0.0)
    proximal = proximal_logprobs.detach().masked_fill(~mask, 0.0)

    tokens = loss(logprobs, proximal, advantages.detach().masked_fill(~mask, 0.0), mask, settings)
    check_shapes(mask, tokens.loss, tokens.clipped_low, tokens.clipped_high)
    per_token = tokens.loss
    if importance_weights is not None:
        per_token = per_token * importance_weights.detach().masked_fill(~mask, 0.0)
    penalty = entropy = torch.zeros_like(per_token, dtype=torch.float64)
    if reference_logprobs is not None:
        penalty = kl(logprobs, reference_logprobs.detach().masked_fill(~mask, 0.0))
        per_token = per_token + kl_coef * penalty.to(per_token.dtype)
    if entropies is not None:
        entropy = entropies.masked_fill(~mask, 0.0)
        per_token = per_token - entropy_coef * entropy
    mean = aggregate(per_token, mask, aggregation, denominator)

    with torch.no_grad():
        ratio = limited(logprobs - proximal).exp()
        return mean, LossSums(
            tokens=mask.sum().double(),
            ratio=(ratio * mask).sum(dtype=torch.float64),
            clipped_low=(mask & tokens.clipped_low).sum().double(),
            clipped_high=(mask & tokens.clipped_high).sum().double(),
            kl_proximal=k3(proximal, logprobs).sum(),
            kl_reference=penalty.detach().sum(),
            entropy=entropy.detach().sum(dtype=torch.float64),
        )


def check_shapes(mask: Tensor, *others: Tensor | None) -> None:
    """Raise ``ValueError`` unless the mask is a bool matrix and all others that are given have its shape."""
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool, not {mask.dtype}")
    shapes = [list(other.shape) for other in others if other is not None]
    if mask.ndim != 2 or any(shape != list(mask.shape) for shape in shapes):
        raise ValueError(f"shapes differ from the mask's {list(mask.shape)}: {shapes}")
