"""Runs that cannot go on stop, and say what for; rewards that hang do not hold one up."""

from __future__ import annotations

import json
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.e2e.conftest import Runs, litter
from tests.e2e.faults.conftest import Disturb
from tests.e2e.faults.disturbed import Ended
from tests.e2e.faults.verdict import judge, left_behind

pytestmark = pytest.mark.stack


def test_a_stalled_trainer_is_named_and_the_run_can_be_resumed(disturb: Disturb) -> None:
    before = litter()
    limit_s = 12
    run = disturb(40, pipeline={"stall_minutes": limit_s / 60}, checkpoints={"every": 10})
    assert run.inject("trainer", "settled", signal.SIGSTOP)
    with pytest.raises(Ended):
        run.until(lambda: False, "the end")
    assert run.code == 1
    said = run.said()
    assert "Traceback" not in said
    named = re.search(r"no progress: .*the trainer[^;]* since \d\d:\d\d:\d\d \((\d+) s\)", said)
    assert named, said
    assert limit_s <= int(named[1]) < 2 * limit_s
    assert left_behind(run, before) == []
    run.resume()
    run.finish()
    assert judge(run, before).violations == ()


def test_a_run_whose_groups_are_all_rejected_says_so(tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text("def reward(prompt, response):\n    return 0.5\n")
    prompts = [{"uid": str(index), "prompt": f"word {index}"} for index in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    runs = Runs(tmp_path)
    ended = runs.run(
        "train",
        runs.write_spec(
            model={"warm_start": None},
            task={"use": "constant:reward"},
            data={"train": {"path": "prompts.jsonl"}, "eval": {"path": "prompts.jsonl"}},
            algorithm={"uniform_groups": "reject"},
            pipeline={"max_rejected_in_a_row": 20},
        ),
    )
    assert ended.code == 1
    assert "groups were all rejected" in ended.err, ended.err
    assert "algorithm.uniform_groups" in ended.err
    assert "Traceback" not in ended.out + ended.err
    assert json.loads((runs.newest() / "state.json").read_text())["phase"] == "failed"
    with closing(open_for_reading(runs.newest() / FILE)) as connection:
        (rejected,) = connection.execute("SELECT count(*) FROM groups WHERE reason = 'uniform'").fetchone()
    assert rejected >= 20
