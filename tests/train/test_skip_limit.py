"""Consecutive skipped updates are counted; test_zero_engines.py tests skipped updates with real engines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.train.nonfinite_guard import SkipLimit, UpdateResult


@given(skipped=st.lists(st.booleans(), max_size=30), most=st.integers(1, 4))
def test_the_run_stops_at_the_first_row_of_too_many(skipped: list[bool], most: int) -> None:
    limit = SkipLimit(most)
    for index, left_out in enumerate(skipped):
        result = UpdateResult(math.nan if left_out else 1.0, left_out)
        if index >= most and all(skipped[index - most : index + 1]):
            with pytest.raises(RunError, match=f"not finite in {most + 1} updates in a row"):
                limit.note(result)
            return
        limit.note(result)


def test_the_critic_has_a_limit_of_its_own() -> None:
    limit, critic = SkipLimit(1), "algorithm.critic.learning_rate"
    limit.note(UpdateResult(math.nan, True), critic)
    limit.note(UpdateResult(1.0, False))
    with pytest.raises(RunError, match="2 updates in a row") as raised:
        limit.note(UpdateResult(math.nan, True), critic)
    assert raised.value.hint is not None and raised.value.hint.startswith(f"lower {critic}")
