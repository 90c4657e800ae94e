"""A run whose trainer stalls stops, reports that, and can be resumed."""

from __future__ import annotations

import re
import signal

import pytest

from tests.e2e.conftest import leftover_files
from tests.e2e.faults.conftest import Disturb
from tests.e2e.faults.disturbed import Ended
from tests.e2e.faults.verdict import judge, left_behind

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def test_a_stalled_trainer_is_named_and_the_run_can_be_resumed(disturb: Disturb) -> None:
    before = leftover_files()
    limit_s = 60  # an engine's start may take half of it, because other runs use this machine
    run = disturb(40, pipeline={"stall_minutes": limit_s / 60}, checkpoints={"every": 10})
    assert run.inject("trainer", "settled", signal.SIGSTOP)
    with pytest.raises(Ended):
        run.until(lambda: False, "the end")
    assert run.code == 1
    printed = run.printed()
    assert "Traceback" not in printed
    named = re.search(r"no progress: .*the trainer[^;]* since \d\d:\d\d:\d\d \((\d+) s\)", printed)
    assert named, printed
    assert int(named[1]) >= limit_s
    assert left_behind(run, before) == []
    run.resume("--set", "pipeline.stall_minutes=10")
    run.finish()
    assert judge(run, before).violations == ()
