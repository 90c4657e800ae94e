"""Runs that cannot go on stop, and say what for; rewards that hang do not hold one up."""

from __future__ import annotations

import json
import re
import signal
import textwrap
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.e2e.conftest import Runs
from tests.e2e.faults.conftest import Disturb
from tests.e2e.faults.disturbed import Ended
from tests.e2e.faults.verdict import judge, left_behind, litter

pytestmark = pytest.mark.stack


def test_a_stalled_trainer_is_named_and_the_run_can_be_resumed(disturb: Disturb) -> None:
    before = litter()
    limit_s = 12
    run = disturb(40, pipeline={"stall_minutes": limit_s / 60}, checkpoints={"every": 10})
    assert run.strike("trainer", "settled", signal.SIGSTOP)
    with pytest.raises(Ended):
        run.until(lambda: False, "the end")
    assert run.code == 1
    said = run.said()
    assert "Traceback" not in said
    named = re.search(r"nothing moved: .*the trainer[^;]* since \d\d:\d\d:\d\d \((\d+) s\)", said)
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
    with closing(open_for_reading(runs.newest() / FILE)) as connection:
        (rejected,) = connection.execute("SELECT count(*) FROM groups WHERE reason = 'uniform'").fetchone()
    assert rejected >= 20


def test_rewards_that_hang_cost_their_groups_and_the_journal_says_why(tmp_path: Path) -> None:
    source = """
        import time

        def reward(prompt, response):
            if prompt["bad"]:
                time.sleep(600)
            return len(response) % 3 / 2
    """
    (tmp_path / "hanging.py").write_text(textwrap.dedent(source))
    prompts = [{"uid": str(index), "prompt": f"word {index}", "bad": index in (1, 6)} for index in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = Runs(tmp_path).train(
        model={"warm_start": None},
        task={"use": "hanging:reward", "reward_timeout_s": 0.5},
        data={"train": {"path": "prompts.jsonl"}, "eval": {"path": "prompts.jsonl", "size": 1}, "shuffle": False},
        rollout={"group_size": 2},
        pipeline={"groups_per_step": 4},
        stop={"steps": 5},
    )
    with closing(open_for_reading(run / FILE)) as connection:
        failed = connection.execute(
            "SELECT DISTINCT g.uid, g.state, g.reason FROM groups g JOIN rollouts r ON r.group_id = g.id "
            "WHERE r.failure LIKE '%took more than 0.5 s%' ORDER BY g.uid"
        ).fetchall()
        (steps,) = connection.execute("SELECT count(*) FROM batches WHERE trained_at IS NOT NULL").fetchone()
    assert failed == [("1", "rejected", "failed"), ("6", "rejected", "failed")]
    assert steps == 5
