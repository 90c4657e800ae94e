"""Faults that a run survives are counted by kind, recorded and shown. Too many end the run with the first cause."""

from __future__ import annotations

import asyncio

import pytest
from stand_ins import Notes

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.system.supervised_actor import WINDOW_S, ActorKind, RestartBudget


def restart(budget: RestartBudget, kind: ActorKind, name: str, cause: str) -> None:
    asyncio.run(budget.spend(kind, name, cause))


def test_every_restart_is_recorded_and_shown() -> None:
    notes = Notes()
    budget = notes.budget(2)
    restart(budget, "engine", "engine-1", "the process died")
    restart(budget, "engine", "engine-0", "no answer within 120 s")
    assert notes == [("engine", "engine-1", "the process died"), ("engine", "engine-0", "no answer within 120 s")]
    assert notes.warnings == [
        "engine-1: the process died; restart 1 of at most 2 in 6 hours",
        "engine-0: no answer within 120 s; restart 2 of at most 2 in 6 hours",
    ]


def test_one_too_many_ends_the_run_with_the_first_cause() -> None:
    notes = Notes()
    budget = notes.budget(2)
    for name, cause in (("engine-1", "out of memory"), ("engine-0", "died"), ("engine-2", "hangs")):
        if name == "engine-2":
            with pytest.raises(RunError) as error:
                restart(budget, "engine", name, cause)
        else:
            restart(budget, "engine", name, cause)
    assert error.value.location == "engine-2"
    assert (
        error.value.message
        == "restarted 2 times in 6 hours, and it failed again; the first cause: engine-1: out of memory"
    )
    assert "logs/engine-2.log" in error.value.hint
    assert "pipeline.max_restarts" in error.value.hint
    assert notes[-1] == ("engine", "engine-2", "hangs"), "the last one is recorded, too"


def test_kinds_are_counted_separately() -> None:
    budget = Notes().budget(1)
    kinds: list[ActorKind] = ["engine", "trainer", "gateway", "scorer"]
    for kind in kinds:
        restart(budget, kind, kind, f"the {kind}'s first")
    for kind in kinds:
        with pytest.raises(RunError, match=f"the first cause: {kind}: the {kind}'s first"):
            restart(budget, kind, kind, "again")


def test_a_fault_without_a_restart_is_recorded_but_not_counted() -> None:
    notes = Notes()
    budget = notes.budget(1)
    for _ in range(3):
        asyncio.run(budget.note("weights", "trainer-0", "other bits"))
    restart(budget, "trainer", "trainer-0", "died")
    assert notes[:3] == [("weights", "trainer-0", "other bits")] * 3
    assert notes.warnings[:3] == ["trainer-0: other bits"] * 3


def test_restarts_of_long_ago_do_not_count() -> None:
    notes, clock = Notes(), [0.0]
    budget = RestartBudget(2, notes._record, notes.warnings.append, lambda: clock[0])
    for number in range(20):
        clock[0] = number * WINDOW_S / 2
        restart(budget, "engine", "engine-0", f"cause {number}")
    with pytest.raises(RunError, match="the first cause: engine-0: cause 18"):
        restart(budget, "engine", "engine-0", "again")
