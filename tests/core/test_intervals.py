"""Confidence intervals of means over prompts match textbook intervals and simulated prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from asyncrl_cli.core.intervals import Clusters, mean_interval, share_interval, wilson

pytestmark = pytest.mark.slow

SHARES = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), min_size=1, max_size=30)
VALUES = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), min_size=5, max_size=30)


def width(interval: tuple[float, float] | None) -> float:
    assert interval is not None
    return interval[1] - interval[0]


@given(SHARES)
def test_share_interval_contains_the_mean_and_stays_between_0_and_1(clusters: Clusters) -> None:
    low, high = share_interval(clusters)
    mean = np.concatenate([np.asarray(cluster) for cluster in clusters]).mean()
    assert 0.0 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1.0
    assert high - low > 0, "no number of equal answers is certainty"


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_one_answer_per_prompt_has_wilsons_interval(answers: list[bool]) -> None:
    expected = wilson(sum(answers) / len(answers), len(answers))
    assert share_interval([[float(answer)] for answer in answers]) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.booleans(), min_size=5, max_size=50), st.integers(2, 6))
def test_repeated_answers_do_not_narrow_an_interval(answers: list[bool], copies: int) -> None:
    single = [[float(answer)] for answer in answers]
    repeated = [cluster * copies for cluster in single]
    assert share_interval(repeated) == pytest.approx(share_interval(single), abs=1e-9)
    assert mean_interval(repeated) == pytest.approx(mean_interval(single), abs=1e-9)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=30))
def test_means_of_prompts_have_the_interval_of_their_answers(prompts: list[list[bool]]) -> None:
    answers = [[float(answer) for answer in prompt] for prompt in prompts]
    means = [[sum(prompt) / 4] for prompt in answers]
    assert share_interval(means, answers=4 * len(means)) == pytest.approx(share_interval(answers), abs=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=5, max_size=100))
def test_mean_interval_of_single_values_is_students(values: list[float]) -> None:
    interval = mean_interval([[value] for value in values])
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    assert width(interval) / 2 == pytest.approx(half, rel=0.02, abs=1e-6)


def test_few_prompts_have_no_interval_of_their_mean_and_a_wide_one_of_their_share() -> None:
    assert mean_interval([[0.5, 1.5]] * 4) is None
    assert share_interval([[1.0] * 64]) == wilson(1.0, 1)


@pytest.mark.parametrize(("prompts", "samples", "hard"), [(20, 1, 0.5), (50, 4, 0.5), (100, 8, 0.05), (200, 4, 5.0)])
def test_intervals_cover_the_true_mean_as_often_as_they_say(prompts: int, samples: int, hard: float) -> None:
    """Prompts differ in difficulty (a beta distribution). Intervals that ignored this would be far too narrow."""
    rng = np.random.default_rng(prompts)
    covered = np.zeros(2)
    trials = 600
    truth = hard / (hard + 1.0)
    for _ in range(trials):
        chances = rng.beta(hard, 1.0, size=prompts)
        answers = (rng.random((prompts, samples)) < chances[:, None]).astype(float).tolist()
        for index, interval in enumerate((share_interval(answers), mean_interval(answers))):
            assert interval is not None
            covered[index] += interval[0] <= truth <= interval[1]
    assert covered[0] / trials > 0.92
    assert covered[1] / trials > 0.90, "less exact for shares near 0"
