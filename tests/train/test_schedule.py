"""The learning-rate factor: its first and last values, its shape, and that no update has rate zero."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.spec.inputs import RateSchedule
from asyncrl_cli.train.schedule import factor

TOTALS = st.integers(1, 60)
SCHEDULES = st.builds(
    RateSchedule,
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_updates=st.integers(0, 70),
    final_fraction=st.floats(0, 1),
)


@given(TOTALS, SCHEDULES)
def test_no_update_has_rate_zero_and_none_passes_the_peak(total: int, schedule: RateSchedule) -> None:
    factors = [factor(update, total, schedule) for update in range(total)]
    assert all(0 < value <= 1 for value in factors)
    warmup = schedule.warmup_updates
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if falling:
        assert falling[0] == 1.0


@given(TOTALS, SCHEDULES)
def test_after_the_end_the_last_rate_stays(total: int, schedule: RateSchedule) -> None:
    if schedule.warmup_updates < total:
        last = factor(total - 1, total, schedule)
        assert all(factor(update, total, schedule) == last for update in (total, total + 9))


def test_warmup_is_a_line_from_one_part() -> None:
    schedule = RateSchedule(kind="linear", warmup_updates=4)
    assert [factor(update, 10, schedule) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_shapes(final: float) -> None:
    constant, linear, cosine = (
        RateSchedule.model_validate({"kind": kind, "warmup_updates": 5, "final_fraction": final})
        for kind in ("constant", "linear", "cosine")
    )
    for update in range(5, 25):
        progress = (update - 5) / 20
        assert factor(update, 25, constant) == 1.0
        assert factor(update, 25, linear) == pytest.approx(1 + (final - 1) * progress)
        assert factor(update, 25, cosine) == pytest.approx(final + (1 - final) * math.cos(math.pi * progress / 2) ** 2)
