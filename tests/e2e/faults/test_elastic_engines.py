"""Engines join while a real run trains."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import leftover_files
from tests.e2e.faults.conftest import Disturb
from tests.e2e.faults.verdict import judge

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def test_an_engine_joins_while_a_run_trains(disturb: Disturb) -> None:
    before = leftover_files()
    run = disturb(
        40,
        rollout={"engines": {"min": 1, "max": 2}, "max_running_rollouts": 8, "group_size": 4},
        pipeline={"groups_per_step": 4},
    )
    joins = "SELECT count(*) FROM engine_changes WHERE change = 'join'"
    run.until(lambda: run.ask(joins) == 2, "a second engine")
    trained = run.trained()
    run.until(lambda: run.trained() > trained + 1, "steps with it")
    run.finish()
    assert judge(run, before).violations == ()
    assert run.ask("SELECT count(*) FROM failures") == 0, "nothing failed"
    assert run.ask("SELECT count(DISTINCT engine) FROM engine_requests") == 2, "both engines generated"
