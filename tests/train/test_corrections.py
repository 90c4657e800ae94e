"""Importance weights and their statistics against float64 NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl_cli.train.corrections import truncated_importance_weights


def random_case(seed: int, rows: int, tokens: int, spread: float) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(seed)
    behaviour = -generator.exponential(2.0, (rows, tokens)).astype(np.float32)
    proximal = (behaviour + spread * generator.standard_normal((rows, tokens))).astype(np.float32)
    return proximal, behaviour, generator.random((rows, tokens)) < 0.7


def tensors(proximal: Any, behaviour: Any, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(proximal), torch.from_numpy(behaviour), torch.from_numpy(mask)


CASES = {
    "seed": st.integers(0, 10**6),
    "rows": st.integers(1, 4),
    "tokens": st.integers(1, 12),
    "spread": st.sampled_from([0.0, 0.01, 1.0, 50.0]),
}


@settings(deadline=None)
@given(**CASES, cap=st.sampled_from([0.5, 1.0, 2.0, 1e6, None]))
def test_matches_the_formula(seed: int, rows: int, tokens: int, spread: float, cap: float | None) -> None:
    proximal, behaviour, mask = random_case(seed, rows, tokens, spread)
    gap = proximal.astype(np.float64) - behaviour.astype(np.float64)
    with np.errstate(over="ignore"):
        ratio = np.exp(gap)
    expected = np.where(mask, 1.0 if cap is None else np.minimum(ratio, cap), 0.0)

    weights, sums = truncated_importance_weights(*tensors(proximal, behaviour, mask), cap)
    # The difference of two float32 log-probs is rounded once, which the exponential turns into a relative error.
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5, atol=1e-7)

    summary, count = sums.summary(), max(1, mask.sum())
    kept, gaps = expected[mask], np.abs(gap[mask])
    assert sums.tokens.item() == mask.sum()
    assert cap is None or weights.max() <= cap
    assert summary["importance_mean"] == pytest.approx(kept.sum() / count, rel=1e-5, abs=1e-6)
    assert summary["importance_max"] == pytest.approx(kept.max(initial=0.0), rel=1e-5, abs=1e-6)
    if cap is not None and not np.isclose(ratio[mask], cap, rtol=1e-4).any():
        assert summary["importance_capped_fraction"] == (ratio[mask] > cap).sum() / count
    if kept.sum() > 1e-6:
        assert summary["effective_sample_fraction"] == pytest.approx(
            kept.sum() ** 2 / (kept**2).sum() / count, rel=1e-4
        )
    assert summary["logprob_gap_mean"] == pytest.approx(gaps.sum() / count, rel=1e-5, abs=1e-6)
    assert summary["logprob_gap_max"] == pytest.approx(gaps.max(initial=0.0), rel=1e-5, abs=1e-6)


@settings(deadline=None)
@given(**CASES)
def test_sums_add_over_microbatches(seed: int, rows: int, tokens: int, spread: float) -> None:
    proximal, behaviour, mask = tensors(*random_case(seed, rows, tokens, spread))
    _, whole = truncated_importance_weights(proximal, behaviour, mask, cap=2.0)
    parts = [
        truncated_importance_weights(proximal[i : i + 1], behaviour[i : i + 1], mask[i : i + 1], cap=2.0)[1]
        for i in range(rows)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total.summary() == pytest.approx(whole.summary(), rel=1e-9)


def test_one_heavy_token_leaves_little_effective_sample() -> None:
    behaviour = torch.zeros(1, 4)
    proximal = torch.tensor([[math.log(97.0), 0.0, 0.0, 0.0]])
    _, sums = truncated_importance_weights(proximal, behaviour, torch.ones(1, 4, dtype=torch.bool), cap=1000.0)
    assert sums.summary()["effective_sample_fraction"] == pytest.approx(100**2 / (97**2 + 3) / 4, rel=1e-5)


def test_extremes_are_capped_and_padding_has_no_effect() -> None:
    proximal = torch.tensor([[0.0, -1e4, 0.0, float("nan"), float("inf")]], requires_grad=True)
    behaviour = torch.tensor([[-1e4, 0.0, float("-inf"), 0.0, float("nan")]])
    mask = torch.tensor([[True, True, True, False, False]])
    weights, sums = truncated_importance_weights(proximal, behaviour, mask, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.0, 2.0, 0.0, 0.0]]))
    assert not weights.requires_grad
    assert sums.summary()["importance_capped_fraction"] == pytest.approx(2 / 3)


def test_nan_that_counts_stays_visible() -> None:
    weights, sums = truncated_importance_weights(
        torch.tensor([[float("nan"), 0.0]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), cap=2.0
    )
    assert weights.isnan().tolist() == [[True, False]]
    assert math.isnan(sums.summary()["logprob_gap_max"])


def test_nothing_that_counts_is_no_error() -> None:
    for rows in (0, 2):
        empty = torch.zeros(rows, 3)
        _, sums = truncated_importance_weights(empty, empty, torch.zeros(rows, 3, dtype=torch.bool), cap=2.0)
        assert set(sums.summary().values()) == {0.0}


def test_refuses_inputs_that_do_not_fit() -> None:
    values, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="shapes differ"):
        truncated_importance_weights(values, torch.zeros(2), mask, 2.0)
    with pytest.raises(ValueError, match="bool"):
        truncated_importance_weights(values, values, mask.float(), 2.0)
    for cap in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="cap"):
            truncated_importance_weights(values, values, mask, cap)
