"""Advantages compared with the formulas in NumPy's float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncrl_cli.train.algorithms.advantages import (
    ADVANTAGES,
    advantages_of_parts,
    check_advantages,
    of_scored,
    overlong_penalty,
    running_baseline,
    running_means,
    turn_advantages,
    uniform_groups,
)

pytestmark = pytest.mark.slow

REWARDS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
    elements=st.sampled_from([0.0, 1.0, 0.1, 0.3, -2.5, 7.0]) | st.floats(-10, 10, width=32),
)


def group_norm(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    return np.array([reward - np.delete(rewards, index).mean() for index, reward in enumerate(rewards)])


FORMULAS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "group_norm": group_norm,
    "group_mean": lambda rewards: rewards - rewards.mean(),
    "leave_one_out": leave_one_out,
}


@pytest.mark.parametrize("name", list(ADVANTAGES))
@given(rewards=REWARDS, data=st.data())
def test_masked_rollouts_leave_the_advantages_of_the_group_without_them(
    name: str, rewards: np.ndarray, data: st.DataObject
) -> None:
    masked = data.draw(arrays.arrays(np.bool_, rewards.shape))
    tensor = torch.from_numpy(np.where(masked, np.nan, rewards))
    found = of_scored(ADVANTAGES[name], tensor)
    assert not found[torch.from_numpy(masked)].any()
    for group, own in enumerate(masked):
        if own.all():
            continue
        alone = torch.from_numpy(rewards[group][~own][None])
        assert torch.equal(found[group][~torch.from_numpy(own)], ADVANTAGES[name](alone)[0])
        assert uniform_groups(tensor)[group] == uniform_groups(alone)[0]


def test_a_function_that_breaks_on_a_masked_group_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        of_scored(lambda rewards: rewards / (rewards.shape[1] - 1), torch.tensor([[1.0, torch.nan]]))


@pytest.mark.parametrize("name", list(ADVANTAGES))
@given(rewards=REWARDS)
def test_matches_the_formula(name: str, rewards: np.ndarray) -> None:
    uniform = np.isclose(rewards, rewards[:, :1], rtol=1e-9, atol=1e-9).all(axis=1)
    expected = np.zeros(rewards.shape)
    for group in np.flatnonzero(~uniform):
        expected[group] = FORMULAS[name](rewards[group].astype(np.float64))
    found = ADVANTAGES[name](torch.from_numpy(rewards))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(uniform_groups(torch.from_numpy(rewards)).numpy(), uniform)
    assert not found[torch.from_numpy(uniform)].any()


@given(
    rewards=st.lists(st.floats(-10, 10, width=32) | st.just(0.0), min_size=1, max_size=6),
    half_life=st.floats(0.5, 50),
    data=st.data(),
)
def test_running_mean_follows_its_recursion_and_advantages_are_normalized_over_the_step(
    rewards: list[float], half_life: float, data: st.DataObject
) -> None:
    visits = st.lists(st.floats(-10, 10, width=32), max_size=8)
    earlier = data.draw(st.lists(visits, min_size=len(rewards), max_size=len(rewards)))
    mean, keep = np.mean(rewards), 2 ** (-1 / half_life)
    expected = []
    for known in earlier:
        total, weight = 0.0, 0.0
        for reward in reversed(known):  # each visit multiplies the weights of earlier visits
            total, weight = keep * total + reward, keep * weight + 1.0
        expected.append((mean + total) / (1.0 + weight))
    given_rewards = torch.tensor(rewards, dtype=torch.float64)[:, None]
    found = running_means(given_rewards, earlier, half_life)
    np.testing.assert_allclose(found[:, 0].numpy(), expected, rtol=1e-9, atol=1e-9)
    advantages = of_scored(running_baseline, given_rewards, {"baseline": found})[:, 0].numpy()
    differences = np.array(rewards) - found[:, 0].numpy()
    even = np.isclose(differences, differences[0], rtol=1e-9, atol=1e-9).all()
    np.testing.assert_allclose(advantages, np.zeros_like(differences) if even else group_norm(differences), atol=1e-6)


def test_a_users_advantages_are_checked() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.5, 0.0]])
    assert check_advantages(rewards, rewards) is rewards
    for result, message in (
        (rewards.tolist(), "must be a tensor, not list"),
        (rewards[0], r"must be torch.float32 \[2, 2\] like the rewards, not torch.float32 \[2\]"),
        (rewards.double(), r"not torch.float64 \[2, 2\]"),
        (rewards / torch.tensor([[1.0], [0.0]]), r"of group 1 are not finite: \[inf, nan\] for rewards \[0.5, 0.0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check_advantages(result, rewards)


@given(length=st.integers(0, 40), maximum=st.integers(1, 30), share=st.floats(0, 1))
def test_overlong_penalty_follows_dapo(length: int, maximum: int, share: float) -> None:
    buffer = max(1, round(share * maximum))
    if length <= maximum - buffer:
        penalty = 0.0
    elif length <= maximum:
        penalty = ((maximum - buffer) - length) / buffer
    else:
        penalty = -1.0
    found = overlong_penalty(torch.tensor([[length]]), maximum, buffer)
    assert (found.shape, found.dtype) == ((1, 1), torch.float32)
    assert found.item() == pytest.approx(-penalty, rel=1e-6)


TURNS = st.lists(  # one group: the rewards of each rollout's turns
    st.lists(st.sampled_from([0.0, 1.0]) | st.floats(-3, 3), min_size=1, max_size=4), min_size=1, max_size=5
)


def padded(groups: list[list[list[float]]]) -> torch.Tensor:
    most = max(len(turns) for group in groups for turns in group)
    return torch.tensor([[turns + [torch.nan] * (most - len(turns)) for turns in group] for group in groups]).double()


@given(group=TURNS, gamma=st.sampled_from([1.0, 0.5, 0.0]), scale=st.booleans())
def test_turns_are_compared_with_the_same_turn_of_others_that_have_it(
    group: list[list[float]], gamma: float, scale: bool
) -> None:
    baseline = ADVANTAGES["group_norm" if scale else "group_mean"]
    found = turn_advantages(padded([group]), gamma, baseline)[0].numpy()
    for turn in range(found.shape[1]):
        having = [index for index, turns in enumerate(group) if len(turns) > turn]
        to_go = np.array([sum(gamma**k * r for k, r in enumerate(group[index][turn:])) for index in having])
        # 1e-9 decides whether rewards are equal; around it the two may disagree.
        spread = np.abs(to_go - to_go[0]).max()
        if not 1e-12 < spread < 1e-6:
            expected = to_go - to_go.mean() if not scale else group_norm(to_go) if spread else np.zeros(len(to_go))
            np.testing.assert_allclose(found[having, turn], expected, rtol=1e-5, atol=1e-6)
        assert not np.delete(found[:, turn], having).any()


def test_masked_rollouts_have_no_turn() -> None:
    turns, baseline = padded([[[1.0, 0.0], [0.0, 3.0], [2.0]], [[0.0], [5.0], [5.0]]]), ADVANTAGES["group_mean"]
    masked = turns.clone()
    masked[0, 1] = torch.nan
    found = turn_advantages(masked, 1.0, baseline)
    assert not found[0, 1].any()
    assert torch.equal(found[0, [0, 2]], turn_advantages(turns[:1, [0, 2]], 1.0, baseline)[0])


@given(
    parts=arrays.arrays(np.float64, (3, 4, 5), elements=st.sampled_from([0.0, 0.5, 1.0, 1.0, np.nan])),
    weights=st.lists(st.sampled_from([0.3, 1.0, -2.0]), min_size=3, max_size=3),
)
def test_parts_are_normalized_one_by_one_as_gdpo_says(parts: np.ndarray, weights: list[float]) -> None:
    total = np.zeros(parts.shape[1:])
    for weight, part in zip(weights, parts, strict=True):
        for group, values in enumerate(part):
            has = ~np.isnan(values)
            if has.sum() > 1 and np.ptp(values[has]) > 0:
                total[group, has] += weight * group_norm(values[has])
    known = total[~np.isnan(parts).all(axis=0)]
    expected = (total - total.mean()) / ((known.std(ddof=1) if len(known) > 1 else 0.0) + 1e-6)
    found = advantages_of_parts(torch.from_numpy(parts), weights).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert abs(total.mean()) < 1e-9, "so the mean over the batch need not be subtracted"


def test_a_function_gets_the_lengths_and_metrics_of_the_scored_rollouts() -> None:
    rewards = torch.tensor([[1.0, torch.nan, 0.0], [2.0, 3.0, 4.0]])
    lengths = torch.tensor([[10, 20, 30], [40, 50, 60]])
    metrics = {"format": torch.tensor([[0.5, 0.6, torch.nan], [0.1, 0.2, 0.3]])}
    seen = []

    def function(rewards: torch.Tensor, lengths: torch.Tensor, metrics: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append((lengths.tolist(), metrics["format"].nan_to_num(-1).tolist()))
        return rewards / lengths

    found = of_scored(function, rewards, {"lengths": lengths, "metrics": metrics})
    assert [where for where, _ in seen] == [[[10, 30]], [[40, 50, 60]]]
    assert seen[0][1][0] == pytest.approx([0.5, -1])
    assert found[0].tolist() == pytest.approx([0.1, 0.0, 0.0])
