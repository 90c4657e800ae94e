"""Rewards are finite floats, or failures with a reason."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import sys
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.tasks.base import RewardResult
from asyncrl_cli.tasks.function_task import FunctionTask, GroupFunction
from asyncrl_cli.workers.scoring import awaits, score, score_async

RESPONSE = (Prompt("row/7", "2+2="), "4", True)


def returning(value: Any) -> FunctionTask:
    """A task that returns ``value`` as the reward of every response."""
    return FunctionTask(lambda prompt, response: value, "rewards:f")


def raising(error: BaseException) -> FunctionTask:
    def reward(prompt: Any, response: str) -> float:
        raise error

    return FunctionTask(reward, "rewards:f")


def reason(task: FunctionTask) -> str:
    scored = score(task, RESPONSE)
    assert isinstance(scored, RewardFailure)
    scored.reason.encode()
    assert len(scored.reason.splitlines()) == 1
    return scored.reason


@pytest.mark.parametrize(
    "name", ["acc@1", "", ".", "..", "/x", "x/", "a//b", "a/../b", "a:b", "a\nb", "x" * 121, "\ud800", "acc%", "a\\b"]
)
def test_a_metric_name_that_mlflow_refuses_is_a_failure_that_names_it(name: str) -> None:
    text = reason(returning(RewardResult(1.0, {name: 1.0})))
    assert text.startswith("rewards:f returned the metric name ") and "which MLflow refuses" in text


@pytest.mark.parametrize(
    "value",
    [
        *("1", float("nan"), float("inf"), -float("inf"), 1j, [1.0], 10**400, (1.0, {}), {"reward": 1.0}),
        *(1e300, -1e308, 1.01e15, 10**16, np.float64(1e300), decimal.Decimal("1e300")),
        *(decimal.Decimal("sNaN"), np.array([1.0, 2.0]), np.timedelta64(5, "s"), np.complex64(1), torch.zeros(2)),
    ],
    ids=lambda value: repr(value)[:9],
)
def test_anything_else_is_a_failure_that_says_what_to_return(value: Any) -> None:
    text = reason(returning(value))
    assert text.startswith(f"rewards:f returned {' '.join(repr(value).split())[:100]}")
    assert "for prompt 'row/7'; return a finite number, RewardResult(reward, metrics) or {'score': number}" in text
    assert text.endswith("or None for a response that cannot be scored; numbers are at most 1e+15 in size")


def test_verls_dict_is_a_reward_with_metrics() -> None:
    result = {"score": np.float64(1.0), "acc": np.bool_(True), "pred": "42", "missing": None}
    assert score(returning(result), RESPONSE) == Scored(1.0, {"acc": 1.0})
    assert "the metric 'acc': nan" in reason(returning({"score": 1.0, "acc": float("nan")}))


@pytest.mark.parametrize(
    "value",
    [
        *(numpy_type(1) for numpy_type in (np.float16, np.float64, np.longdouble, np.int8, np.uint64, np.bool_)),
        *(np.ones(1), np.array(0.5), np.ones((1, 1), np.float32), np.array(True), np.ma.masked_array(1.0)),
        *(torch.ones(()), torch.ones(1, requires_grad=True), torch.ones((), dtype=torch.bfloat16), torch.tensor([[1]])),
        *(decimal.Decimal("0.5"), fractions.Fraction(1, 2), True, False, 1, -2.0, 1e15, 5e-324),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_numbers_of_every_library_become_floats_in_results_and_in_dicts(value: Any) -> None:
    for result in (value, RewardResult(value, {"same": value}), {"score": value, "same": value}):
        scored = score(returning(result), RESPONSE)
        assert isinstance(scored, Scored), scored
        assert type(scored.reward) is float and scored.reward == float(value)
        assert set(scored.metrics.values()) <= {float(value)}


@pytest.mark.parametrize(
    "value", [None, RewardResult(None, {"refused": 1}), {"score": None, "refused": True}], ids=repr
)
def test_none_masks_a_response_and_keeps_its_metrics(value: Any) -> None:
    metrics = {} if value is None else {"refused": 1.0}
    assert score(returning(value), RESPONSE) == Scored(None, metrics)
    assert "metric" in reason(returning(RewardResult(None, {"refused": "yes"})))


GROUP = (Prompt("row/7", "2+2="), ("4", "five", ""), (True, True, False))


def group_returning(value: Any) -> GroupFunction:
    return GroupFunction(lambda prompt, responses: value, "rewards:g")


@pytest.mark.parametrize(
    "value",
    [
        [1, 0.5, 0],
        (True, decimal.Decimal("0.5"), np.float32(0)),
        torch.tensor([1, 0.5, 0]),
        np.array([[1.0], [0.5], [0.0]]),
        [{"score": 1}, RewardResult(0.5), torch.zeros(())],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_group_has_a_reward_of_each_response_in_order(value: Any) -> None:
    assert score(group_returning(value), GROUP) == tuple(map(Scored, (1.0, 0.5, 0.0)))


def group_reason(value: Any) -> str:
    failure = score(group_returning(value), GROUP)
    assert isinstance(failure, RewardFailure), failure
    return failure.reason


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1.0, 2.0], "rewards:g returned 2 rewards for the 3 responses of prompt 'row/7'; return a list"),
        ([], "returned 0 rewards for the 3 responses"),
        *((value, f"rewards:g returned {value!r} for the 3 responses") for value in (None, 1.0, "123", {"a": 1})),
        (np.array(1.0), "returned array(1.) for the 3 responses"),
        ({1: 1, 0.5: 1, 0: 1}.keys(), "return a list with a result for each, in their order"),
        ([1.0, "good", 0.0], "rewards:g, result 1, returned 'good' for prompt 'row/7'; return a finite number"),
        ([1.0, 0.0, float("nan")], "rewards:g, result 2, returned nan"),
        (np.zeros((3, 2)), "rewards:g, result 0, returned array([0., 0.])"),
    ],
    ids=repr,
)
def test_a_group_with_a_wrong_result_fails_as_a_whole_and_says_what_to_return(value: Any, says: str) -> None:
    text = group_reason(value)
    assert says in text
    assert text.endswith("or None for a response that cannot be scored; numbers are at most 1e+15 in size")


def test_rewards_of_a_group_are_masked_one_by_one_and_may_be_async_methods() -> None:
    class Ranked:
        async def rewards(self, prompt: Prompt, responses: list[str], finished: list[bool]) -> list[Any]:
            order = sorted(responses)
            return [order.index(text) if ended else None for text, ended in zip(responses, finished, strict=True)]

    assert awaits(Ranked())
    expected = (Scored(1.0), Scored(2.0), Scored(None))
    assert score(Ranked(), GROUP) == asyncio.run(score_async(Ranked(), GROUP)) == expected


def test_a_failure_names_the_line_of_the_users_code_and_leaves_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def reward(row: Any, response: str) -> float:
        return float(row["solution"])

    raised, returned = score(FunctionTask(reward, "rewards:f"), RESPONSE), score(returning("1"), RESPONSE)
    line = reward.__code__.co_firstlineno
    assert isinstance(raised, RewardFailure) and raised.location == f"{__file__}:{line + 1}"
    assert str(raised).startswith(f"{__file__}:{line + 1}: rewards:f failed on prompt 'row/7': KeyError: 'solution'")
    assert isinstance(returned, RewardFailure) and returned.location.startswith(f"{__file__}:")
    assert "in reward" in capsys.readouterr().err


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), RecursionError("deep")])
def test_every_exception_becomes_a_failure(error: BaseException) -> None:
    assert f"row/7': {type(error).__name__}" in reason(raising(error))


def test_a_reason_is_one_short_line_whatever_it_quotes() -> None:
    class Unshowable(Exception):
        def __str__(self) -> str:
            raise ValueError

        __repr__ = __str__

    assert reason(raising(Unshowable())).endswith("Unshowable: a Unshowable that cannot be shown")
    assert "a Unshowable that cannot be shown" in reason(returning(Unshowable()))
    assert "cannot be shown" in reason(returning(10 ** (2 * sys.get_int_max_str_digits())))
    assert reason(raising(ValueError("first\n  second\ud800"))).endswith("ValueError: first second?")
    assert len(reason(returning("x" * 10**6))) < 420
