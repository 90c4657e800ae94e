"""Corrections for tokens that another policy sampled than the one the trainer starts the step with.

Three policies meet in one loss. *Behaviour* sampled the token: an older weight version, or the same weights under the
engine's other kernels. *Proximal* is what the clipped ratio is relative to: mostly the trainer's policy at the start of
the step. *Current* is the one being updated. The clipped ratio current / proximal keeps updates small (surrogates.py);
the weight here, proximal / behaviour, corrects for where the token came from. Separating the two is decoupled PPO
(Hilton et al., arXiv 2110.00641; for asynchronous training of language models AReaL, arXiv 2505.24298, eq. 5).

Four things can be done, alone or together, in this order:

    weigh     by the ratio of the token, of its sequence (the product), or by the sequence's geometric mean
    mask      weights outside a range become 0 (IcePop, masked importance sampling)
    cut       weights are cut at a cap: a bounded bias for a bounded variance (truncated importance sampling, Yao et
              al. 2025, "Your efficient RL framework secretly brings you off-policy RL training")
    reject    tokens, or whole sequences, that an estimate of the KL divergence finds too far away weigh 0

Ranges and rejections are as in verl's rollout correction. There the rejected leave the mean that the loss is; here
they stay in its denominator, so that a minibatch's denominator is known before its first forward pass.

Invariant: weights carry no gradient and are 0 where the mask is false, where anything may stand, NaN included. NaN
among tokens that count is not rejected: it stays visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl_cli.train.algorithms.kl import KL, k3, limited
from asyncrl_cli.train.algorithms.loss_aggregation import check_shapes
from asyncrl_cli.train.algorithms.reduced_sums import Sums

Proximal = Literal["recomputed", "log_linear", "behaviour"]
Level = Literal["token", "sequence", "geometric"]
RejectBy = Literal["k1", "k2", "k3"]
RejectOver = Literal["token", "sequence_mean", "sequence_sum", "sequence_max"]


@dataclass(frozen=True, slots=True)
class Correction:
    """What is done about the difference between proximal and behaviour.

    Args:
        proximal: ``recomputed``: the trainer's log-probs at the start of the step. ``log_linear``: see
            ``log_linear_proximal``. ``behaviour``: the recorded log-probs themselves; the clipped ratio then holds the
            whole correction, and there is no weight beside it.
        level: of the importance weight proximal / behaviour. ``token``: of the token. ``sequence``: the product over
            the row's tokens. ``geometric``: its root by their number. None: 1.
        cap: upper bound of the weights. None: none.
        mask_low: weights below this become 0. None: no such bound.
        mask_high: weights above this become 0. None: no such bound.
        reject_by: estimate of KL(behaviour ‖ proximal), of kl.py. None: nothing is rejected.
        reject_over: ``token`` rejects single tokens; the others whole rows, by the mean, sum or maximum over the
            row's tokens. ``k1`` has no maximum.
        reject_low: for ``k1`` only: the least exp(k1), a ratio behaviour / proximal. Left out with ``k1``:
            1 / ``reject_high``.
        reject_high: the largest exp(k1), or the largest k2 or k3, in nats.

    Raises:
        ValueError: a number is out of range, or a setting would have no effect.
    """

    proximal: Proximal = "recomputed"
    level: Level | None = None
    cap: float | None = None
    mask_low: float | None = None
    mask_high: float | None = None
    reject_by: RejectBy | None = None
    reject_over: RejectOver = "sequence_mean"
    reject_low: float | None = None
    reject_high: float | None = None

    def __post_init__(self) -> None:
        bounds = {"cap": self.cap, "mask_low": self.mask_low, "mask_high": self.mask_high}
        for name, bound in (bounds | {"reject_low": self.reject_low, "reject_high": self.reject_high}).items():
            if bound is not None and not bound > 0:
                raise ValueError(f"{name} must be positive, not {bound}")
        if self.level is None and (idle := [name for name, bound in bounds.items() if bound is not None]):
            raise ValueError(f"{' and '.join(idle)} without level: there are no weights to bound")
        if self.proximal == "behaviour" and self.level is not None:
            raise ValueError("with proximal behaviour the ratio to the loss is the weight: level must be left out")
        if self.reject_by is None:
            if self.reject_low is not None or self.reject_high is not None:
                raise ValueError("reject_low and reject_high need reject_by")
        elif self.reject_high is None:
            raise ValueError(f"reject_by {self.reject_by} needs reject_high")
        elif self.reject_by != "k1" and self.reject_low is not None:
            raise ValueError(f"reject_low is for k1: {self.reject_by} is never negative")
        elif self.reject_by == "k1" and self.reject_over == "sequence_max":
            raise ValueError("k1 has both signs and no sequence_max: take k2 or k3")
        elif self.reject_by == "k1" and self.reject_low is None and self.reject_high < 1:
            raise ValueError(f"reject_high {self.reject_high} is below its own inverse: give reject_low, too")
        for low, high in ((self.mask_low, self.mask_high), (self.reject_low, self.reject_high)):
            if low is not None and high is not None and low > high:
                raise ValueError(f"a lower bound of {low} is above the upper one of {high}")


@dataclass(frozen=True, slots=True)
class CorrectionSums(Sums):
    """Sums over tokens that count; they add over micro-batches and ranks with ``+``.

    All are float64 tensors without dimensions, so that adding them waits for no device. Fields that end in ``_max``
    are maxima, all others sums. The *raw* weight is that before masks, cap and rejection, of the correction's
    level; without one, of the token.

    Args:
        tokens: tokens that count.
        rows: rows with a token that counts.
        weight: sum of the weights.
        weight_squared: sum of their squares.
        weight_max: largest weight.
        capped: tokens whose raw weight was above the cap, and not masked.
        masked: tokens whose raw weight was outside the mask's range.
        rejected: tokens that were rejected, alone or with their row.
        rejected_rows: rows of which every token was rejected.
        above_2: tokens whose raw weight was above 2.
        below_half: tokens whose raw weight was below ½.
        gap: sum of |proximal − behaviour| log-prob.
        gap_max: largest |proximal − behaviour|.
        kl: sum of the k3 estimate of KL(behaviour ‖ proximal).
    """

    tokens: Tensor
    rows: Tensor
    weight: Tensor
    weight_squared: Tensor
    weight_max: Tensor
    capped: Tensor
    masked: Tensor
    rejected: Tensor
    rejected_rows: Tensor
    above_2: Tensor
    below_half: Tensor
    gap: Tensor
    gap_max: Tensor
    kl: Tensor

    def summary(self) -> dict[str, float]:
        """Metrics, as Python floats; all 0 when no token counts.

        ``effective_sample_fraction`` is Kish's effective sample size (Σw)² / Σw² divided by the tokens: 1
        when all weights are equal, 1 / tokens when one token has all the weight.
        """
        tokens, rows = max(1.0, self.tokens.item()), max(1.0, self.rows.item())
        weight, weight_squared = self.weight.item(), self.weight_squared.item()
        return {
            "importance_mean": weight / tokens,
            "importance_max": self.weight_max.item(),
            "importance_capped_fraction": self.capped.item() / tokens,
            "importance_masked_fraction": self.masked.item() / tokens,
            "importance_above_2_fraction": self.above_2.item() / tokens,
            "importance_below_half_fraction": self.below_half.item() / tokens,
            "effective_sample_fraction": weight**2 / weight_squared / tokens if weight_squared else 0.0,
            "rejected_token_fraction": self.rejected.item() / tokens,
            "rejected_row_fraction": self.rejected_rows.item() / rows,
            "kl_behaviour": self.kl.item() / tokens,
            "logprob_gap_mean": self.gap.item() / tokens,
            "logprob_gap_max": self.gap_max.item(),
        }


def correct(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, correction: Correction
) -> tuple[Tensor, CorrectionSums]:
    """The weight of each token, and what there is to know about them.

    Log-ratios are cut at ±20, sums of them over a row too. A row's tokens are those that count.

    Args:
        proximal_logprobs: [rows, tokens]. With ``proximal`` behaviour, where both sides would be the same, those of the
            current policy: rejection and statistics are then about it.
        behaviour_logprobs: [rows, tokens], recorded when the tokens were sampled.
        mask: bool, [rows, tokens]; true where a token counts.
        correction: what to do.

    Returns:
        Weights, dtype of the log-probs, [rows, tokens], detached, 0 where the mask is false or a token is left
        out; and the sums.

    Raises:
        ValueError: shapes differ or the mask is not bool.
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
        rejected = _rejected(proximal, behaviour, mask, correction)
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
            above_2=(mask & (raw > 2.0)).sum().double(),
            below_half=(mask & (raw < 0.5)).sum().double(),
            gap=gap.abs().sum(dtype=torch.float64),
            gap_max=_largest(gap.abs()),
            kl=k3(behaviour, proximal).sum(),
        )


def log_linear_proximal(logprobs: Tensor, behaviour_logprobs: Tensor, versions_behind: Tensor) -> Tensor:
    """The proximal log-probs guessed from the two policies on either side of it, without a forward pass of its own.

        log π_proximal ≈ log π_behaviour + α·(log π_current − log π_behaviour)
        α = (v_proximal − v_behaviour) / (v_current − v_behaviour)

    AReaL's log-linear approximation (its docs/algorithms/prox_approx.md): weights are taken to have moved evenly from
    version to version. The current policy is on the way to the version after that of the step's start, so with n
    versions behind, α = n / (n + 1): a token of the newest version keeps its recorded log-prob. (AReaL's code takes the
    version of the step's start for the current one, and the one before for the proximal.)

    At the first update of a step current and proximal are the same, and the guess is off by 1 / (n + 1) of the whole
    way; there the trainer's own log-probs cost nothing.

    Args:
        logprobs: [rows, tokens], of the current policy.
        behaviour_logprobs: [rows, tokens], recorded when the tokens were sampled.
        versions_behind: [rows, tokens], how many versions the token's is before the one at the start of the step; what
            is below 0 counts as 0.

    Returns:
        [rows, tokens], dtype of ``logprobs``, detached.
    """
    behind = versions_behind.clamp(min=0).to(logprobs.dtype)
    return torch.lerp(behaviour_logprobs.to(logprobs.dtype), logprobs.detach(), behind / (behind + 1.0))


def _log_weights(gap: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Of log-ratios that are 0 where the mask is false; [rows, tokens]."""
    if level == "token":
        return limited(gap)
    of_row = gap.sum(dim=1, keepdim=True, dtype=torch.float64)
    if level == "geometric":
        of_row = of_row / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return limited(of_row).to(gap.dtype).expand_as(gap)


def _rejected(proximal: Tensor, behaviour: Tensor, mask: Tensor, correction: Correction) -> Tensor:
    """bool, [rows, tokens]. Log-probs are 0 where the mask is false, and so are the estimates."""
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
    """The maximum as float64; 0 without values."""
    return torch.cat([values.flatten(), values.new_zeros(1)]).max().double()
