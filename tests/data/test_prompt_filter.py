"""Solved prompts are skipped, except for a fraction of visits, and may be included again later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.data.loader import PromptFilter


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
