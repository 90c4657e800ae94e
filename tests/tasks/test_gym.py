"""The data sets of reasoning-gym by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import PromptTask
from asyncrl_cli.tasks.load import load_one
from asyncrl_cli.tasks.ready.gym import Gym

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_no_question_is_in_both_splits_even_if_there_are_few() -> None:
    task = load_one("gym/chain_sum", SMALL, Path())
    assert isinstance(task, PromptTask)
    train = {prompt.content for prompt in task.prompts("train", 1000)}
    held_out = {prompt.content for prompt in task.prompts("eval", 100)}
    assert not train & held_out
    assert len(train) > 100 and len(held_out) > 20


def test_rows_are_the_same_at_every_size_and_in_every_process() -> None:
    few, many = Gym("chain_sum").prompts("train", 5), Gym("chain_sum").prompts("train", 50)
    assert list(few) == list(many)[:5]
    assert few[0].uid == "chain_sum/train/0"
    through_json = json.loads(json.dumps(dict(few[3].fields)))
    assert Gym("chain_sum").reward(Prompt("x", "", through_json), through_json["answer"], True) == 1.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("{}", 1.0),
        ("hm, {} it is", 0.0),
        ("hm <answer>0</answer> no <answer> {} </answer> done", 1.0),
        ("<answer>{}", 1.0),
        ("<answer>{}</answer> no <answer>0", 0.0),
    ],
)
def test_where_an_answer_is_searched(response: str, reward: float) -> None:
    task = Gym("chain_sum")
    prompt = task.prompts("train", 1)[0]
    response = response.format(prompt.fields["answer"])
    assert task.reward(prompt, response, True) == reward
    assert task.reward(prompt, response, False) == 0.0


def test_partial_credit_only_on_request_and_verifiers_that_raise() -> None:
    strict, partial = Gym("prime_factorization"), Gym("prime_factorization", partial=True)
    prompt = strict.prompts("train", 1)[0]
    assert strict.reward(prompt, prompt.fields["answer"], True) == 1.0
    assert strict.reward(prompt, "garbage", True) == 0.0, "its verifier raises here"
    almost = "1 × " + prompt.fields["answer"]
    assert 0.0 < partial.reward(prompt, almost, True) < 1.0
    assert strict.reward(prompt, almost, True) == 0.0


def test_template_has_text_around_the_question() -> None:
    text = Gym("chain_sum", template="Q: {question}\nA:").prompts("eval", 1)[0].content
    assert isinstance(text, str) and text.startswith("Q: ") and text.endswith("\nA:")


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("gym/chainsum", {}, "did you mean `gym/chain_sum`"),
        ("gym/qqq", {}, "it has .*chain_sum"),
        ("gym/chain_sum", {"min_termz": 3}, "min_termz"),
        ("gym/chain_sum", {"min_terms": 9, "max_terms": 3}, "do not fit the data set chain_sum"),
        ("gym/composite", {}, "do not fit the data set composite"),
        ("gym/chain_sum", {"extract": "tag"}, "extract"),
        ("gym/chain_sum", {"template": "x"}, "template must have"),
    ],
)
def test_invalid_data_sets_and_options_are_refused(use: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_one(use, options, Path())


def test_a_data_set_with_one_question_cannot_hold_out_questions() -> None:
    task = Gym("chain_sum", rows=1)
    with pytest.raises(TaskError, match="too few different questions"):
        list(task.prompts("eval", 1)) and list(task.prompts("train", 1))
