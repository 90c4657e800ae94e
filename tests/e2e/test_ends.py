"""Runs that cannot continue name the cause, and leave no process or file."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.small_models import UNTRAINED

from .conftest import Runs, mark_of, processes_of, until

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def step_of(runs: Runs) -> int:
    try:
        return int(json.loads((runs.newest() / "state.json").read_text())["step"])
    except (OSError, ValueError):
        return 0


@pytest.fixture
def own_runs(tmp_path: Path) -> Runs:
    """A runs folder of its own."""
    return Runs(tmp_path)


def test_ctrl_c_ends_an_evaluation(own_runs: Runs) -> None:
    spec = own_runs.write_spec(model=UNTRAINED)
    process = own_runs.start("evaluate", spec, "--samples", "500", "--json")
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any(line.startswith("generating") for line in lines), "it ended before"
    mark = mark_of(process.pid)
    assert mark and processes_of(mark)
    process.send_signal(signal.SIGINT)
    ended = own_runs.wait(process)
    assert (ended.code, ended.out, ended.err) == (130, "", "stopped\n")
    assert not processes_of(mark)


@pytest.mark.parametrize("name", ["gcs_server", pytest.param("raylet", marks=pytest.mark.nightly)])
def test_the_end_of_rays_own_process_is_named_with_the_command_that_continues(own_runs: Runs, name: str) -> None:
    process = own_runs.start("train", own_runs.write_spec(model=UNTRAINED, stop={"steps": 300}))
    until(lambda: step_of(own_runs) >= 1 or process.poll() is not None, "a step")
    mark = mark_of(process.pid)
    (own,) = [child for child in psutil.Process(process.pid).children() if child.name() == name]
    own.kill()
    ended = own_runs.wait(process)
    run = own_runs.newest()
    assert ended.code == 1, ended.out + ended.err
    assert f"error: Ray's process {name} was ended by SIGKILL\n --> cluster\nhint: asyncrl resume {run}\n" in ended.err
    assert "Traceback" not in ended.out + ended.err
    state = json.loads((run / "state.json").read_text())
    assert (state["phase"], "Ray's process" in state["reason"]) == ("failed", True)
    assert not processes_of(mark)


@pytest.mark.nightly  # test_outside_faults tests the failures, and the last test here tests the end of the run
@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("raise RuntimeError('no such answer')", "no such answer"),
        ("return float('nan')", "nan"),
        ("import time; time.sleep(600)", "took more than 1 s"),
    ],
    ids=["raises", "nan", "hangs"],
)
def test_a_bad_reward_ends_the_run_and_is_named(own_runs: Runs, reward: str, says: str) -> None:
    # The start calls the reward with the response "42".
    code = f"def reward(prompt, response):\n    if response == '42':\n        return 0.0\n    {reward}\n"
    (own_runs.folder / "bad_reward.py").write_text(code)
    (own_runs.folder / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    spec = own_runs.write_spec(
        model=UNTRAINED,
        task={"use": "bad_reward:reward", "reward_timeout_s": 1.0},
        rollout={"max_failed_share": 0.0},
        data={"train": {"path": "prompts.jsonl"}, "eval": {"path": "prompts.jsonl", "size": 1}},
    )
    ended = own_runs.run("train", spec)
    assert ended.code == 1
    assert says in ended.err
    assert "bad_reward.py:" in ended.err
    assert "Traceback" not in ended.out + ended.err
    assert json.loads((own_runs.newest() / "state.json").read_text())["phase"] == "failed"


def test_an_engine_that_cannot_start_is_named_with_its_cause_and_not_started_again(own_runs: Runs) -> None:
    spec = own_runs.write_spec(model=UNTRAINED, rollout={"engine_args": {"block_size": 7}})
    ended = own_runs.run("train", spec)
    assert ended.code == 1, "processes were started"
    assert "vLLM does not start: " in ended.err
    assert "logs/engine-0.log" in ended.err
    assert "restart" not in ended.err
    assert "Traceback" not in ended.out + ended.err


def test_a_run_that_learns_nothing_says_so_and_ends_with_a_checkpoint(own_runs: Runs) -> None:
    (own_runs.folder / "constant.py").write_text("def reward(prompt, response):\n    return 0.5\n")
    prompts = [{"uid": str(index), "prompt": f"word {index}"} for index in range(8)]
    (own_runs.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    spec = own_runs.write_spec(
        model=UNTRAINED,
        task={"use": "constant:reward"},
        data={"train": {"path": "prompts.jsonl"}, "eval": None},
        stop={"steps": 8, "on_unhealthy": 4},
    )
    ended = own_runs.run("train", spec)
    assert ended.code == 1
    assert "step 1/8  reward 0.500  teach 0/8  " in ended.out
    finding = "8 of 8 groups had equal rewards (mean 0.5)"
    assert ended.out.count(f"! step 3: {finding}, since step 1. Usual cause: ") == 1
    assert f"nothing was learned in 4 steps in a row; {finding}: " in ended.err and "Traceback" not in ended.err
    state = json.loads((own_runs.newest() / "state.json").read_text())
    assert (state["phase"], state["step"], state["findings"]) == ("failed", 4, ["equal_groups"])
    assert [path.name for path in (own_runs.newest() / "checkpoints").iterdir()] == ["step-000004"]


def test_a_run_whose_groups_are_all_rejected_says_so(own_runs: Runs) -> None:
    (own_runs.folder / "constant.py").write_text("def reward(prompt, response):\n    return 0.5\n")
    prompts = [{"uid": str(index), "prompt": f"word {index}"} for index in range(8)]
    (own_runs.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    ended = own_runs.run(
        "train",
        own_runs.write_spec(
            model=UNTRAINED,
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
    assert json.loads((own_runs.newest() / "state.json").read_text())["phase"] == "failed"
    with closing(open_for_reading(own_runs.newest() / FILE)) as connection:
        (rejected,) = connection.execute("SELECT count(*) FROM groups WHERE reason = 'uniform'").fetchone()
    assert rejected >= 20
