"""Advantages: how much better than expected each sampled token was, computed from a step's rewards.

With a group as the baseline (GRPO, Dr. GRPO, RLOO) an ``AdvantageFunction`` compares a rollout with the other rollouts
of its prompt, and all its tokens get the result; ``turn_advantages`` compares turn by turn. Without a group
(REINFORCE++) and with a critic (PPO) the rewards are carried back along a row's tokens: ``rewards_to_go`` and ``gae``.
``whiten`` then scales over the whole step.

Matrices of rewards are [groups, group_size]; matrices of tokens are right-padded, [rows, tokens]. Only tokens that
count (mask true: the policy sampled them) are steps of an episode. Other tokens, such as a tool's answer, are skipped:
the step after a token is the next token that counts, without a discount for the tokens between them.

Invariants: with a group as the baseline, the advantages of a group with equal rewards, or of a single rollout, are
exactly zero. Where the mask is false, results are 0, whatever the arguments hold there, including NaN. Everything is
computed in float64 and returned in the first argument's dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.records.training import REWARD_TOLERANCE
from asyncrl_cli.train.algorithms.reduced_sums import ReducedSums, check_shapes

DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation, so rewards that differ only by rounding have no effect."""

VARIANCE_FLOOR = 1e-8
"""Added to the variance when whitening divides by it."""

AdvantageFunction = Callable[..., Tensor]
"""Takes ``rewards`` [groups, rollouts], floating point, by name; returns advantages of the same shape and dtype. A
user's function may also ask for ``lengths`` and ``metrics``; ``of_scored`` checks its result."""


def uniform_groups(rewards: Tensor) -> Tensor:
    """bool, [groups]: true if a group's rewards are equal up to ``REWARD_TOLERANCE``, so there is nothing to learn. NaN
    (a masked rollout) is ignored."""
    masked = rewards.isnan()
    first_reward = rewards.gather(1, masked.int().argmin(dim=1, keepdim=True))
    equal = torch.isclose(rewards, first_reward, rtol=REWARD_TOLERANCE, atol=REWARD_TOLERANCE)
    return (equal | masked).all(dim=1)


def group_norm(rewards: Tensor) -> Tensor:
    """(r − mean) / (s + 1e-6), with the sample's standard deviation s (divisor group_size − 1).

    GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.2, which leaves the divisor open.
    """
    centred = _centred(rewards)
    variance = centred.square().sum(dim=1, keepdim=True) / max(1, rewards.shape[1] - 1)
    return (centred / (variance.sqrt() + DEVIATION_FLOOR)).to(rewards.dtype)


def group_mean(rewards: Tensor) -> Tensor:
    """r − mean. Dr. GRPO, arXiv 2503.20783, section 3.2: dividing by the deviation would give more weight to questions
    that are nearly always, or nearly never, answered."""
    return _centred(rewards).to(rewards.dtype)


def leave_one_out(rewards: Tensor) -> Tensor:
    """r − mean of the group's other rewards, which is (r − mean)·n / (n − 1) with n rollouts.

    RLOO, arXiv 2402.14740, section 3.2. A group of one has advantage 0.
    """
    size = rewards.shape[1]
    return (_centred(rewards) * (size / max(1, size - 1))).to(rewards.dtype)


def running_baseline(rewards: Tensor, baseline: Tensor) -> Tensor:
    """r − b, normalized over all groups of the step as by ``group_norm`` within one.

    SPO, arXiv 2509.13232. ``rewards`` and ``baseline`` (``running_means``): [groups, 1].
    """
    return group_norm((rewards - baseline).reshape(1, -1)).view_as(rewards)


def running_means(rewards: Tensor, earlier: Sequence[Sequence[float]], half_life: float) -> Tensor:
    """b = (m + Σ w_k·r_k) / (1 + Σ w_k) with w_k = 2^(−k / ``half_life``) and m the mean of ``rewards``.

    r_k is the reward of a prompt's k-th newest visit, from 0 on. This is SPO's tracker with a constant forgetting rate,
    but it begins with one visit of reward m instead of rewards sampled in advance. So a prompt's first visit has b = m,
    and a single earlier reward, which is mostly noise, counts half.

    ``rewards``: [groups, rollouts], NaN where masked; ``earlier``: each group's r_k. Returns a tensor like ``rewards``,
    all NaN if no reward is known.
    """
    mean = rewards.nanmean().item()
    means = []
    for earlier_rewards in earlier:
        weights = [2.0 ** (-k / half_life) for k in range(len(earlier_rewards))]
        means.append((mean + sum(map(operator.mul, weights, earlier_rewards))) / (1.0 + sum(weights)))
    return torch.tensor(means, dtype=rewards.dtype)[:, None].expand_as(rewards)


ADVANTAGES: dict[str, AdvantageFunction] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}
"""The functions by their names in a spec. ``none`` and ``gae`` work on tokens: ``rewards_to_go`` and ``gae``."""
BASELINES_OF_TURNS: dict[str, AdvantageFunction] = {"turn_norm": group_norm, "turn_mean": group_mean}
"""The baseline of ``turn_advantages`` by the estimator's name in a spec."""


def of_scored(function: AdvantageFunction, rewards: Tensor, extra_arguments: Mapping[str, Any] | None = None) -> Tensor:
    """Return the advantages of rewards [groups, group_size], in the same shape and dtype. NaN marks a masked rollout.

    A masked rollout gets 0, and the rest is treated as a group without it: the function is called once for each number
    of scored rollouts, with all groups that have this number. ``extra_arguments``: further arguments by name, tensors
    like the rewards or mappings of names to such tensors. Raises ``ValueError`` like ``check_advantages``.
    """
    scored = ~rewards.isnan()
    counts = scored.sum(dim=1)
    advantages = torch.zeros_like(rewards)
    for count in sorted({*counts.tolist()} - {0}):
        selection = scored & (counts == count)[:, None]
        inputs = _selected({"rewards": rewards, **(extra_arguments or {})}, selection, count)
        advantages[selection] = check_advantages(function(**inputs), inputs["rewards"]).flatten()
    return advantages


def _selected(values: Mapping[str, Any], selection: Tensor, count: int) -> dict[str, Any]:
    return {
        name: _selected(value, selection, count) if isinstance(value, Mapping) else value[selection].view(-1, count)
        for name, value in values.items()
    }


def check_advantages(result: object, rewards: Tensor) -> Tensor:
    """Return the ``result`` of an ``AdvantageFunction`` for ``rewards``, if it is valid.

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
        invalid_values, group_rewards = result[group].tolist(), rewards[group].tolist()
        raise ValueError(f"advantages of group {group} are not finite: {invalid_values} for rewards {group_rewards}")
    return result


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Return a response's length penalty: 0 up to ``max_tokens`` − ``buffer_tokens``, then rising linearly to 1.

    Soft overlong punishment, DAPO, arXiv 2503.14476, eq. 13, where it is negative and added to the reward.

    ``buffer_tokens`` is from 1 to ``max_tokens``. Returns float32 in [0, 1], with the shape of ``lengths``.
    """
    over = lengths.double() - (max_tokens - buffer_tokens)
    return (over / buffer_tokens).clamp(0.0, 1.0).float()


def rewards_at_turn_ends(rewards: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
    """Place each turn's reward at its last token that counts, and 0 elsewhere.

    A rollout may have several rows. The rewards of turns in other rows are added to the last turn before them, so the
    rewards from a token on are the rewards of its turn and of all later turns. A row without a token that counts gets
    no reward.

    ``rewards``: [rows, turns] of each row's rollout, floating point, NaN after its last turn; ``turns``: int64
    [rows, tokens], the turn of each token, which never decreases along a row; ``mask``: bool [rows, tokens]. Returns
    [rows, tokens] in the dtype of ``rewards``.
    """
    check_shapes(mask, turns)
    to_go = rewards.nan_to_num().flip(1).cumsum(dim=1).flip(1)
    to_go = torch.nn.functional.pad(to_go, (0, 1))  # nothing follows the last turn
    end_turn = to_go.shape[1] - 1
    order = (~mask).int().argsort(dim=1, stable=True)  # tokens that count come first in each row
    packed = turns.masked_fill(~mask, end_turn).gather(1, order)
    following = torch.nn.functional.pad(packed[:, 1:], (0, 1), value=end_turn)
    packed_rewards = to_go.gather(1, packed) - to_go.gather(1, following)
    return torch.zeros_like(packed_rewards).scatter_(1, order, packed_rewards)


def turn_advantages(rewards: Tensor, gamma: float, baseline: AdvantageFunction) -> Tensor:
    """Compare the rewards from each turn on with the same turn of the group's other rollouts.

    G_k = r_k + γ·G_{k+1}, with ``baseline`` (``group_norm`` or ``group_mean``) over a group's G_k. Subtracting a
    baseline from each r_k before they are summed would be biased: the sum would have a term for each turn, and the
    policy decides how many turns there are (verl, issue 7244). Here turn k has one baseline, independent of later
    turns.

    ``rewards``: [groups, group_size, turns], floating point, NaN after a rollout's last turn. Returns advantages of the
    same shape, 0 where there is no turn, or where no other rollout of the group has the turn.
    """
    groups, size, count = rewards.shape
    to_go = rewards.nan_to_num().double()
    for turn in reversed(range(count - 1)):
        to_go[..., turn] += gamma * to_go[..., turn + 1]
    by_turn = to_go.masked_fill(rewards.isnan(), float("nan")).transpose(1, 2).reshape(groups * count, size)
    return of_scored(baseline, by_turn).view(groups, count, size).transpose(1, 2).to(rewards.dtype)


def advantages_of_parts(reward_parts: Tensor, weights: Sequence[float]) -> Tensor:
    """Σ w·``group_norm`` of each part, divided by (the sum's deviation over all rollouts + 1e-6).

    GDPO, arXiv 2601.05242: each reward is normalized within the group, the weighted sum over the batch. The sum's mean
    over the batch is not subtracted: it is 0, because every group's mean is 0.

    ``reward_parts``: [parts, groups, group_size], floating point, NaN where a rollout lacks the part: it adds nothing
    to this rollout, and the part's baseline is computed from the other rollouts. Returns [groups, group_size].
    """
    total = sum(
        weight * of_scored(group_norm, reward_part) for weight, reward_part in zip(weights, reward_parts, strict=True)
    )
    assert isinstance(total, Tensor)
    scored = total[~reward_parts.isnan().all(dim=0)]
    deviation = scored.std() if len(scored) > 1 else scored.new_zeros(())
    return total / (deviation + DEVIATION_FLOOR)


def rewards_to_go(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ·G of the next token that counts; [rows, tokens] like both arguments.

    For REINFORCE++ (arXiv 2501.03262), where the step is the baseline (``whiten``).
    """
    # With values of 0 and lam of 1, the advantages are these sums.
    return gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma=gamma, lam=1.0)[0]


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, arXiv 1506.02438, eq. 16, and the returns that a critic learns.

    With V' the value of the next token that counts (0 after the last): δ_t = r_t + γ·V' − V_t, A_t = δ_t + γ·λ·A', and
    the return is A_t + V_t.

    All tensors are [rows, tokens]. ``values``: the critic's expectation of the rewards from a token on, including the
    token's own. ``gamma`` and ``lam`` apply per token that counts; ``lam`` is from 0 (one step ahead) to 1 (full row).
    """
    check_shapes(mask, token_rewards, values)
    rewards, exact = _exact(token_rewards, mask), _exact(values, mask)
    order = (~mask).int().argsort(dim=1, stable=True)  # tokens that count come first in each row
    packed = exact.gather(1, order)
    sums = rewards.gather(1, order) - packed  # all values of other tokens are 0
    sums[:, :-1] += gamma * packed[:, 1:]
    # Σ (γλ)^k δ_{t+k} over one token, then over 2, 4, 8, ...: few operations, and the same sums in every batch.
    ahead, decay = 1, gamma * lam
    while ahead < sums.shape[1]:
        sums[:, :-ahead] += decay * sums[:, ahead:]
        ahead, decay = 2 * ahead, decay * decay
    advantages = torch.zeros_like(exact).scatter_(1, order, sums)
    returns = (advantages + exact).masked_fill(~mask, 0.0)
    return advantages.to(token_rewards.dtype), returns.to(token_rewards.dtype)


@dataclass(frozen=True, slots=True)
class Moments(ReducedSums):
    """Sums for the mean and variance over tokens."""

    count: Tensor  # tokens that count
    total: Tensor  # sum of values
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Sum over ``values`` [rows, tokens] where ``mask`` (bool) is true."""
        check_shapes(mask, values)
        exact = _exact(values, mask)
        return cls(mask.sum().double(), exact.sum(), exact.square().sum())

    @property
    def mean(self) -> Tensor:
        """float64; 0 when nothing counts."""
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """Sample variance (divisor count − 1), float64; 0 for fewer than two tokens."""
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
    """r − mean in float64; exactly 0 for uniform groups, where rounding could make the mean differ from the rewards."""
    exact = rewards.double()
    return (exact - exact.mean(dim=1, keepdim=True)).masked_fill(uniform_groups(rewards)[:, None], 0.0)


def _exact(values: Tensor, mask: Tensor) -> Tensor:
    return values.detach().double().masked_fill(~mask, 0.0)
