"""Importance weights for tokens that were not sampled by the policy with which the trainer starts the step.

Three policies meet in one loss. *Behaviour* sampled the token: an older weight version, or the same weights under the
engine's other kernels. *Proximal* is usually the trainer's policy at the start of the step. *Current* is being updated.
The clipped ratio current / proximal keeps updates small (policy_loss.py). The weight proximal / behaviour, computed
here, corrects for the token's origin. Separating the two is decoupled PPO (Hilton et al., arXiv 2110.00641; for
asynchronous training of language models AReaL, arXiv 2505.24298, eq. 5).

There are four corrections, used alone or together, in this order; ``CorrectionSpec`` has the settings:

    weigh     by the ratio of the token, of its sequence (the product), or by the sequence's geometric mean
    mask      weights outside a range become 0 (IcePop, masked importance sampling)
    truncate  weights are at most the cap: a bounded bias for a bounded variance (truncated importance sampling, Yao et
              al. 2025, "Your efficient RL framework secretly brings you off-policy RL training")
    reject    tokens or full sequences with a too large estimate of the KL divergence weigh 0

Ranges and rejections follow verl's rollout correction, with one difference: rejected tokens stay in the denominator of
the loss, because a minibatch's denominator must be known before its first forward pass.

Invariant: weights carry no gradient and are 0 where the mask is false, whatever the arguments hold there, including
NaN. NaN among tokens that count is not rejected: it remains visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl_cli.spec.algorithm import CorrectionSpec
from asyncrl_cli.train.algorithms.kl import KL, clamp_log_ratio, k3
from asyncrl_cli.train.algorithms.reduced_sums import ReducedSums, check_shapes


@dataclass(frozen=True, slots=True)
class CorrectionSums(ReducedSums):
    """Sums over tokens that count.

    The *raw* weight is the weight at the correction's level (without one, at the token) before mask, cap and rejection.
    """

    tokens: Tensor  # tokens that count
    rows: Tensor  # rows with a token that counts
    weight: Tensor
    weight_squared: Tensor
    weight_max: Tensor
    capped: Tensor  # tokens with a raw weight above the cap that are not masked
    masked: Tensor  # tokens with a raw weight outside the mask's range
    rejected: Tensor  # tokens, alone or with their row
    rejected_rows: Tensor  # rows with all tokens rejected
    gap: Tensor  # |proximal - behaviour| in log-probs
    gap_max: Tensor
    kl: Tensor  # the k3 estimate of KL(behaviour ‖ proximal)

    def summary(self) -> dict[str, float]:
        """Metrics, as Python floats; all 0 when no token counts.

        ``effective_sample_fraction`` is Kish's effective sample size (Σw)² / Σw² divided by the tokens: 1 if all
        weights are equal, 1 / tokens if one token has all the weight.
        """
        tokens, rows = max(1.0, self.tokens.item()), max(1.0, self.rows.item())
        weight, weight_squared = self.weight.item(), self.weight_squared.item()
        return {
            "importance_mean": weight / tokens,
            "importance_max": self.weight_max.item(),
            "importance_capped_fraction": self.capped.item() / tokens,
            "importance_masked_fraction": self.masked.item() / tokens,
            "effective_sample_fraction": weight**2 / weight_squared / tokens if weight_squared else 0.0,
            "rejected_token_fraction": self.rejected.item() / tokens,
            "rejected_row_fraction": self.rejected_rows.item() / rows,
            "kl_behaviour": self.kl.item() / tokens,
            "logprob_gap_mean": self.gap.item() / tokens,
            "logprob_gap_max": self.gap_max.item(),
        }


def correct(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, correction: CorrectionSpec
) -> tuple[Tensor, CorrectionSums]:
    """Return each token's weight, and statistics.

    Log-ratios and their sums over a row are clamped to ±20. The spec's rules refuse a ``correction`` that has settings
    without effect (decision 0027).

    Args:
        proximal_logprobs: [rows, tokens]. With ``proximal: behaviour`` both sides would be equal, so the current
            policy's log-probs are given: rejection and statistics then refer to it.
        behaviour_logprobs: [rows, tokens], recorded when the tokens were sampled.
        mask: bool, [rows, tokens]; true where a token counts.

    Returns:
        Weights, [rows, tokens], detached, 0 where the mask is false or a token is masked; and the sums.
    """
    check_shapes(mask, proximal_logprobs, behaviour_logprobs)
    with torch.no_grad():
        proximal = proximal_logprobs.masked_fill(~mask, 0.0)
        behaviour = behaviour_logprobs.masked_fill(~mask, 0.0)
        gap = proximal - behaviour
        raw = _log_weights(gap, mask, correction.level or "token").exp()
        masked, capped = torch.zeros_like(mask), torch.zeros_like(mask)
        weights = raw if correction.level is not None else torch.ones_like(raw)
        if correction.mask_low is not None:
            masked = masked | (raw < correction.mask_low)
        if correction.mask_high is not None:
            masked = masked | (raw > correction.mask_high)
        if correction.cap is not None:
            weights, capped = weights.clamp(max=correction.cap), (raw > correction.cap) & ~masked
        rejected = _rejected(proximal, behaviour=behaviour, mask=mask, correction=correction)
        weights = weights.masked_fill(masked | rejected | ~mask, 0.0)
        counts = mask.any(dim=1)
        return weights, CorrectionSums(
            tokens=mask.sum().double(),
            rows=counts.sum().double(),
            weight=weights.sum(dtype=torch.float64),
            weight_squared=weights.double().square().sum(),
            weight_max=_largest(weights),
            capped=(mask & capped).sum().double(),
            masked=(mask & masked).sum().double(),
            rejected=(mask & rejected).sum().double(),
            rejected_rows=(counts & (rejected | ~mask).all(dim=1)).sum().double(),
            gap=gap.abs().sum(dtype=torch.float64),
            gap_max=_largest(gap.abs()),
            kl=k3(behaviour, proximal).sum(),
        )


def _log_weights(gap: Tensor, mask: Tensor, level: str) -> Tensor:
    """Clamped log-weights, [rows, tokens]. ``gap`` must be 0 where the mask is false."""
    if level == "token":
        return clamp_log_ratio(gap)
    of_row = gap.sum(dim=1, keepdim=True, dtype=torch.float64)
    if level == "geometric":
        of_row = of_row / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return clamp_log_ratio(of_row).to(gap.dtype).expand_as(gap)


def _rejected(proximal: Tensor, behaviour: Tensor, mask: Tensor, correction: CorrectionSpec) -> Tensor:
    """bool, [rows, tokens]. Log-probs must be 0 where the mask is false, which makes the estimates 0 there."""
    if correction.reject_by is None or correction.reject_high is None:
        return torch.zeros_like(mask)
    distance = KL[correction.reject_by](behaviour, proximal)
    match correction.reject_over:
        case "sequence_sum":
            distance = distance.sum(dim=1, keepdim=True)
        case "sequence_mean":
            distance = distance.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        case "sequence_max":
            distance = torch.cat([distance, distance.new_zeros(len(distance), 1)], dim=1).amax(dim=1, keepdim=True)
    if correction.reject_by == "k1":
        low = correction.reject_low or 1.0 / correction.reject_high
        outside = (distance < math.log(low)) | (distance > math.log(correction.reject_high))
    else:
        outside = distance > correction.reject_high
    return outside.expand_as(mask)


def _largest(values: Tensor) -> Tensor:
    return torch.cat([values.flatten(), values.new_zeros(1)]).max().double()
