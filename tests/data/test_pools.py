"""What is solved is left out, keeps its share of turns, and comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.data.prompt_filter import Pools


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 3))
def test_a_prompt_is_left_out_after_so_many_solved_visits_in_a_row(visits: list[bool], after: int) -> None:
    pools = Pools(after, 0.0, 0)
    for solved in visits:
        pools.visited("a", solved)
    retired = len(visits) >= after and all(visits[-after:])
    assert pools.leaves_out("a", 0) == retired
    assert pools.retired == retired
    assert not pools.leaves_out("b", 0)


def test_a_retired_prompt_keeps_its_share_of_turns() -> None:
    uids = [str(number) for number in range(500)]

    def left_out(revisit: float, seed: int = 0) -> list[tuple[str, int]]:
        pools = Pools(1, revisit, seed)
        pools.restore(dict.fromkeys(uids, 1))
        return [(uid, epoch) for epoch in range(4) for uid in uids if pools.leaves_out(uid, epoch)]

    assert len(left_out(0.0)) == 2000
    assert left_out(1.0) == []
    assert 1400 < len(left_out(0.25)) < 1600
    assert left_out(0.25) == left_out(0.25), "decided by seed, epoch and uid alone"
    assert left_out(0.25) != left_out(0.25, seed=1)
    assert len({uid for uid, _ in left_out(0.25)}) > 450, "not the same ones in every epoch"
