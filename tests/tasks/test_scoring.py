"""Rewards are finite floats, or the run hears about it."""

import fractions
import pickle
from typing import Any

import numpy as np
import pytest

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.tasks.errors import TaskError
from asyncrl_cli.tasks.function_task import FunctionTask
from asyncrl_cli.tasks.scoring import score

PROMPT = Prompt("row/7", "2+2=")


def returning(value: Any) -> FunctionTask:
    """A task whose reward is ``value`` whatever the response."""
    return FunctionTask(lambda prompt, response: value, "rewards:f")


@pytest.mark.parametrize("value", [1, 0.5, -2.0, True, False, np.float32(0.5), np.int64(1), fractions.Fraction(1, 2)])
def test_numbers_become_floats(value: Any) -> None:
    scored = score(returning(value), PROMPT, "4", True)
    assert type(scored) is float
    assert scored == float(value)


@pytest.mark.parametrize(
    "value",
    [None, "1", float("nan"), float("inf"), -float("inf"), 1j, [1.0], 10**400],
    ids=lambda value: repr(value)[:9],
)
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TaskError) as caught:
        score(returning(value), PROMPT, "4", True)
    assert "rewards:f" in caught.value.message
    assert "'row/7'" in caught.value.message
    assert repr(value)[:100] in caught.value.message


def test_a_reward_that_raises_is_named_with_its_cause() -> None:
    class Broken:
        def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
            raise KeyError("answer")

    with pytest.raises(TaskError, match=r"Broken\.reward failed on prompt 'row/7': KeyError: 'answer'") as caught:
        score(Broken(), PROMPT, "4", True)
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_error_travels_between_processes() -> None:
    with pytest.raises(TaskError) as caught:
        score(returning(None), PROMPT, "4", True)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.message, copy.mend) == (caught.value.message, caught.value.mend)
