"""The stream of training prompts: nothing repeated, nothing skipped, resumable anywhere; solved prompts are skipped."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.loader import PromptFilter, PromptLoader
from asyncrl_cli.records.prompt import Prompt


def rows(size: int) -> list[Prompt]:
    return [Prompt(str(row), "x") for row in range(size)]


def taken(loader: PromptLoader, count: int) -> list[str]:
    return [loader.next().uid for _ in range(count)]


@given(st.integers(1, 40), st.integers(0, 2**40), st.booleans(), st.integers(1, 4))
def test_every_epoch_visits_every_prompt_once(size: int, seed: int, shuffle: bool, epochs: int) -> None:
    loader = PromptLoader(rows(size), seed, shuffle)
    for _ in range(epochs):
        assert sorted(taken(loader, size), key=int) == [str(row) for row in range(size)]


@given(st.integers(1, 20), st.integers(0, 9), st.booleans(), st.integers(0, 70), st.integers(0, 70))
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


# -- solved prompts


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 3))
def test_a_prompt_is_excluded_after_a_streak_of_solved_visits(visits: list[bool], after: int) -> None:
    prompts = PromptFilter(after, 0.0, 0)
    for solved in visits:
        prompts.visited("a", solved)
    filtered = len(visits) >= after and all(visits[-after:])
    assert prompts.excludes("a", 0) == filtered
    assert prompts.filtered == filtered
    assert not prompts.excludes("b", 0)


def test_a_filtered_prompt_keeps_its_fraction_of_turns() -> None:
    uids = [str(number) for number in range(500)]

    def omitted(revisit_fraction: float, seed: int = 0) -> list[tuple[str, int]]:
        prompts = PromptFilter(1, revisit_fraction, seed)
        prompts.restore(dict.fromkeys(uids, 1))
        return [(uid, epoch) for epoch in range(4) for uid in uids if prompts.excludes(uid, epoch)]

    assert len(omitted(0.0)) == 2000
    assert omitted(1.0) == []
    assert 1400 < len(omitted(0.25)) < 1600
    assert omitted(0.25) == omitted(0.25), "depends only on seed, epoch and uid"
    assert omitted(0.25) != omitted(0.25, seed=1)
    assert len({uid for uid, _ in omitted(0.25)}) > 450, "not the same ones in every epoch"
