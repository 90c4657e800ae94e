"""The policy's loss on a micro-batch, from a token's loss to the mean over the minibatch.

With r = exp(log-prob − proximal log-prob) and advantage A, a ``PolicyLoss`` is −(a bounded function of r) · A for each
token. The losses treat tokens with a ratio outside the range 1 − clip_low to 1 + clip_high differently:

    clip    no gradient, if the gradient would lead further out
    gspo    the same, for the ratio of the whole sequence
    cispo   the gradient stays, with a weight at the edge of the range
    sapo    no edge: the gradient fades with the distance from r = 1

``policy_loss`` weighs the losses (corrections.py), adds the KL penalty (kl.py) and the entropy bonus, and ``aggregate``
takes the mean.

Invariants:

* At r = 1 every loss has the gradient −A by the log-prob: one update on the policy's own tokens is REINFORCE.
* Losses add. The caller passes the whole minibatch's denominator (over all micro-batches and ranks), so the losses of
  micro-batches sum to the minibatch's mean exactly, however it was split. A framework that averages gradients over R
  ranks needs the denominator divided by R.
* Tokens that do not count (mask false) may hold anything, including NaN: they add nothing to the loss, and their
  gradient is exactly 0. A micro-batch without a token that counts has loss 0 and can still run backward.
* Log-ratios are clamped to ±20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl_cli.spec.algorithm import AlgorithmSpec
from asyncrl_cli.train.algorithms.kl import KLEstimator, clamp_log_ratio, k3
from asyncrl_cli.train.algorithms.reduced_sums import ReducedSums, check_shapes

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The result of a ``PolicyLoss``; all tensors are [rows, tokens]."""

    loss: Tensor  # floating point, with gradient
    clipped_low: Tensor  # bool; the ratio is held at the lower edge
    clipped_high: Tensor  # bool; the ratio is held at the upper edge


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, AlgorithmSpec], TokenLosses]
"""Takes (logprobs, proximal_logprobs, advantages, mask, settings): [rows, tokens] each with a bool mask, and the spec's
``algorithm``. Gradients flow only through the first; all are 0 where the mask is false. A user's loss has the same
form."""


def clip_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: AlgorithmSpec
) -> TokenLosses:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A).

    PPO, arXiv 1707.06347, eq. 7; with a separate upper edge (clip-higher) DAPO, arXiv 2503.14476, eq. 10. With
    ``dual_clip`` c the loss for a negative advantage is at most −c·A (arXiv 1912.09729): a bad token that has become
    very likely pulls at most c times as hard.
    """
    return _clipped(clamp_log_ratio(logprobs - proximal_logprobs).exp(), advantages, settings)


def gspo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: AlgorithmSpec
) -> TokenLosses:
    """``clip_loss`` with the sequence's ratio, s = exp(mean of log r over the row's tokens that count).

    GSPO, arXiv 2507.18071, eq. 5 to 7. The gradient goes to each token by its own log-prob and advantage (GSPO-token,
    eq. 13 and 14). If a row has one advantage, this is GSPO's gradient. Such ratios are far closer to 1: ranges are of
    the order of 3e-4.
    """
    log_ratio = (logprobs - proximal_logprobs).detach().double() * mask
    of_row = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = clamp_log_ratio(logprobs - logprobs.detach() + of_row.to(logprobs.dtype)).exp()
    return _clipped(ratio, advantages, settings)


def cispo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: AlgorithmSpec
) -> TokenLosses:
    """−w·A·log-prob, where w = clip(r, 1 − clip_low, 1 + clip_high) carries no gradient.

    CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. REINFORCE with clipped weights: no token loses its gradient. The
    paper sets no lower edge: ``clip_low`` = 1.
    """
    ratio = clamp_log_ratio(logprobs.detach() - proximal_logprobs).exp()
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    return TokenLosses(-ratio.clamp(low, high) * advantages * logprobs, ratio < low, ratio > high)


def sapo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: AlgorithmSpec
) -> TokenLosses:
    """−(4 / τ)·sigmoid(τ·(r − 1))·A, with one temperature τ for positive advantages and one for all others.

    SAPO, arXiv 2511.20347, section 3. With p the sigmoid, the gradient by the log-prob is −4·p·(1 − p)·r·A. Nothing is
    clipped.
    """
    ratio = clamp_log_ratio(logprobs - proximal_logprobs).exp()
    positive, not_positive = settings.sapo_temperatures
    # Not from tensors of these numbers: their copies to a GPU would make its host wait.
    temperature = torch.full_like(ratio, not_positive).masked_fill(advantages > 0, positive)
    loss = -(4.0 / temperature) * torch.sigmoid(temperature * (ratio - 1.0)) * advantages
    never = torch.zeros_like(mask)
    return TokenLosses(loss, never, never)


def _clipped(ratio: Tensor, advantages: Tensor, settings: AlgorithmSpec) -> TokenLosses:
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped_high = (advantages > 0) & (ratio > high)
    if settings.dual_clip is not None:
        bounded = (advantages < 0) & (ratio > settings.dual_clip)
        gain = torch.where(bounded, settings.dual_clip * advantages, gain)
        clipped_high = clipped_high | bounded
    return TokenLosses(-gain, (advantages < 0) & (ratio < low), clipped_high)


POLICY_LOSSES: dict[str, PolicyLoss] = {"clip": clip_loss, "gspo": gspo_loss, "cispo": cispo_loss, "sapo": sapo_loss}
"""The losses by their names in a spec."""


@dataclass(frozen=True, slots=True)
class LossSums(ReducedSums):
    """Sums over tokens that count."""

    tokens: Tensor  # tokens that count
    ratio: Tensor  # current / proximal
    clipped_low: Tensor  # tokens, as in ``TokenLosses``
    clipped_high: Tensor
    kl_proximal: Tensor  # the k3 estimate of KL(proximal ‖ current): ratio - 1 - log ratio
    kl_reference: Tensor  # the estimate of KL(current ‖ reference); 0 without a reference
    entropy: Tensor  # 0 when entropies are not given

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


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """A micro-batch's tensors for ``policy_loss``, [rows, tokens] each."""

    logprobs: Tensor
    """Under the weights being trained; carries a gradient."""
    proximal_logprobs: Tensor
    """Under the proximal policy, usually the policy at the start of the step."""
    advantages: Tensor
    mask: Tensor
    """bool; true where a token counts."""
    importance_weights: Tensor | None = None
    """None: all 1."""
    reference_logprobs: Tensor | None = None
    """Under the reference model; required for a penalty, otherwise only measured."""
    entropies: Tensor | None = None
    """Nats, of the distributions that the tokens were sampled from, under the weights being trained; carries a
    gradient. Required for a bonus, otherwise only measured."""


def policy_loss(
    inputs: LossInputs, settings: AlgorithmSpec, denominator: float, *, loss: PolicyLoss, kl: KLEstimator = k3
) -> tuple[Tensor, LossSums]:
    """Compute one micro-batch's loss, to be minimized. For each token it is

        w · (policy loss) + kl_coef · (KL estimate) − entropy_coef · (entropy)

    The weight w corrects for the policy that sampled the token (corrections.py). It does not apply to penalty and
    bonus: these keep the policy near the reference, and wide, even at tokens excluded from the policy loss. A penalty
    with ``kl_placement: reward`` is not in the loss.

    Args:
        settings: coefficients, aggregation, and the parameters of ``loss``.
        denominator: see ``aggregate``.
        loss: one of ``POLICY_LOSSES`` or the user's own.
        kl: estimator of the penalty, one of ``kl.KL``.

    Returns:
        The loss (no dimensions) and the sums for metrics.

    Raises:
        ValueError: shapes differ, the mask is not bool, or as in ``aggregate``.
    """
    mask, reference, entropies = inputs.mask, inputs.reference_logprobs, inputs.entropies
    optional_inputs = (inputs.importance_weights, reference, entropies)
    check_shapes(mask, inputs.logprobs, inputs.proximal_logprobs, inputs.advantages, *optional_inputs)
    kl_coef = settings.kl_coef if settings.kl_placement == "loss" else 0.0

    # Masked values are replaced before exp: 0 · NaN would be NaN in the backward pass.
    logprobs = inputs.logprobs.masked_fill(~mask, 0.0)
    proximal = inputs.proximal_logprobs.detach().masked_fill(~mask, 0.0)

    tokens = loss(logprobs, proximal, inputs.advantages.detach().masked_fill(~mask, 0.0), mask, settings)
    check_shapes(mask, tokens.loss, tokens.clipped_low, tokens.clipped_high)
    per_token = tokens.loss
    if inputs.importance_weights is not None:
        per_token = per_token * inputs.importance_weights.detach().masked_fill(~mask, 0.0)
    penalty = entropy = torch.zeros_like(per_token, dtype=torch.float64)
    if reference is not None:
        penalty = kl(logprobs, reference.detach().masked_fill(~mask, 0.0))
        if kl_coef:
            per_token = per_token + kl_coef * penalty.to(per_token.dtype)
    if entropies is not None:
        entropy = entropies.masked_fill(~mask, 0.0)
        per_token = per_token - settings.entropy_coef * entropy
    mean = aggregate(per_token, mask, settings.aggregation, denominator)

    with torch.no_grad():
        ratio = clamp_log_ratio(logprobs - proximal).exp()
        return mean, LossSums(
            tokens=mask.sum().double(),
            ratio=(ratio * mask).sum(dtype=torch.float64),
            clipped_low=(mask & tokens.clipped_low).sum().double(),
            clipped_high=(mask & tokens.clipped_high).sum().double(),
            kl_proximal=k3(proximal, logprobs).sum(),
            kl_reference=penalty.detach().sum(),
            entropy=entropy.detach().sum(dtype=torch.float64),
        )


def aggregate(per_token: Tensor, mask: Tensor, aggregation: Aggregation, denominator: float) -> Tensor:
    """Return this micro-batch's share of the minibatch's mean; no dimensions, dtype of ``per_token`` [rows, tokens].

    ``token_mean``: the sum over tokens that count; the denominator is their number in the minibatch (DAPO, arXiv
    2503.14476, section 3.3). ``sequence_mean``: the sum over rows of a row's mean over its tokens that count; the
    denominator is the minibatch's number of sequences (GRPO, arXiv 2402.03300, eq. 3). ``sequence_sum``: the sum over
    tokens that count; the denominator is the number of sequences times a fixed number of tokens, whatever their
    lengths (Dr. GRPO, arXiv 2503.20783, section 3.2). A row without tokens that count adds 0.

    ``denominator``: the whole minibatch's, over all micro-batches and ranks. Raises ``ValueError`` when it is not
    positive.
    """
    if not denominator > 0:
        raise ValueError(f"the denominator must be positive, not {denominator}")
    per_row = per_token.masked_fill(~mask, 0.0).sum(dim=1)
    if aggregation == "sequence_mean":
        per_row = per_row / mask.sum(dim=1).clamp(min=1)
    return per_row.sum() / denominator
