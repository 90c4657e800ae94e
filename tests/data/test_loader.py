"""The stream of training prompts: nothing repeated, nothing skipped, resumable anywhere."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.records.prompt import Prompt


def rows(size: int) -> list[Prompt]:
    return [Prompt(str(row), "x") for row in range(size)]


def taken(loader: PromptLoader, count: int) -> list[str]:
    return [loader.next().uid for _ in range(count)]


@given(st.integers(1, 40), st.integers(0, 2**40), st.booleans(), st.integers(1, 4))
@settings(deadline=None)
def test_every_epoch_visits_every_prompt_once(size: int, seed: int, shuffle: bool, epochs: int) -> None:
    loader = PromptLoader(rows(size), seed, shuffle)
    for _ in range(epochs):
        assert sorted(taken(loader, size), key=int) == [str(row) for row in range(size)]


@given(st.integers(1, 20), st.integers(0, 9), st.booleans(), st.integers(0, 70), st.integers(0, 70))
@settings(deadline=None)
def test_a_restored_loader_continues_with_the_same_prompts(
    size: int, seed: int, shuffle: bool, before: int, elsewhere: int
) -> None:
    loader = PromptLoader(rows(size), seed, shuffle)
    taken(loader, before)
    state = loader.state()
    other = PromptLoader(rows(size), seed, shuffle)
    taken(other, elsewhere)
    other.restore(state)
    assert other.state() == state
    assert taken(other, 3 * size) == taken(loader, 3 * size)


def test_the_order_depends_on_seed_and_epoch_and_leaves_the_global_generator_alone() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    orders = {tuple(taken(PromptLoader(rows(30), seed, True), 30)) for seed in range(5)}
    loader = PromptLoader(rows(30), 0, True)
    orders |= {tuple(taken(loader, 30)) for _ in range(5)}
    assert len(orders) == 9, "5 seeds, and 4 further epochs of seed 0"
    assert random.random() == expected


class Mixed(list[Prompt]):
    """Prompts of several kinds, by their row."""

    def __init__(self, strata: list[int]) -> None:
        super().__init__(rows(len(strata)))
        self.strata = strata


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(0, 9))
def test_a_shuffle_keeps_the_order_of_kinds(strata: list[int], seed: int) -> None:
    loader = PromptLoader(Mixed(strata), seed, True)
    for _ in range(2):
        drawn = [int(uid) for uid in taken(loader, len(strata))]
        assert sorted(drawn) == list(range(len(strata)))
        assert [strata[row] for row in drawn] == strata


def test_no_prompts_and_impossible_states_are_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptLoader([], 0, True)
    for state in ({"epoch": 0, "position": 4}, {"epoch": -1, "position": 0}, {"epoch": 0, "position": -1}):
        with pytest.raises(DataError, match="3 training prompts"):
            PromptLoader(rows(3), 0, True).restore(state)
