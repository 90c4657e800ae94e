"""Stages of difficulty: only rows of the stage, each once per epoch, resumable anywhere."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.loader import PromptLoader, stages_of
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.inputs import CurriculumSpec, CurriculumStage


def rows(levels: list[Any]) -> list[Prompt]:
    return [Prompt(str(row), "x", {"level": level}) for row, level in enumerate(levels)]


def curriculum(*stages: tuple[int | None, float | None, float | None]) -> CurriculumSpec:
    return CurriculumSpec(
        field="level",
        stages=[CurriculumStage(until_prompt=until, min=low, max=high) for until, low, high in stages],
    )


levels = st.lists(st.integers(0, 5), min_size=1, max_size=12)
ends = st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True).map(sorted)
bounds = st.lists(st.tuples(st.none() | st.integers(0, 3), st.none() | st.integers(2, 5)), min_size=3, max_size=3)


@given(levels, ends, bounds, st.booleans(), st.integers(0, 3), st.integers(0, 90))
@settings(deadline=None)
def test_stages_give_each_row_once_an_epoch_and_continue_after_a_resume(
    levels: list[int],
    ends: list[int],
    bounds: list[tuple[int | None, int | None]],
    shuffle: bool,
    seed: int,
    before: int,
) -> None:
    def within(stage: int, level: int) -> bool:
        low, high = bounds[stage] if stage < len(ends) else (None, None)
        return (low is None or level >= low) and (high is None or level <= high)

    assume(all(any(within(stage, level) for level in levels) for stage in range(len(ends))))
    prompts = rows(levels)
    spec = curriculum(*((end, *bounds[stage]) for stage, end in enumerate(ends)))

    def loader() -> PromptLoader:
        return PromptLoader(prompts, seed, shuffle, stages_of(prompts, spec))

    stream, epochs = loader(), []
    drawn = []
    for _ in range(ends[-1] + 3 * len(levels)):
        drawn.append(int(stream.next().uid))
        epochs.append(stream.epoch)
    for number, row in enumerate(drawn):
        assert within(sum(number >= end for end in ends), levels[row])
    starts = [0, *(index for index, (one, two) in enumerate(pairwise(epochs), start=1) if one != two), len(drawn)]
    for start, end in pairwise(starts):
        stage = sum(start >= one for one in ends)
        pool = {row for row, level in enumerate(levels) if within(stage, level)}
        assert set(drawn[start:end]) <= pool
        assert len(set(drawn[start:end])) == end - start, "no row twice in an epoch"
        if end not in ends and end < len(drawn):
            assert set(drawn[start:end]) == pool, "an epoch within one stage visits each row"
    stream = loader()
    for _ in range(before):
        stream.next()
    resumed = loader()
    resumed.restore(stream.state())
    assert resumed.state() == stream.state()
    assert [resumed.next() for _ in range(60)] == [stream.next() for _ in range(60)]


def test_a_last_stage_may_be_endless() -> None:
    prompts = rows([1, 2, 3])
    loader = PromptLoader(prompts, 0, True, stages_of(prompts, curriculum((2, None, 1), (None, 2, None))))
    drawn = [prompt.fields["level"] for prompt in (loader.next() for _ in range(100))]
    assert drawn[:2] == [1, 1]
    assert sorted(set(drawn[2:])) == [2, 3]


def test_a_state_that_no_epoch_has_is_refused() -> None:
    prompts = rows([1, 2, 3])
    loader = PromptLoader(prompts, 0, True, stages_of(prompts, curriculum((5, 1, 3))))
    loader.restore({"epoch": 1, "position": 2})
    with pytest.raises(DataError, match="no position 3 in epoch 1"):
        loader.restore({"epoch": 1, "position": 3})


def test_a_difficulty_is_a_number_in_every_row() -> None:
    assert stages_of(rows(["1.5", 2]), curriculum((1, None, 1.5)))[0].rows == [0]
    for wrong, message in (
        (None, "prompt '1': `level` is missing"),
        ("hard", "`level` is 'hard', which is not a number"),
        (True, "True"),
        ("nan", "'nan'"),
    ):
        with pytest.raises(DataError, match=message):
            stages_of(rows([1, wrong]), curriculum((1, None, 1)))
    with pytest.raises(DataError, match=r"data\.curriculum\.stages\.1: .* from 5 to inf .*prompts are 1 to 3"):
        stages_of(rows([1, 3]), curriculum((1, None, 1), (2, 5, None)))
