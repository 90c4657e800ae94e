"""Exact match, and answers that are equal in value."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import CheckingTask
from asyncrl_cli.tasks.ready.matching import ExactMatch, MissingField
from asyncrl_cli.tasks.ready.math_answers import MathAnswers
from asyncrl_cli.tasks.ready.unit_tests import UnitTests

pytestmark = pytest.mark.slow


def row(**fields: Any) -> Prompt:
    return Prompt("row", "?", fields)


@pytest.mark.parametrize(
    ("options", "answer", "response", "reward"),
    [
        ({}, "Paris", " Paris\n", 1.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "Paris", "PARIS", 1.0),
        ({}, ["Paris", "Lutetia"], "Lutetia", 1.0),
        ({}, 42, "42", 1.0),
        ({}, ["Paris", 75000], "75000", 1.0),
        ({}, ["Paris", "Lutetia"], "Paris, Lutetia", 0.0),
        ({}, 18.0, "18", 1.0),
        ({}, 18.0, "18.0", 1.0),
        ({}, 18.5, "18", 0.0),
        ({}, 1e-07, "0.0000001", 1.0),
        ({}, 1e-07, "0", 0.0),
        ({}, -0.0, "0", 1.0),
        ({}, -0.0, "-0.0", 1.0),
        ({}, 0.0, "0", 1.0),
        ({}, "Paris", "It is Paris", 0.0),
    ],
)
def test_exact(options: Any, answer: Any, response: str, reward: float) -> None:
    assert ExactMatch(**options).reward(row(answer=answer), response, True) == reward


VERL = {"ground_truth": "2", "style": "rule"}


@pytest.mark.parametrize("nested", [VERL, json.dumps(VERL)], ids=["object", "text"])
def test_a_dot_leads_into_an_object(nested: Any) -> None:
    task = ExactMatch("reward_model.ground_truth")
    assert task.reward(row(reward_model=nested), "2", True) == 1.0
    assert task.reward(row(reward_model=nested), "rule", True) == 0.0
    assert MathAnswers("reward_model.ground_truth").reward(row(reward_model=nested), r"\boxed{2}", True) == 1.0
    deep = row(reward_model={"answers": {"all": ["3", 4]}})
    assert ExactMatch("reward_model.answers.all").reward(deep, "4", True) == 1.0
    both = row(**{"reward_model.ground_truth": "7"}, reward_model=nested)
    assert task.reward(both, "7", True) == 1.0, "a name with a dot is itself first"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a": {"c": 1}}, "no field 'a.b'; it has a, a.c"),
        ({"a": "b: 1"}, "no field 'a.b'; it has a$"),
        ({"a": '["b"]'}, "no field 'a.b'; it has a$"),
        ({"a": {"b": {"c": 1}}}, "field 'a.b' is an object with a.b.c, not text"),
        ({"a": {"b": None}}, "field 'a.b' is null"),
        ({"a": {"b": []}}, "field 'a.b' is an empty list"),
        ({"a": {"b": ["2", None]}}, "field 'a.b' is a list, not text, a number or a list of these"),
    ],
)
def test_a_path_that_leads_nowhere_is_reported(fields: Any, words: str) -> None:
    with pytest.raises(MissingField, match=words):
        ExactMatch("a.b").check_prompt(row(**fields))


def test_a_tag_that_is_opened_a_million_times_is_read_in_linear_time() -> None:
    task = MathAnswers(extract="answer_tag")
    assert task.reward(row(answer="12"), "<answer>" * 1_000_000, True) == 0.0
    assert task.reward(row(answer="12"), "<answer>" * 1_000_000 + "12</answer> bye", True) == 1.0
    assert MathAnswers().reward(row(answer="12"), r"\boxed{" * 100_000 + "12}", True) == 1.0


def test_rows_that_no_response_could_match_are_found_by_the_check() -> None:
    for task, fields, words in (
        (ExactMatch(), {}, "no field 'answer'"),
        (ExactMatch(), {"answer": " \n"}, "an empty response would be right"),
        (ExactMatch(), {"answer": ["a", ""]}, "an empty response would be right"),
        (MathAnswers(), {"answer": r"\frac{1}{"}, "a brace is not closed"),
        (MathAnswers(), {"answer": '{"truth": "5"}'}, "it is an object; name one of its keys, such as truth"),
        (UnitTests(sandbox="none"), {}, "no field 'tests'"),
        (UnitTests(sandbox="none"), {"tests": "assert f(1 =="}, "never closed"),
    ):
        assert isinstance(task, CheckingTask)
        with pytest.raises(Exception, match=re.escape(words)):
            task.check_prompt(row(**fields))
    ExactMatch().check_prompt(row(answer=["a", "b"]))
