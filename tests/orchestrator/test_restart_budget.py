"""Faults that a run survives are counted by kind, recorded and shown. Too many end the run with the first cause."""

from __future__ import annotations

import pytest
from stand_ins import Notes

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.system.supervised_actor import WINDOW_S, RestartBudget


async def test_restarts_are_recorded_and_shown_and_one_too_many_ends_the_run_with_the_first_cause() -> None:
    notes = Notes()
    budget = notes.budget(2)
    await budget.spend("engine", "engine-1", "out of memory")
    await budget.spend("engine", "engine-0", "no answer within 120 s")
    await budget.spend("trainer", "trainer-0", "kinds are counted separately")
    with pytest.raises(RunError) as error:
        await budget.spend("engine", "engine-2", "hangs")
    assert notes == [
        ("engine", "engine-1", "out of memory"),
        ("engine", "engine-0", "no answer within 120 s"),
        ("trainer", "trainer-0", "kinds are counted separately"),
        ("engine", "engine-2", "hangs"),
    ]
    assert notes.warnings[:2] == [
        "engine-1: out of memory; restart 1 of at most 2 in 6 hours",
        "engine-0: no answer within 120 s; restart 2 of at most 2 in 6 hours",
    ]
    assert error.value.location == "engine-2"
    assert (
        error.value.message
        == "restarted 2 times in 6 hours, and it failed again; the first cause: engine-1: out of memory"
    )
    assert "logs/engine-2.log" in error.value.hint
    assert "pipeline.max_restarts" in error.value.hint


async def test_restarts_of_long_ago_do_not_count() -> None:
    notes, clock = Notes(), [0.0]
    budget = RestartBudget(2, notes._record, notes.warnings.append, lambda: clock[0])
    for number in range(20):
        clock[0] = number * WINDOW_S / 2
        await budget.spend("engine", "engine-0", f"cause {number}")
    with pytest.raises(RunError, match="the first cause: engine-0: cause 18"):
        await budget.spend("engine", "engine-0", "again")
