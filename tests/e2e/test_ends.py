"""How runs end when they do not finish: killed, interrupted, or failed. Nothing of them stays behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from .conftest import Runs, mark_of, processes_of, rows, until

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


def test_a_killed_driver_leaves_no_process_and_can_be_resumed(own_runs: Runs) -> None:
    process = own_runs.start("train", own_runs.write_spec(stop={"steps": 200}, checkpoints={"every": 2}))
    until(lambda: list(own_runs.folder.glob("*/manifest.json")), "the run's folder")
    until(lambda: list(own_runs.newest().glob("checkpoints/step-*")) or process.poll() is not None, "a checkpoint")
    mark = mark_of(process.pid)
    assert mark
    assert processes_of(mark)
    process.kill()
    process.communicate()
    until(lambda: not processes_of(mark), "the run's processes to end", 60)
    listed = own_runs.run("runs", "--runs-dir", own_runs.folder, "--json")
    assert [run["state"] for run in json.loads(listed.out)] == ["died"]

    run = own_runs.newest()
    saved = max(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))
    ended = own_runs.run("resume", "latest", "--runs-dir", own_runs.folder, "--steps", str(saved + 4))
    assert ended.code == 0, ended.out + ended.err + own_runs.logs()
    assert json.loads((run / "state.json").read_text())["step"] == saved + 4
    resumed = rows(run, "metrics.jsonl")[-4:]
    assert [row["step"] for row in resumed] == list(range(saved + 1, saved + 5))
    assert max(row["staleness/groups_max"] for row in resumed) <= 2


def test_ctrl_c_saves_says_how_to_go_on_and_resume_does(own_runs: Runs) -> None:
    process = own_runs.start("train", own_runs.write_spec(stop={"steps": 300}))
    until(lambda: list(own_runs.folder.glob("*/manifest.json")), "the run's folder")
    until(lambda: step_of(own_runs) >= 3 or process.poll() is not None, "some steps")
    process.send_signal(signal.SIGINT)
    ended = own_runs.wait(process)
    run = own_runs.newest()
    assert ended.code == 130, ended.out + ended.err
    assert f"asyncrl resume {run.name}" in ended.err
    assert "Traceback" not in ended.err
    stopped = json.loads((run / "state.json").read_text())
    assert stopped["phase"] == "interrupted"

    saved = max(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))
    ended = own_runs.run("resume", run.name[:-2], "--runs-dir", own_runs.folder, "--steps", str(saved + 3))
    assert ended.code == 0, ended.out + ended.err + own_runs.logs()
    batches = rows(run, "batches.jsonl")
    assert [row["step"] for row in batches][-3:] == [saved + 1, saved + 2, saved + 3]
    trained = {row["step"]: row["uids"] for row in batches}
    uids = [uid for row in trained.values() for uid in row]
    assert len(uids) == len(set(uids))  # the loader repeats no prompt

    again = own_runs.run("resume", run.name, "--runs-dir", own_runs.folder)
    assert again.code == 1
    assert "--steps" in again.err


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("raise RuntimeError('no such answer')", "no such answer"),
        ("return float('nan')", "nan"),
        ("import time; time.sleep(600)", "took more than 1 s"),
    ],
    ids=["raises", "nan", "hangs"],
)
def test_a_bad_reward_ends_the_run_with_its_name(own_runs: Runs, reward: str, says: str) -> None:
    (own_runs.folder / "bad_reward.py").write_text(f"def reward(prompt, response):\n    {reward}\n")
    (own_runs.folder / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    spec = own_runs.write_spec(
        model={"warm_start": None},
        task={"use": "bad_reward:reward", "reward_timeout_s": 1.0},
        data={"train": {"path": "prompts.jsonl"}, "eval": {"path": "prompts.jsonl", "size": 1}},
    )
    ended = own_runs.run("train", spec)
    assert ended.code == 1
    assert says in ended.err
    assert "bad_reward" in ended.err
    assert "Traceback" not in ended.out + ended.err
    assert json.loads((own_runs.newest() / "state.json").read_text())["phase"] == "failed"


def test_an_engine_that_cannot_start_is_named_with_its_log(own_runs: Runs) -> None:
    spec = own_runs.write_spec(model={"warm_start": None}, rollout={"engine_args": {"block_size": 7}})
    ended = own_runs.run("train", spec)
    assert ended.code == 1
    assert "engine-0" in ended.err
    assert "logs/engine-0.log" in ended.err
    assert "Traceback" not in ended.out + ended.err


def test_a_run_that_is_being_driven_is_not_resumed(own_runs: Runs) -> None:
    process = own_runs.start("train", own_runs.write_spec(model={"warm_start": None}))
    try:
        until(lambda: list(own_runs.folder.glob("*/manifest.json")), "the run's folder")
        refused = own_runs.run("resume", "latest", "--runs-dir", own_runs.folder)
        assert refused.code == 1
        assert f"pid {process.pid}" in refused.err
    finally:
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=120)
