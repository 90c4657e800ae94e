"""Spelling backward: the splits, the verifier, the demonstrations."""

import random

import pytest

from asyncrl_cli.records.prompt import Prompt
from tests.spell_backward import SpellBackward

TASK = SpellBackward()
SUN = Prompt("row", "sun>", {"answer": "nus", "metadata": {"word": "sun"}})


def test_the_splits_and_the_demonstrations_share_no_word() -> None:
    train = {prompt.content for prompt in TASK.prompts("train", 2000)}
    held_out = {prompt.content for prompt in TASK.prompts("eval", 500)}
    rng = random.Random(0)
    shown = {TASK.demonstration(rng, clean)[0] for clean in (True, False) for _ in range(1000)}
    assert not train & held_out
    assert not shown & held_out


def test_words_are_short_and_lower_case_and_not_palindromes() -> None:
    for prompt in SpellBackward(3, 4).prompts("train", 300):
        word = prompt.fields["metadata"]["word"]
        assert word.isalpha()
        assert word.isascii()
        assert word.islower()
        assert 3 <= len(word) <= 4
        assert prompt.content == f"{word}>"
        assert prompt.fields["answer"] == word[::-1] != word


def test_only_the_complete_word_backward_in_a_finished_response_scores() -> None:
    assert TASK.reward(SUN, "nus", True) == 1.0
    assert TASK.reward(SUN, "nus", False) == 0.0
    for response in ("sun", "nu", "nuss", "", "nus ", "#"):
        assert TASK.reward(SUN, response, True) == 0.0


def test_clean_demonstrations_are_right_and_most_of_the_mixture_copies() -> None:
    rng = random.Random(0)
    clean = [TASK.demonstration(rng, clean=True) for _ in range(200)]
    assert all(response == prompt.removesuffix(">")[::-1] for prompt, response in clean)
    mixture = [TASK.demonstration(rng, clean=False) for _ in range(1000)]
    copied = sum(response == prompt.removesuffix(">") for prompt, response in mixture)
    assert 650 < copied < 750


@pytest.mark.parametrize("options", [{"min_letters": 2}, {"max_letters": 11}, {"careful": -0.1}])
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SpellBackward(**options)  # type: ignore[arg-type]
