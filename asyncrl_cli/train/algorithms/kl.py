"""Per-token estimates of KL(policy ‖ reference) on tokens that the policy sampled.

J. Schulman, "Approximating KL divergence" (2020), calls them k1, k2 and k3. With d = log reference − log policy:

    k1 = −d           unbiased; of either sign, with the largest variance
    k2 = d² / 2       biased; the bias is small where the policies are close
    k3 = e^d − 1 − d  unbiased, never negative, with less variance than k1

In a loss a penalty acts through its gradient, which is a different matter (∇: gradient of the sampled token's log-prob;
expectations are over the policy's own tokens):

    k1   ∇            just the score, with expectation 0: no penalty, only noise. Use it in rewards
    k2   −d ∇         the gradient of KL(policy ‖ reference), unbiased
    k3   (1 − e^d) ∇  the gradient of KL(reference ‖ policy), the other direction; equals k2 to first order in d

In a reward only the value counts, and k1 gives the gradient of KL(policy ‖ reference).

Invariant: estimates are float64, and d is clamped to ±20. Near d = 0 the terms of k3 cancel, and float32 is too coarse.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""Takes log-probs of policy and reference, of the same shape; returns estimates in nats, float64, in this shape.
Gradients flow through both."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exp: e^20 is far outside every useful range, and far from overflow."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp to ±20. NaN stays NaN; the gradient of a clamped value is 0."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """−d."""
    return -_distance(logprobs, reference_logprobs)


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d² / 2."""
    return 0.5 * _distance(logprobs, reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """e^d − 1 − d: GRPO's penalty (arXiv 2402.03300, eq. 4)."""
    distance = _distance(logprobs, reference_logprobs)
    return torch.expm1(distance) - distance


def _distance(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return clamp_log_ratio(reference_logprobs.double() - logprobs.double())


KL: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}
"""The estimators by their names in a spec."""
