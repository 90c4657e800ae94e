"""How runs end that do not finish: killed, interrupted or failed. No process or file of them remains."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from asyncrl_cli.journal.schema import FILE, open_for_reading

from .conftest import Runs, mark_of, processes_of, rows, until
from .journal import steps_of

pytestmark = pytest.mark.stack


def step_of(runs: Runs) -> int:
    try:
        return int(json.loads((runs.newest() / "state.json").read_text())["step"])
    except (OSError, ValueError):
        return 0


@pytest.fixture
def own_runs(tmp_path: Path, shared_runs: Runs) -> Runs:
    """A runs folder of its own that shares the warm-started models."""
    (shared_runs.folder / "models").mkdir(exist_ok=True)
    (tmp_path / "models").symlink_to(shared_runs.folder / "models")
    return Runs(tmp_path)


def resumed(runs: Runs, more: int) -> Path:
    """Resume the newest run for some more steps, and check the whole run."""
    run = runs.newest()
    journal = run / FILE
    last = (len(steps_of(run)) if journal.exists() else 0) + more
    ended = runs.run("resume", run.name[:-2], "--runs-dir", runs.folder, "--steps", str(last))
    assert ended.code == 0, ended.out + ended.err + runs.logs()
    assert json.loads((run / "state.json").read_text())["step"] == last
    metrics = rows(run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, last + 1)), "every step is reported once"
    assert max(row["staleness/groups_max"] for row in metrics) <= 2
    steps = steps_of(run)
    assert [step.number for step in steps if step.digest] == list(range(1, last + 1))
    uids = [uid for step in steps for uid in step.uids]
    assert len(uids) == len(set(uids)), "no prompt is trained on twice"
    return run


def interrupted(runs: Runs, process: subprocess.Popen[str]) -> Path:
    """Press Ctrl-C; the run must print in one line how to resume it."""
    process.send_signal(signal.SIGINT)
    ended = runs.wait(process)
    run = runs.newest()
    assert ended.code == 130, ended.out + ended.err
    assert f"asyncrl resume {run}" in ended.err
    assert "Traceback" not in ended.err
    assert json.loads((run / "state.json").read_text())["phase"] == "interrupted"
    return run


def test_a_killed_driver_leaves_no_process_and_the_run_can_be_resumed_interrupted_and_resumed(own_runs: Runs) -> None:
    process = own_runs.start("train", own_runs.write_spec(stop={"steps": 300}, checkpoints={"every": 2}))
    until(lambda: list(own_runs.folder.glob("*/manifest.json")), "the run's folder")
    until(lambda: list(own_runs.newest().glob("checkpoints/step-*")) or process.poll() is not None, "a checkpoint")
    mark = mark_of(process.pid)
    assert mark
    assert processes_of(mark)
    process.kill()
    process.communicate()
    until(lambda: not processes_of(mark), "the run's processes to end", 60)
    listed = own_runs.run("runs", "--runs-dir", own_runs.folder, "--json")
    assert [run["phase"] for run in json.loads(listed.out)] == ["died"]

    trained = len(steps_of(own_runs.newest()))
    process = own_runs.start("resume", own_runs.newest().name[:-2], "--runs-dir", own_runs.folder)
    until(lambda: step_of(own_runs) >= trained + 3 or process.poll() is not None, "three more steps")
    refused = own_runs.run("resume", "latest", "--runs-dir", own_runs.folder)
    assert refused.code == 2, "it has a driver"
    assert f"pid {process.pid}" in refused.err
    interrupted(own_runs, process)

    run = resumed(own_runs, more=3)
    again = own_runs.run("resume", run.name, "--runs-dir", own_runs.folder)
    assert again.code == 2
    assert "--steps" in again.err


@pytest.mark.parametrize("log", ["reaper.log", "trainer-0.log"])
def test_ctrl_c_ends_a_run_that_starts(own_runs: Runs, log: str) -> None:
    process = own_runs.start("train", own_runs.write_spec(stop={"steps": 300}))
    until(lambda: list(own_runs.folder.glob("*/manifest.json")), "the run's folder")
    until(lambda: (own_runs.newest() / "logs" / log).exists() or process.poll() is not None, log)
    interrupted(own_runs, process)


@pytest.mark.rotating
def test_ctrl_c_ends_an_evaluation(own_runs: Runs) -> None:
    spec = own_runs.write_spec(model={"warm_start": None})
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


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["gcs_server", pytest.param("raylet", marks=pytest.mark.nightly)])
def test_the_end_of_rays_own_process_is_named_with_the_command_that_continues(own_runs: Runs, name: str) -> None:
    process = own_runs.start("train", own_runs.write_spec(stop={"steps": 300}))
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
        model={"warm_start": None},
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


@pytest.mark.rotating
def test_an_engine_that_cannot_start_is_named_with_its_cause_and_not_started_again(own_runs: Runs) -> None:
    spec = own_runs.write_spec(model={"warm_start": None}, rollout={"engine_args": {"block_size": 7}})
    ended = own_runs.run("train", spec)
    assert ended.code == 1, "processes were started"
    assert "vLLM does not start: " in ended.err
    assert "logs/engine-0.log" in ended.err
    assert "restart" not in ended.err
    assert "Traceback" not in ended.out + ended.err


@pytest.mark.rotating
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
