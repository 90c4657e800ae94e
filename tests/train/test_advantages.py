"""Advantages against the formula in NumPy's float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from asyncrl_cli.train.advantages import group_advantages, uniform_groups

REWARDS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
    elements=st.sampled_from([0.0, 1.0, 0.1, 0.3, -2.5, 7.0]) | st.floats(-10, 10, width=32),
)


@settings(deadline=None)
@given(rewards=REWARDS, normalize=st.booleans())
def test_matches_the_formula(rewards: np.ndarray, normalize: bool) -> None:
    exact = rewards.astype(np.float64)
    expected = exact - exact.mean(axis=1, keepdims=True)
    if normalize:
        expected /= exact.std(axis=1, keepdims=True) + 1e-6
    uniform = rewards.min(axis=1) == rewards.max(axis=1)
    expected[uniform] = 0.0
    found = group_advantages(torch.from_numpy(rewards), normalize)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(uniform_groups(torch.from_numpy(rewards)).numpy(), uniform)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3e6, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(normalize: bool, value: float, size: int, dtype: torch.dtype) -> None:
    assert not group_advantages(torch.full((2, size), value, dtype=dtype), normalize).any()


def test_right_and_wrong_answers_weigh_against_each_other() -> None:
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]), normalize=True)
    expected = torch.tensor([[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], [1.0, 1.0, -1.0, -1.0]])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(rewards=REWARDS, scale=st.sampled_from([0.5, 4.0, 64.0]))
def test_scale_matters_only_without_normalization(rewards: np.ndarray, scale: float) -> None:
    once, scaled = torch.from_numpy(rewards).double(), scale * torch.from_numpy(rewards).double()
    torch.testing.assert_close(group_advantages(scaled, False), scale * group_advantages(once, False))
    spread = once.amax(dim=1) - once.amin(dim=1) > 0.1
    torch.testing.assert_close(
        group_advantages(scaled, True)[spread], group_advantages(once, True)[spread], rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    "rewards",
    [torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[0.0, float("nan")]])],
)
def test_refuses_what_is_not_a_matrix_of_finite_numbers(rewards: Tensor) -> None:
    with pytest.raises(ValueError, match="rewards must be"):
        group_advantages(rewards, True)
