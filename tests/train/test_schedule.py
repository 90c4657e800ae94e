"""The learning-rate factor: its first and last values, its shape, and that no update has rate zero."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.train.schedule import Kind, factor

RUNS = {
    "total": st.integers(1, 60),
    "warmup": st.integers(0, 70),
    "kind": st.sampled_from(["constant", "linear", "cosine"]),
    "final": st.floats(0, 1),
}


@given(**RUNS)
def test_no_update_has_rate_zero_and_none_passes_the_peak(total: int, warmup: int, kind: Kind, final: float) -> None:
    factors = [factor(update, total, warmup, kind, final) for update in range(total)]
    assert all(0 < value <= 1 for value in factors)
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if falling:
        assert falling[0] == 1.0


@given(**RUNS)
def test_after_the_end_the_last_rate_stays(total: int, warmup: int, kind: Kind, final: float) -> None:
    if warmup < total:
        last = factor(total - 1, total, warmup, kind, final)
        assert all(factor(update, total, warmup, kind, final) == last for update in (total, total + 9))


def test_warmup_is_a_line_from_one_part() -> None:
    assert [factor(update, 10, 4, "linear", 0.0) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_shapes(final: float) -> None:
    for update in range(5, 25):
        progress = (update - 5) / 20
        assert factor(update, 25, 5, "constant", final) == 1.0
        assert factor(update, 25, 5, "linear", final) == pytest.approx(1 + (final - 1) * progress)
        assert factor(update, 25, 5, "cosine", final) == pytest.approx(
            final + (1 - final) * math.cos(math.pi * progress / 2) ** 2
        )
