"""The template search-agent: a policy that searches hop by hop gets the reward, and the index takes any words."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.tools import call_message

TEMPLATE = Path(__file__).parents[2] / "templates/search-agent"


@pytest.fixture(scope="module")
def search() -> Iterator[Any]:
    """The template's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TEMPLATE)
        import search as module  # type: ignore[import-not-found]

        yield module
    del sys.modules["search"]


def reward(task: Any, prompt: Prompt, lies: bool = False) -> float | None:
    """The reward of a policy that searches one note for each hop."""
    environment = task.environment(prompt)
    assert list(environment.reset()) == [{"role": "user", "content": prompt.content}]
    *relations, person = prompt.content.removesuffix("?").split(" of ")
    for hop, relation in enumerate(reversed(relations)):
        step = environment.step(call_message(hop, "search", {"words": f"{relation} {person}"}))
        notes = dict(line.split(": ") for line in step.messages[0]["content"].splitlines())
        person = notes[f"{relation} of {person}"]
    reply: Message = {"role": "assistant", "content": f"#{person}{'x' if lies else ''}"}
    last = environment.step(reply)
    assert last.done
    return float(last.reward)


def test_searching_hop_by_hop_gives_the_reward(search: Any) -> None:
    task = search.Search()
    for split in ("train", "eval"):
        prompts = task.prompts(split, 40)
        assert {prompt.fields["hops"] for prompt in prompts} == {1, 2, 3}
        assert {reward(task, prompt) for prompt in prompts} == {1.0}
    assert reward(task, prompts[0], lies=True) == 0.0


def test_splits_share_no_question(search: Any) -> None:
    task = search.Search()
    train, held_out = ({prompt.content for prompt in task.prompts(split, 2000)} for split in ("train", "eval"))
    assert not train & held_out
    shown = {row["messages"][0]["content"] for row in search.demonstrations("train", 2000)}
    assert not shown & held_out


@pytest.mark.parametrize("words", ["", '"', "boss OR", "zzz", "boss* NEAR(home)"])
def test_no_words_are_an_error_of_the_index(search: Any, words: str) -> None:
    assert search.Search().search(words) == search.NO_NOTES
