"""pass@k against its definition: all ways to choose k of n responses."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.orchestrator.evaluation import mean_pass_at, pass_at


@given(st.data(), st.integers(1, 8))
def test_it_is_the_share_of_choices_with_a_right_one(data: st.DataObject, samples: int) -> None:
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    choices = list(combinations([place < correct for place in range(samples)], k))
    assert pass_at(k, samples, correct) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_means_over_prompts_rise_with_k() -> None:
    assert mean_pass_at(2, [0, 1, 2]) == pytest.approx((0.5, 2 / 3))
    assert mean_pass_at(1000, [1])[-1] == 1.0
    assert mean_pass_at(1000, [1])[0] == pytest.approx(0.001)
