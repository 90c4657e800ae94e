"""Engines join while a real run trains, and leave after SIGTERM."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.conftest import leftover_files
from tests.e2e.faults.conftest import Disturb
from tests.e2e.faults.disturbed import DisturbedRun
from tests.e2e.faults.verdict import judge

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def changes(run: DisturbedRun, change: str) -> int:
    """How often engines have joined, or left."""
    return int(run.ask(f"SELECT count(*) FROM engine_changes WHERE change = '{change}'") or 0)


def aborted(run: DisturbedRun) -> int:
    """How many requests were taken from an engine that left, to continue on another."""
    return int(run.ask("SELECT count(*) FROM engine_requests WHERE ending = 'aborted'") or 0)


def terminate_an_engine(run: DisturbedRun) -> None:
    """Send SIGTERM to an engine; its rollouts continue on others, and another engine replaces it."""
    joined, trained = changes(run, "join"), run.trained()
    os.kill(run.pids("engine")[-1], signal.SIGTERM)
    run.until(lambda: changes(run, "join") == joined + 1, "an engine that replaces it")
    run.until(lambda: run.trained() > trained + 1, "steps of its rollouts")


def test_engines_come_and_go_while_a_run_trains(disturb: Disturb) -> None:
    before = leftover_files()
    run = disturb(
        250,
        rollout={"engines": {"min": 1, "max": 2}, "max_running_rollouts": 8, "group_size": 4},
        pipeline={"groups_per_step": 4},
    )
    run.until(lambda: changes(run, "join") == 2, "a second engine")
    kills = 0
    while not kills or not aborted(run):  # by chance an engine may have no request at the moment of the signal
        kills += 1
        assert kills <= 5, "an engine that left handed over none of its requests" + run.printed()
        terminate_an_engine(run)
    run.finish()
    assert judge(run, before).violations == ()
    assert run.ask("SELECT count(*) FROM failures") == 0, "nothing failed"
    assert (changes(run, "join"), changes(run, "leave")) == (2 + kills, kills)
    lost = "SELECT count(*) FROM engine_requests WHERE ending IN ('lost', 'failed')"
    assert run.ask(lost) == 0, "all requests were handed over"
