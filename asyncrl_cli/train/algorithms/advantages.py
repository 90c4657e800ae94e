"""Advantages: computes from the rewards of a step how much better than expected each sampled token was.

With a group as the baseline (GRPO, Dr. GRPO, RLOO) an ``AdvantageFunction`` compares a rollout with the others of its
prompt, and every token of the rollout has the result. Without one (REINFORCE++) and with a critic (PPO) the rewards are
carried back along the tokens of a row: ``rewards_to_go`` and ``gae``. ``whiten`` then scales over the whole step.

Matrices of rewards are [groups, group_size]; matrices of tokens are right-padded, [rows, tokens]. Only tokens
that count (mask true: the policy sampled them) are steps of an episode. Others, such as a tool's answer, are skipped:
the step after a token is the next token that counts, and no discount is lost between them.

Invariants: with a group as the baseline, a group of equal rewards has advantages of exactly zero, and so has a
group of one. Where the mask is false results are 0, whatever the arguments hold there, NaN
included. Everything is computed in float64 and returned in the dtype of the first argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl_cli.records.training import REWARD_TOLERANCE
from asyncrl_cli.train.algorithms.reduced_sums import ReducedSums, check_shapes

DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation: rewards that differ only by rounding have no effect."""

VARIANCE_FLOOR = 1e-8
"""Added to the variance that whitening divides by."""

AdvantageFunction = Callable[[Tensor], Tensor]
"""Takes rewards [groups, rollouts], floating point; returns advantages of the same shape and dtype. A user's own
function has this signature, too; ``of_scored`` checks its result."""


def uniform_groups(rewards: Tensor) -> Tensor:
    """bool, [groups]: whether all rewards of a group are equal up to ``REWARD_TOLERANCE``: nothing to learn from. NaN
    (a masked rollout) is ignored."""
    masked = rewards.isnan()
    first = rewards.gather(1, masked.int().argmin(dim=1, keepdim=True))
    equal = torch.isclose(rewards, first, rtol=REWARD_TOLERANCE, atol=REWARD_TOLERANCE)
    return (equal | masked).all(dim=1)


def group_norm(rewards: Tensor) -> Tensor:
    """(r − mean) / (s + 1e-6), with the sample's standard deviation s (divisor group_size − 1).

    GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.2, which leaves the divisor open.
    """
    centred = _centred(rewards)
    variance = centred.square().sum(dim=1, keepdim=True) / max(1, rewards.shape[1] - 1)
    return (centred / (variance.sqrt() + DEVIATION_FLOOR)).to(rewards.dtype)


def group_mean(rewards: Tensor) -> Tensor:
    """r − mean. Dr. GRPO, arXiv 2503.20783, section 3.2: dividing by the deviation would raise the weight of questions
    that are nearly always, or nearly never, answered."""
    return _centred(rewards).to(rewards.dtype)


def leave_one_out(rewards: Tensor) -> Tensor:
    """r − mean of the group's other rewards, which is (r − mean)·n / (n − 1) with n rollouts.

    RLOO, arXiv 2402.14740, section 3.2. A group of one has no others, and advantage 0.
    """
    size = rewards.shape[1]
    return (_centred(rewards) * (size / max(1, size - 1))).to(rewards.dtype)


ADVANTAGES: dict[str, AdvantageFunction] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}
"""The functions by their names in a spec; ``none`` and ``gae`` are the functions ``rewards_to_go`` and ``gae``, which
work on tokens."""


def of_scored(function: AdvantageFunction, rewards: Tensor) -> Tensor:
    """The advantages of rewards [groups, group_size] in which NaN marks a masked rollout, of the same shape and dtype.

    A masked rollout has 0, and the others have what a group without it has: the function is called once for each number
    of scored rollouts, with the groups that have this many. Raises ``ValueError`` as ``check_advantages`` does.
    """
    scored = ~rewards.isnan()
    counts = scored.sum(dim=1)
    advantages = torch.zeros_like(rewards)
    for count in sorted({*counts.tolist()} - {0}):
        chosen = scored & (counts == count)[:, None]
        known = rewards[chosen].view(-1, count)
        advantages[chosen] = check_advantages(function(known), known).flatten()
    return advantages


def check_advantages(result: object, rewards: Tensor) -> Tensor:
    """``result``, which a user's own ``AdvantageFunction`` returned for ``rewards``.

    Raises:
        ValueError: it is not a tensor of the rewards' shape and dtype, or not finite; names the group.
    """
    if not isinstance(result, Tensor):
        raise ValueError(f"advantages must be a tensor, not {type(result).__name__}")
    if result.shape != rewards.shape or result.dtype != rewards.dtype:
        raise ValueError(
            f"advantages must be {rewards.dtype} {list(rewards.shape)} like the rewards, "
            f"not {result.dtype} {list(result.shape)}"
        )
    broken = ~torch.isfinite(result).all(dim=1)
    if broken.any():
        group = int(broken.int().argmax())
        found, given = result[group].tolist(), rewards[group].tolist()
        raise ValueError(f"advantages of group {group} are not finite: {found} for rewards {given}")
    return result


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """The length penalty of a response: 0 up to ``max_tokens`` − ``buffer_tokens``, from there linearly up to 1.

    Soft overlong punishment, DAPO, arXiv 2503.14476, eq. 13, where it is negative and added to the reward.

    ``buffer_tokens`` is from 1 to ``max_tokens``. Returns float32 of the shape of ``lengths``, from 0 to 1.
    """
    over = lengths.double() - (max_tokens - buffer_tokens)
    return (over / buffer_tokens).clamp(0.0, 1.0).float()


def last_token_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """A rollout's reward at the last token of its row that counts, and 0 elsewhere.

    ``rewards``: [rows], floating point; ``mask``: bool, [rows, tokens]. Returns [rows, tokens] in the dtype of
    ``rewards``. A row without a token that counts has no reward.
    """
    check_shapes(mask)
    remaining = mask.flip(1).cumsum(dim=1).flip(1)  # tokens that count, from here on
    last = mask & (remaining == 1)
    return torch.where(last, rewards[:, None], torch.zeros_like(rewards[:, None]))


def rewards_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ·G of the next token that counts; [rows, tokens] like both arguments.

    For REINFORCE++ (arXiv 2501.03262), where the step is the baseline (``whiten``).
    """
    # With values of 0 and lam of 1, advantages are these sums.
    return gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma=gamma, lam=1.0)[0]


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, arXiv 1506.02438, eq. 16, and the returns that a critic learns.

    With V' the value of the next token that counts (0 after the last): δ_t = r_t + γ·V' − V_t, A_t = δ_t + γ·λ·A', and
    the return is A_t + V_t.

    ``values``, [rows, tokens] like all, are the critic's expectations from the token on, itself included. ``gamma`` and
    ``lam`` apply per token that counts; ``lam`` is from 0 (one step ahead) to 1 (the full row).
    """
    check_shapes(mask, token_rewards, values)
    rewards, exact = _exact(token_rewards, mask), _exact(values, mask)
    order = (~mask).int().argsort(dim=1, stable=True)  # tokens that count come first in each row
    packed = exact.gather(1, order)
    sums = rewards.gather(1, order) - packed  # of the others all numbers are 0
    sums[:, :-1] += gamma * packed[:, 1:]
    # Σ (γλ)^k δ_{t+k} over one token, then over 2, 4, 8, ...: few operations, and the same sums in whatever batch.
    ahead, decay = 1, gamma * lam
    while ahead < sums.shape[1]:
        sums[:, :-ahead] += decay * sums[:, ahead:]
        ahead, decay = 2 * ahead, decay * decay
    advantages = torch.zeros_like(exact).scatter_(1, order, sums)
    returns = (advantages + exact).masked_fill(~mask, 0.0)
    return advantages.to(token_rewards.dtype), returns.to(token_rewards.dtype)


@dataclass(frozen=True, slots=True)
class Moments(ReducedSums):
    """Sums from which the mean and variance over tokens are computed."""

    count: Tensor  # tokens that count
    total: Tensor  # of the values
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """The sums over ``values`` [rows, tokens] where ``mask`` (bool) is true."""
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
    """(A − mean) / √(variance + 1e-8), [rows, tokens].

    ``moments``: of all advantages of the step, over all micro-batches and ranks: REINFORCE++, arXiv
    2501.03262, global advantage normalization.
    """
    check_shapes(mask, advantages)
    whitened = (_exact(advantages, mask) - moments.mean) * (moments.variance + VARIANCE_FLOOR).rsqrt()
    return whitened.masked_fill(~mask, 0.0).to(advantages.dtype)


def _centred(rewards: Tensor) -> Tensor:
    """r − mean in float64; exactly 0 for uniform groups, as the mean of equal numbers can differ by rounding."""
    exact = rewards.double()
    return (exact - exact.mean(dim=1, keepdim=True)).masked_fill(uniform_groups(rewards)[:, None], 0.0)


def _exact(values: Tensor, mask: Tensor) -> Tensor:
    return values.detach().double().masked_fill(~mask, 0.0)
