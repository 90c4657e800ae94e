"""The critic's loss compared with NumPy in float64, and its sums over any split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from matrices import SIZES, Matrices, exact, matrices, tensors, with_garbage

from asyncrl_cli.train.algorithms.value_loss import ValueSums, value_loss

CASES = {**SIZES, "clip": st.sampled_from([None, 0.2, 1.0])}


def evaluated(case: Matrices, clip: float | None) -> tuple[float, ValueSums, np.ndarray]:
    """The numbers of ``matrices`` as values, old values and returns."""
    values, old, returns, mask = tensors(case, "logprobs", "proximal", "reference", "mask")
    values.requires_grad_()
    loss, sums = value_loss(values, old, returns, mask, clip=clip, denominator=5.0)
    loss.backward()
    assert values.grad is not None
    return loss.item(), sums, values.grad.numpy()


@given(**CASES)
@example(seed=509, rows=1, tokens=10, spread=3.0, clip=1.0)  # a value inside the range that leaves it by rounding
def test_matches_the_formula(seed: int, rows: int, tokens: int, spread: float, clip: float | None) -> None:
    case = matrices(seed, rows, tokens, spread)
    loss, sums, gradient = evaluated(case, clip)
    double, mask = exact(case), case["mask"]
    value, old, target = double["logprobs"], double["proximal"], double["reference"]
    near = value if clip is None else old + np.clip(value - old, -clip, clip)
    squared, squared_near = (value - target) ** 2, (near - target) ** 2
    expected = 0.5 * np.maximum(squared, squared_near)[mask].sum() / 5
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-9)
    held = squared_near > squared * (1 + 1e-5) + 1e-9
    free = squared_near < squared * (1 - 1e-5) - 1e-9
    np.testing.assert_array_equal(gradient[held & mask], 0)
    inside = (free | (value == near)) & mask
    np.testing.assert_allclose(gradient[inside], (value - target)[inside] / 5, rtol=1e-5, atol=1e-6)
    assert (held & mask).sum() <= sums.clipped.item() <= (~free & (value != near) & mask).sum()

    error, summary = (target - value)[mask], sums.summary()
    if mask.sum() > 1:
        explained = 1 - error.var() / target[mask].var()
        assert summary["explained_variance"] == pytest.approx(explained, rel=1e-6, abs=1e-6)
        assert summary["error_mean"] == pytest.approx(error.mean(), rel=1e-5, abs=1e-6)
        assert summary["return_mean"] == pytest.approx(target[mask].mean(), rel=1e-6)


@given(**CASES, columns=st.integers(0, 3))
def test_rows_padding_and_splits_change_nothing(
    seed: int, rows: int, tokens: int, spread: float, clip: float | None, columns: int
) -> None:
    case = matrices(seed, rows, tokens, spread)
    whole, sums, gradient = evaluated(case, clip)
    dirty = with_garbage(case, columns)
    parts = [evaluated({n: a[row : row + 1] for n, a in dirty.items()}, clip) for row in reversed(range(rows))]
    assert sum(loss for loss, _, _ in parts) == pytest.approx(whole, rel=1e-6, abs=1e-9)
    total = parts[0][1]
    for _, part, _ in parts[1:]:
        total = total + part
    assert total.summary() == pytest.approx(sums.summary(), rel=1e-6, abs=1e-6)
    again = np.concatenate([part for _, _, part in reversed(parts)])
    np.testing.assert_allclose(again[:, :tokens], gradient, rtol=1e-6)
    assert not again[~dirty["mask"]].any()


def test_equal_returns_have_no_variance_to_explain() -> None:
    ones = torch.ones(2, 3)
    _, sums = value_loss(0.3 * ones, ones, 0.1 * ones, ones.bool(), clip=None, denominator=1.0)
    assert sums.summary()["explained_variance"] == 0.0
    _, nothing = value_loss(ones, ones, ones, ~ones.bool(), clip=None, denominator=1.0)
    assert set(nothing.summary().values()) == {0.0}
