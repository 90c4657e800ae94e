"""Did it learn? Held-out accuracy with its noise decides, or the training reward if there is none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.core.intervals import wilson
from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.report.answers import change, leading_series, trend
from asyncrl_cli.inspect.report.answers import learned as answer
from asyncrl_cli.journal.history import EvaluationRecord

pytestmark = pytest.mark.slow


def learned(*arguments: Any, **options: Any) -> tuple[str, str]:
    found = answer(*arguments, **options)
    return found.answer, found.tone


RISING = [at / 100 for at in range(100)]


def evaluation(step: int, accuracy: float, prompts: int = 512, kind: str = "greedy") -> EvaluationRecord:
    return EvaluationRecord(0.0, step, kind, accuracy, accuracy, 10.0, prompts, oldest=0, newest=0)


@pytest.mark.parametrize(
    ("accuracy", "prompts", "interval"),
    [(0.5, 100, (0.404, 0.596)), (1.0, 128, (0.971, 1.0)), (0.0, 10, (0.0, 0.278)), (0.229, 512, (0.195, 0.267))],
)
def test_intervals_agree_with_the_literature(accuracy: float, prompts: int, interval: tuple[float, float]) -> None:
    assert wilson(accuracy, prompts) == pytest.approx(interval, abs=1e-3)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 2000), st.integers(1, 2000))
def test_changes_are_symmetric_and_none_without_a_difference(a: float, b: float, n: int, m: int) -> None:
    there, back = change(evaluation(0, a, n), evaluation(1, b, m)), change(evaluation(0, b, m), evaluation(1, a, n))
    assert (there == "rose") is (back == "fell")
    assert change(evaluation(0, a, n), evaluation(1, a, m)) == "did not change beyond its noise"
    assert there != "rose" or b > a


def test_held_out_accuracy_decides() -> None:
    falling_reward = RISING[::-1]
    text, tone = learned(falling_reward, [evaluation(0, 0.229), evaluation(10, 0.9, 128), evaluation(140, 0.975)], {})
    assert tone == "good"
    assert text.startswith("Yes: held-out accuracy (greedy) rose from 0.229 (0.195 to 0.267, 512 prompts) at step 0")
    assert "Mean training reward: 0.945 to 0.045" in text
    text, tone = learned(RISING, [evaluation(0, 0.9), evaluation(140, 0.5)], {})
    assert (text[:3], tone) == ("No:", "bad")
    text, tone = learned(RISING, [evaluation(0, 0.50, 64), evaluation(3, 0.55, 64)], {})
    assert (text[:13], tone) == ("Inconclusive:", "plain")


@pytest.mark.parametrize(
    ("evaluations", "words", "tone"),
    [
        ([(0, 0.50), (3, 0.55)], "No: cut, since step 2. Held-out accuracy (greedy) did not change", "bad"),
        ([(0, 0.10), (9, 0.9)], "Yes: held-out accuracy (greedy) rose", "plain"),
        ([(0, 0.90), (9, 0.5)], "No: held-out accuracy (greedy) fell", "bad"),
        ([], "No: cut, since step 2. Only 2 steps trained", "bad"),
    ],
)
def test_verdict_fits_a_finding_that_lasts(evaluations: list[tuple[int, float]], words: str, tone: str) -> None:
    found = HealthFinding("truncated_responses", 2, None, "cut", "a limit", "a key", True)
    series = [evaluation(*one, 64) for one in evaluations]
    verdict = learned(RISING[:2], series, {}, findings=[found])
    assert verdict[0].startswith(words) and verdict[1] == tone
    assert (" But cut, since step 2." in verdict[0]) is (tone == "plain")
    over = replace(found, last_step=3)
    assert learned(RISING[:2], series, {}, findings=[over]) == learned(RISING[:2], series, {})


def test_a_healthy_quickstart_learned_to_the_end() -> None:
    """Between two large evaluations there are many small ones. By chance, the best of them is above both."""
    small = [0.977, 0.984, 0.992, 0.969, 0.984, 0.992, 0.984, 0.977, 0.984, 0.992, 0.977, 0.984, 0.969]
    run = [evaluation(0, 0.191), *(evaluation(10 + 10 * at, each, 128) for at, each in enumerate(small))]
    text, tone = learned([], [*run, evaluation(140, 0.955)], {})
    assert tone == "good" and text.startswith("Yes: ")
    assert "from 0.191 (0.159 to 0.227, 512 prompts) at step 0 to 0.955" in text and "512 prompts) at step 140" in text


def test_evaluations_of_other_prompts_are_not_compared() -> None:
    text, _ = learned([], [evaluation(0, 0.2, 64), evaluation(10, 0.9, 512)], {})
    assert "no two held-out evaluations" in text or text.startswith("Inconclusive: too few steps")


def test_a_run_that_ended_before_its_first_step_learned_nothing() -> None:
    assert learned([], [], {}, has_ended=True) == ("The run ended before its first step.", "plain")


def test_the_leading_evaluations_are_greedy_or_the_most_frequent() -> None:
    sampled = [evaluation(at, 0.5, kind="sampled") for at in (0, 10)]
    others = [evaluation(at, 0.5, kind="hard:greedy") for at in (0, 5, 10)]
    greedy = [evaluation(at, 0.5) for at in (10, 0)]
    assert [(one.kind, one.after_step) for one in leading_series([*sampled, *greedy, *others])] == [
        ("greedy", 0),
        ("greedy", 10),
    ]
    assert leading_series([*sampled, *others, evaluation(0, 0.5)])[0].kind == "hard:greedy"
    assert leading_series([evaluation(0, 0.5)]) == []


def test_without_held_out_accuracy_the_training_reward_decides() -> None:
    assert learned(RISING, [evaluation(0, 0.5)], {})[0].startswith("Yes: the mean training reward rose")
    assert learned(RISING[::-1], [], {})[1] == "bad"
    assert learned([0.5, 0.4] * 20, [], {})[0].startswith("Inconclusive")


def test_few_steps_are_inconclusive_and_shown() -> None:
    assert learned([0.309, 0.35, 0.324], [], {}) == (
        "Inconclusive: only 3 steps trained. Mean training reward by step: 0.309, 0.350, 0.324.",
        "plain",
    )
    assert "too few steps" in learned([], [], {})[0]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"data": {"filter": {"solved_streak": 3}}}, "data.filter"),
        ({"algorithm": {"uniform_groups": "reject"}}, "uniform_groups: reject"),
    ],
)
def test_rewards_that_cannot_be_compared_decide_nothing(spec: Any, reason: str) -> None:
    text, tone = learned(RISING, [], spec)
    assert text.startswith("Inconclusive") and reason in text and tone == "plain"
    held_out = learned(RISING, [evaluation(0, 0.2), evaluation(10, 0.9)], spec)
    assert held_out[1] == "good" and "not comparable" in held_out[0]


# -- trends of the training reward


@given(st.lists(st.floats(0.4, 0.6), min_size=20, max_size=200), st.floats(1.0, 10.0))
def test_a_trend_beyond_the_noise_is_seen_and_noise_is_none(noise: list[float], rise: float) -> None:
    tilted = [value + rise * at / len(noise) for at, value in enumerate(noise)]
    for values, way in ((tilted, "rose"), (tilted[::-1], "fell")):
        found = trend(values)
        assert found is not None and found.direction == way
    flat = trend([value + (-1) ** at * rise for at, value in enumerate(noise)])
    assert flat is not None and flat.direction == "did not change beyond its noise"


def test_trends_of_little() -> None:
    assert trend([]) is None and trend([1.0, math.nan]) is None
    found = trend([0.5] * 30)
    assert found is not None and found.direction == "did not change beyond its noise"
