"""Truncated importance weights: the rollout engine sampled from another policy than the trainer starts from.

Three policies meet in one loss. *Behaviour* sampled the token: an older weight version, or the same weights
under the engine's other kernels. *Proximal* is the trainer's policy at the start of the step. *Current* is
the one being updated. The clipped ratio current / proximal keeps updates small (losses.py); the weight here,
proximal / behaviour, corrects for where the token came from. Separating the two is decoupled PPO (Hilton et
al., arXiv 2110.00641; for asynchronous training of language models AReaL, arXiv 2505.24298); cutting the
weight at a cap is truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"), which trades a bounded bias for a bounded variance.

Invariant: weights carry no gradient and lie in [0, cap]. What does not count (mask false) may hold
anything, NaN included, and has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CorrectionSums:
    """Sums over tokens that count; they add over micro-batches and ranks with ``+``.

    All are float64 tensors without dimensions, so that adding them waits for no device.

    Args:
        tokens: tokens that count.
        weight: sum of the truncated weights.
        weight_squared: sum of their squares.
        weight_max: largest weight.
        capped: tokens whose ratio was above the cap.
        gap: sum of |proximal − behaviour| log-prob.
        gap_max: largest |proximal − behaviour|.
    """

    tokens: Tensor
    weight: Tensor
    weight_squared: Tensor
    weight_max: Tensor
    capped: Tensor
    gap: Tensor
    gap_max: Tensor

    def __add__(self, other: CorrectionSums) -> CorrectionSums:
        return CorrectionSums(
            tokens=self.tokens + other.tokens,
            weight=self.weight + other.weight,
            weight_squared=self.weight_squared + other.weight_squared,
            weight_max=torch.maximum(self.weight_max, other.weight_max),
            capped=self.capped + other.capped,
            gap=self.gap + other.gap,
            gap_max=torch.maximum(self.gap_max, other.gap_max),
        )

    def summary(self) -> dict[str, float]:
        """Metrics, as Python floats; all 0 when no token counts.

        ``effective_sample_fraction`` is Kish's effective sample size (Σw)² / Σw² divided by the tokens: 1
        when all weights are equal, 1 / tokens when one token has all the weight.
        """
        tokens = max(1.0, self.tokens.item())
        weight, weight_squared = self.weight.item(), self.weight_squared.item()
        return {
            "importance_mean": weight / tokens,
            "importance_max": self.weight_max.item(),
            "importance_capped_fraction": self.capped.item() / tokens,
            "effective_sample_fraction": weight**2 / weight_squared / tokens if weight_squared else 0.0,
            "logprob_gap_mean": self.gap.item() / tokens,
            "logprob_gap_max": self.gap_max.item(),
        }


def truncated_importance_weights(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, cap: float | None
) -> tuple[Tensor, CorrectionSums]:
    """w = min(exp(proximal − behaviour), cap) for each token, and its statistics.

    A NaN among tokens that count stays visible in the weights and the sums.

    Args:
        proximal_logprobs: [rows, tokens], of the trainer's weights at the start of the step.
        behaviour_logprobs: [rows, tokens], recorded when the tokens were sampled.
        mask: bool, [rows, tokens]; true where a token counts.
        cap: upper bound of the weights. None turns the correction off: weights are 1, the gap is measured.

    Returns:
        Weights, float32 or float64 like the inputs, [rows, tokens], detached, 0 where the mask is false; and
        the sums.

    Raises:
        ValueError: shapes differ, the mask is not bool, or the cap is not positive.
    """
    if not proximal_logprobs.shape == behaviour_logprobs.shape == mask.shape:
        raise ValueError(
            f"shapes differ: {list(proximal_logprobs.shape)}, {list(behaviour_logprobs.shape)}, {list(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool, not {mask.dtype}")
    if cap is not None and not cap > 0:
        raise ValueError(f"the cap must be positive, not {cap}")
    with torch.no_grad():
        log_ratio = (proximal_logprobs - behaviour_logprobs).masked_fill(~mask, 0.0)
        if cap is None:
            weights, capped = mask.to(log_ratio.dtype), torch.zeros_like(mask)
        else:
            ratio = log_ratio.exp()  # may overflow to infinity, which the cap takes back; nothing runs backward
            weights, capped = ratio.clamp(max=cap).masked_fill(~mask, 0.0), mask & (ratio > cap)
        return weights, CorrectionSums(
            tokens=mask.sum().double(),
            weight=weights.sum(dtype=torch.float64),
            weight_squared=weights.double().square().sum(),
            weight_max=_largest(weights),
            capped=capped.sum().double(),
            gap=log_ratio.abs().sum(dtype=torch.float64),
            gap_max=_largest(log_ratio.abs()),
        )


def _largest(values: Tensor) -> Tensor:
    """The maximum as float64; 0 without values."""
    return torch.cat([values.flatten(), values.new_zeros(1)]).max().double()
