"""Engines join and leave while a real run trains: by command, and by SIGTERM."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.conftest import Runs, leftover_files
from tests.e2e.faults.conftest import Disturb
from tests.e2e.faults.disturbed import DisturbedRun
from tests.e2e.faults.verdict import judge

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def scale(runs: Runs, run: DisturbedRun, engines: int) -> str:
    """`asyncrl scale`, which must be accepted; returns its output."""
    ended = runs.run("scale", run.folder.name, "--engines", str(engines), "--runs-dir", runs.folder)
    assert ended.code == 0, ended.err + run.printed()
    return ended.out


def changes(run: DisturbedRun, change: str) -> int:
    """How often engines have joined, or left."""
    return int(run.ask(f"SELECT count(*) FROM engine_changes WHERE change = '{change}'") or 0)


def aborted(run: DisturbedRun) -> int:
    """How many requests were taken from an engine that left, to continue on another."""
    return int(run.ask("SELECT count(*) FROM engine_requests WHERE ending = 'aborted'") or 0)


def terminate_the_only_engine(run: DisturbedRun) -> None:
    """Send SIGTERM; its rollouts wait for the engine that replaces it."""
    joined, trained = changes(run, "join"), run.trained()
    (engine,) = run.pids("engine")
    os.kill(engine, signal.SIGTERM)
    run.until(lambda: changes(run, "join") == joined + 1, "an engine that replaces it")
    run.until(lambda: run.trained() > trained + 1, "steps of its rollouts")


def test_engines_come_and_go_while_a_run_trains(disturb: Disturb, shared_runs: Runs) -> None:
    before = leftover_files()
    run = disturb(
        250,
        rollout={"engines": {"min": 1, "max": 2}, "max_running_rollouts": 8, "group_size": 4},
        pipeline={"groups_per_step": 4},
    )
    run.until(lambda: changes(run, "join") == 2, "a second engine")
    assert "1 engine serves" in scale(shared_runs, run, 1)
    run.until(lambda: changes(run, "leave") == 1, "the second one to leave")
    refused = shared_runs.run("scale", run.folder.name, "--engines", "3", "--runs-dir", shared_runs.folder)
    reason = "error: the run refuses 3 engines: 3 is not between 1 and 2"
    assert (refused.code, refused.err.splitlines()[0]) == (2, reason)
    kills = 0
    while not kills or not aborted(run):  # by chance an engine may have no request at the moment of the signal
        kills += 1
        assert kills <= 5, "an engine that left handed over none of its requests" + run.printed()
        terminate_the_only_engine(run)
    assert "2 engines serve" in scale(shared_runs, run, 2)
    run.finish()
    assert judge(run, before).violations == ()
    assert run.ask("SELECT count(*) FROM failures") == 0, "nothing failed"
    assert (changes(run, "join"), changes(run, "leave")) == (3 + kills, 1 + kills)
    lost = "SELECT count(*) FROM engine_requests WHERE ending IN ('lost', 'failed')"
    assert run.ask(lost) == 0, "all requests were handed over"
