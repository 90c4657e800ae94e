"""Parts of real runs are killed and suspended. The campaign (`make faults`) does the same for a longer time."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.e2e.conftest import Runs, leftover_files
from tests.e2e.faults.campaign import LONG_WORDS
from tests.e2e.faults.conftest import Disturb
from tests.e2e.faults.verdict import differences, judge, replay_violations
from tests.e2e.test_data import MIXTRAL

pytestmark = pytest.mark.stack

CHANGED: dict[str, dict[str, Any]] = {
    "weights": {},
    "adapter": {"model": {"lora": {"rank": 8, "alpha": 16.0, "serve": "adapter"}}},
    # Without a warm start all rewards are 0, and only the entropy bonus trains.
    "experts": {
        "model": {"init": MIXTRAL, "warm_start": None},
        "algorithm": {"router_replay": True, "uniform_groups": "train", "entropy_coef": 0.01},
    },
}
PARTS = ("trainer", "engine", "scorer", "host-agent")


def test_a_run_survives_the_death_of_any_part_and_an_engine_that_hangs(disturb: Disturb, shared_runs: Runs) -> None:
    before = leftover_files()
    # Ten seconds: an engine may get no CPU for some seconds, because other runs use this machine.
    run = disturb(100, rollout={"hang_seconds": 10.0}, checkpoints={"every": 10})
    for fault in ("trainer publish", "agent publish", "core publish", "scorer commit"):
        assert run.inject(*fault.split())
    assert run.inject("core", "settled", signal.SIGSTOP)
    run.finish()
    assert run.resumes == 0
    assert judge(run, before).violations == ()
    assert replay_violations(shared_runs, run) == []
    failures = {part: run.ask(f"SELECT count(*) FROM failures WHERE kind = '{part}'") for part in PARTS}
    assert failures == {"trainer": 1, "engine": 2, "scorer": 1, "host-agent": 1}, run.printed()


def test_kills_while_checkpoints_are_written_leave_the_last_one(disturb: Disturb, shared_runs: Runs) -> None:
    """Two ranks of ZeRO 3 write in the background; replay trains the recorded batches to the published weights."""
    before = leftover_files()
    trainer = {"ranks": 2, "zero_stage": 3}
    run = disturb(40, trainer=trainer, checkpoints={"every": 2, "keep_last": 2}, pipeline={"max_restarts": 10})
    for fault in ("trainer save", "driver save", "trainer save"):
        assert run.inject(*fault.split())
    run.finish()
    assert run.stops == []
    assert judge(run, before).violations == ()
    assert replay_violations(shared_runs, run) == []
    saved = run.ask("SELECT count(*) FROM checkpoints WHERE stall_s < seconds")
    assert saved >= 10, "checkpoints were completed after training had continued"


@pytest.mark.nightly
@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_without_staleness_a_disturbed_run_equals_the_undisturbed_one(
    disturb: Disturb, changed: dict[str, dict[str, Any]]
) -> None:
    sections: dict[str, Any] = {
        **LONG_WORDS,  # at any moment many rollouts are unfinished, with some tokens recorded
        **changed,
        "model": {**LONG_WORDS["model"], **changed.get("model", {})},
        "pipeline": {"max_staleness": 0},
        "checkpoints": {"every": 5},
    }
    undisturbed = disturb(40, **sections)
    undisturbed.finish()
    before = leftover_files()
    run = disturb(40, **sections)
    for fault in ("core commit", "driver commit", "engine commit", "driver publish", "trainer resume"):
        assert run.inject(*fault.split())
    run.finish()
    assert run.resumes == 2
    assert run.evidence.prefixes_seen > 0, "no rollout was interrupted"
    assert judge(run, before).violations == ()
    assert differences(run.folder, undisturbed.folder) == []
