"""Weights, rejections and their statistics compared with NumPy in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import SIZES, Matrices, exact, matrices, tensors, with_garbage

from asyncrl_cli.spec.algorithm import CorrectionSpec
from asyncrl_cli.train.algorithms.corrections import CorrectionSums, correct

LEVELS = ("token", "sequence", "geometric")
REJECTIONS: list[dict[str, Any]] = [
    {"reject_by": by, "reject_over": over, **({"reject_low": 0.7} if by == "k1" and over != "token" else {})}
    for by, over in itertools.product(("k1", "k2", "k3"), ("token", "sequence_mean", "sequence_sum", "sequence_max"))
    if (by, over) != ("k1", "sequence_max")
]


def correcting(**settings: Any) -> CorrectionSpec:
    """Only the corrections of these settings."""
    return CorrectionSpec(preset="decoupled", **settings)


CORRECTIONS = st.builds(
    lambda weights, rejection, high: correcting(**weights, **rejection, **({"reject_high": high} if rejection else {})),
    st.sampled_from(
        [
            {},
            *({"level": level} for level in LEVELS),
            *({"level": level, "cap": 1.5} for level in LEVELS),
            *({"level": level, "mask_low": 0.5, "mask_high": 5.0} for level in LEVELS),
            {"level": "token", "mask_low": 0.9},
            {"level": "token", "mask_high": 4.0, "cap": 1.2},
        ]
    ),
    st.sampled_from([{}, *REJECTIONS]),
    st.sampled_from([1.05, 2.0]),
)


def evaluated(case: Matrices, correction: CorrectionSpec) -> tuple[np.ndarray, CorrectionSums]:
    weights, sums = correct(*tensors(case, "proximal", "behaviour", "mask"), correction)
    return weights.numpy(), sums


def statistic(gap: np.ndarray, by: str, over: str) -> np.ndarray:
    """The values that are compared with the bounds, for one row's proximal − behaviour: one per token, or one."""
    gap = np.clip(gap, -20, 20)
    distance = {"k1": -gap, "k2": gap**2 / 2, "k3": np.exp(gap) - 1 - gap}[by]
    of_row = {"sequence_mean": np.mean, "sequence_sum": np.sum, "sequence_max": np.max}
    return distance if over == "token" else of_row[over](distance) * np.ones_like(distance)


def expected(case: Matrices, correction: CorrectionSpec) -> tuple[dict[str, np.ndarray], bool]:
    """Values per token, 0 where the mask is false; and whether some value is so near a bound that rounding matters."""
    double, mask = exact(case), case["mask"]
    found = {name: np.zeros(mask.shape) for name in ("weight", "raw", "masked", "capped", "rejected")}
    close = False
    for row in np.flatnonzero(mask.any(axis=1)):
        counts = mask[row]
        gap = (double["proximal"] - double["behaviour"])[row, counts]
        log = {"token": gap, "sequence": gap.sum(), "geometric": gap.mean()}[correction.level or "token"]
        raw = np.exp(np.clip(log, -20, 20)) * np.ones_like(gap)
        low, high, cap = correction.mask_low or 0.0, correction.mask_high or np.inf, correction.cap or np.inf
        masked = (raw < low) | (raw > high)
        rejected = np.zeros_like(masked)
        if correction.reject_by is not None:
            assert correction.reject_high is not None
            distance = statistic(gap, correction.reject_by, correction.reject_over)
            lowest, highest = -np.inf, correction.reject_high
            if correction.reject_by == "k1":
                lowest, highest = np.log(correction.reject_low or 1 / highest), np.log(highest)
            rejected = (distance < lowest) | (distance > highest)
            close |= bool(np.isclose(distance[:, None], [lowest, highest], rtol=1e-5, atol=1e-5).any())
        close |= bool(np.isclose(raw[:, None], [low, high, cap], rtol=1e-5).any())
        weight = np.ones_like(gap) if correction.level is None else np.minimum(raw, cap)
        numbers = {"raw": raw, "masked": masked, "capped": (raw > cap) & ~masked, "rejected": rejected}
        for name, value in (numbers | {"weight": np.where(masked | rejected, 0, weight)}).items():
            found[name][row, counts] = value
    return found, close


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(**SIZES, correction=CORRECTIONS)
def test_weights_and_sums_match_their_definitions(
    seed: int, rows: int, tokens: int, spread: float, correction: CorrectionSpec
) -> None:
    case = matrices(seed, rows, tokens, spread)
    wanted, close = expected(case, correction)
    if close:
        return
    weights, sums = evaluated(case, correction)
    # The difference of two float32 log-probs is rounded once, which becomes a relative error of the exponential.
    np.testing.assert_allclose(weights, wanted["weight"], rtol=1e-5, atol=1e-7)

    mask, summary = case["mask"], sums.summary()
    count, weight = max(1, mask.sum()), wanted["weight"]
    gap = (exact(case)["proximal"] - exact(case)["behaviour"])[mask]
    all_rejected = mask.any(axis=1) & (~mask | (wanted["rejected"] == 1)).all(axis=1)
    assert summary == pytest.approx(
        {
            "importance_mean": weight.sum() / count,
            "importance_max": weight.max(initial=0.0),
            "importance_capped_fraction": wanted["capped"].sum() / count,
            "importance_masked_fraction": wanted["masked"].sum() / count,
            "effective_sample_fraction": weight.sum() ** 2 / (weight**2).sum() / count if weight.any() else 0.0,
            "rejected_token_fraction": wanted["rejected"].sum() / count,
            "rejected_row_fraction": all_rejected.sum() / max(1, mask.any(axis=1).sum()),
            "kl_behaviour": (np.exp(gap) - 1 - gap).sum() / count,
            "logprob_gap_mean": np.abs(gap).sum() / count,
            "logprob_gap_max": np.abs(gap).max(initial=0.0),
        },
        rel=1e-5,
        abs=1e-6,
    )


@given(**SIZES, correction=CORRECTIONS, columns=st.integers(0, 3))
def test_rows_padding_garbage_and_splits_change_nothing(
    seed: int, rows: int, tokens: int, spread: float, correction: CorrectionSpec, columns: int
) -> None:
    case = matrices(seed, rows, tokens, spread)
    weights, sums = evaluated(case, correction)
    dirty = with_garbage(case, columns)
    parts = [evaluated({n: a[row : row + 1] for n, a in dirty.items()}, correction) for row in reversed(range(rows))]
    again = np.concatenate([part for part, _ in reversed(parts)])
    np.testing.assert_allclose(again[:, :tokens], weights, rtol=1e-6)
    assert not again[~dirty["mask"]].any()
    total = parts[0][1]
    for _, part in parts[1:]:
        total = total + part
    assert total.summary() == pytest.approx(sums.summary(), rel=1e-6, abs=1e-9)


def test_extremes_are_capped_and_padding_has_no_effect() -> None:
    proximal = torch.tensor([[0.0, -1e4, 0.0, float("nan"), float("inf")]], requires_grad=True)
    behaviour = torch.tensor([[-1e4, 0.0, float("-inf"), 0.0, float("nan")]])
    mask = torch.tensor([[True, True, True, False, False]])
    weights, sums = correct(proximal, behaviour, mask, correcting(level="token", cap=2.0))
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.0, 2.0, 0.0, 0.0]]))
    assert not weights.requires_grad
    assert sums.summary()["importance_capped_fraction"] == pytest.approx(2 / 3)
    uncapped, _ = correct(proximal, behaviour, mask, correcting(level="sequence"))
    assert uncapped.isfinite().all()


def test_nan_that_counts_stays_visible_and_is_not_rejected() -> None:
    proximal, ones = torch.tensor([[float("nan"), 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    for rejection in ({}, {"reject_by": "k1", "reject_over": "token", "reject_high": 2.0}):
        correction = correcting(level="token", cap=2.0, mask_low=0.5, mask_high=5.0, **rejection)
        weights, sums = correct(proximal, torch.zeros(1, 2), ones, correction)
        assert weights.isnan().tolist() == [[True, False]]
        assert math.isnan(sums.summary()["logprob_gap_max"])


def test_a_batch_without_counted_tokens_is_allowed() -> None:
    for rows, correction in itertools.product(
        (0, 2),
        (correcting(), correcting(level="sequence", reject_by="k2", reject_over="sequence_max", reject_high=1.0)),
    ):
        empty = torch.zeros(rows, 3)
        _, sums = correct(empty, empty, torch.zeros(rows, 3, dtype=torch.bool), correction)
        assert set(sums.summary().values()) == {0.0}
