"""Parts of real runs are killed and suspended, drivers are killed and interrupted.

The campaign (`make faults`) does the same for a longer time.
"""

from __future__ import annotations

import json
import signal
import stat
from typing import Any

import pytest

from asyncrl_cli.runs.directory import RunDirectory
from tests.e2e.conftest import Runs, leftover_files
from tests.e2e.faults.campaign import KINDS, LONG_SUMS, OUTSIDE
from tests.e2e.faults.companions import AgentsRun
from tests.e2e.faults.conftest import Disturb
from tests.e2e.faults.disturbed import DisturbedRun
from tests.e2e.faults.verdict import differences, judge, left_behind, replay_violations
from tests.e2e.test_data import MIXTRAL

pytestmark = pytest.mark.stack

CHANGED: dict[str, dict[str, Any]] = {
    "weights": {},
    "adapter": {"model": {"lora": {"rank": 8, "alpha": 16.0, "serve": "adapter"}}},
    # Without a warm start all rewards are 0, and only the entropy bonus trains.
    "experts": {
        "model": {"init": MIXTRAL, "path": None},
        "algorithm": {"uniform_groups": "train", "entropy_coef": 0.01},
    },
}
LOST = {"trainer": 2, "engine": 2, "scorer": 1, "host-agent": 1}
"""How often the first test kills or suspends each part."""


def lost(run: DisturbedRun) -> dict[str, int]:
    return {part: run.ask(f"SELECT count(*) FROM failures WHERE kind = '{part}'") for part in LOST}


def test_a_run_survives_the_loss_of_any_part_its_drivers_death_and_ctrl_c(disturb: Disturb, shared_runs: Runs) -> None:
    before = leftover_files()
    # Ten seconds: an engine may get no CPU for some seconds, because other runs use this machine.
    run = disturb(1000, rollout={"hang_seconds": 10.0}, checkpoints={"every": 2})
    for fault in ("agent publish", "scorer commit", "core publish", "trainer save", "trainer publish"):
        run.strike(*fault.split())
    run.strike("core", "soon", signal.SIGSTOP)  # while the trainer restarts
    run.until(lambda: lost(run) == LOST, "the engine that hangs to be replaced")

    run.strike("driver", "save")
    assert left_behind(run, before) == []
    listed = shared_runs.run("runs", "--runs-dir", shared_runs.folder, "--json")
    assert {each["run"]: each["phase"] for each in json.loads(listed.out)}[run.folder.name] == "died"

    run.resume()
    trained = run.trained()
    run.until(lambda: run.trained() >= trained + 3, "three more steps")
    refused = shared_runs.run("resume", "latest", "--runs-dir", shared_runs.folder)
    assert refused.code == 2, "it has a driver"
    assert f"pid {run.pid}" in refused.err
    run.interrupt()
    assert left_behind(run, before) == []

    run.steps = run.taken() + 3
    run.resume("--steps", str(run.steps))
    run.finish()
    assert (run.stops, lost(run)) == ([], LOST), run.printed()
    assert judge(run, before).violations == ()
    assert replay_violations(shared_runs, run) == []
    state = RunDirectory(run.folder).state
    assert (state.phase, state.step) == ("finished", run.steps)
    refused = shared_runs.run("resume", run.folder.name[:-2], "--runs-dir", shared_runs.folder)
    assert refused.code == 2
    assert "--steps" in refused.err


@pytest.mark.rotating
def test_kills_while_checkpoints_are_written_leave_the_last_one(disturb: Disturb, shared_runs: Runs) -> None:
    """Two ranks of ZeRO 3 write in the background; replay trains the recorded batches to the published weights."""
    before = leftover_files()
    trainer = {"ranks": 2, "zero_stage": 3}
    run = disturb(30, trainer=trainer, checkpoints={"every": 2, "keep_last": 2})
    for fault in ("trainer save", "driver save", "trainer save"):
        assert run.inject(*fault.split())
    run.finish()
    assert run.stops == []
    assert judge(run, before).violations == ()
    assert replay_violations(shared_runs, run) == []
    saved = run.ask("SELECT count(*) FROM checkpoints WHERE stall_s < seconds")
    assert saved >= 10, "checkpoints were completed after training had continued"


@pytest.mark.rotating
@pytest.mark.parametrize("log", ["reaper.log", "trainer-0.log"])
def test_ctrl_c_ends_a_run_that_starts(disturb: Disturb, log: str) -> None:
    before = leftover_files()
    run = disturb(300)
    run.until((run.folder / "logs" / log).exists, log)
    run.interrupt()
    assert left_behind(run, before) == []


@pytest.mark.rotating
def test_every_token_of_outside_programs_is_accounted_for(disturb: Disturb) -> None:
    before = leftover_files()
    run = disturb(12, AgentsRun, **KINDS[OUTSIDE])
    assert isinstance(run, AgentsRun)
    assert stat.S_IMODE(run.access.stat().st_mode) == 0o600
    for fault in ("program settled", "driver settled"):
        assert run.inject(*fault.split())
    run.finish()
    assert run.stops == []
    assert judge(run, before).violations == ()
    assert run.sessions_audit
    counts = run.sessions_audit.counts
    assert counts["rewarded sessions in trained groups"] >= 12 * 8 * 2
    assert counts["starts"] == 2
    assert counts["branches"] == 0, "each program had one conversation, before and after the kill"


@pytest.mark.nightly
@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_without_staleness_a_disturbed_run_equals_the_undisturbed_one(
    disturb: Disturb, changed: dict[str, dict[str, Any]]
) -> None:
    sections: dict[str, Any] = {
        **LONG_SUMS,  # at any moment many rollouts are unfinished, with some tokens recorded
        **changed,
        "model": {**LONG_SUMS["model"], **changed.get("model", {})},
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
