"""Parts of real runs are killed; the campaign (`make faults`) does the same for longer."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Runs
from tests.e2e.faults.conftest import Disturb
from tests.e2e.faults.verdict import differences, judge, litter, replay_violations

pytestmark = pytest.mark.stack


def test_a_run_survives_all_its_parts(disturb: Disturb, shared_runs: Runs) -> None:
    before = litter()
    run = disturb(60, checkpoints={"every": 10})
    for blow in ("buffer commit", "trainer settled", "core publish", "scorer settled"):
        assert run.strike(*blow.split())
    run.finish()
    assert run.resumes == 0
    assert judge(run, before).violations == ()
    assert replay_violations(shared_runs, run) == []


def test_without_staleness_a_disturbed_run_equals_the_undisturbed_one(disturb: Disturb) -> None:
    sections = {"pipeline": {"max_staleness": 0}, "checkpoints": {"every": 5}}
    undisturbed = disturb(25, **sections)
    undisturbed.finish()
    before = litter()
    run = disturb(25, **sections)
    for blow in ("engine settled", "driver publish", "trainer resume"):
        assert run.strike(*blow.split())
    run.finish()
    assert run.resumes == 1
    assert judge(run, before).violations == ()
    assert differences(run.folder, undisturbed.folder) == []
