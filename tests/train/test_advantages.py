"""Advantages compared with the formulas in NumPy's float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncrl_cli.train.algorithms.advantages import (
    ADVANTAGES,
    check_advantages,
    of_scored,
    overlong_penalty,
    uniform_groups,
)

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


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    rewards = torch.tensor([[0.1 + 0.2, 0.3], [0.3 + 1e-8, 0.3]], dtype=torch.float64)
    assert uniform_groups(rewards).tolist() == [True, False]
    assert not ADVANTAGES["group_norm"](rewards)[0].any()


@pytest.mark.parametrize("name", list(ADVANTAGES))
@settings(deadline=None)
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
@settings(deadline=None)
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


@pytest.mark.parametrize("name", list(ADVANTAGES))
@settings(deadline=None)
@given(rewards=REWARDS, seed=st.integers(0, 1000))
def test_order_of_groups_and_rollouts_changes_nothing(name: str, rewards: np.ndarray, seed: int) -> None:
    generator = np.random.default_rng(seed)
    groups, rollouts = (generator.permutation(size) for size in rewards.shape)
    found = ADVANTAGES[name](torch.from_numpy(rewards)).numpy()
    again = ADVANTAGES[name](torch.from_numpy(rewards[groups][:, rollouts])).numpy()
    np.testing.assert_allclose(again, found[groups][:, rollouts], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3e6, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name: str, value: float, size: int, dtype: torch.dtype) -> None:
    assert not ADVANTAGES[name](torch.full((2, size), value, dtype=dtype)).any()


def test_right_and_wrong_answers_weigh_against_each_other() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    root = 0.75**0.5
    norm = torch.tensor([[1.5, -0.5, -0.5, -0.5], [root, root, -root, -root]])
    torch.testing.assert_close(ADVANTAGES["group_norm"](rewards), norm, rtol=1e-5, atol=1e-5)
    third, whole = 1 / 3, 2 / 3
    others = torch.tensor([[1.0, -third, -third, -third], [whole, whole, -whole, -whole]])
    torch.testing.assert_close(ADVANTAGES["leave_one_out"](rewards), others)


def test_what_a_users_estimator_returns_is_looked_at() -> None:
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
def test_the_overlong_lose_as_dapo_says(length: int, maximum: int, share: float) -> None:
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
