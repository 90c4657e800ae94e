"""The run continues when parts outside it fail: reward functions and MLflow's server."""

from __future__ import annotations

import json
import signal
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl_cli.journal.schema import FILE, open_for_reading
from tests.monitors.mlflow_server import Server
from tests.small_models import UNTRAINED

from .conftest import Runs, rows, until

pytestmark = [pytest.mark.stack, pytest.mark.rotating]

REWARD = """
    import os, re, time

    def reward(prompt, response):
        if "fault" in prompt:
            exec(prompt["fault"])
            return float("nan")
        return len(response) % 5 / 4
"""
FAULTS = {
    "raises": "raise RuntimeError('no such answer')",
    "is nan": "pass",
    "sleeps": "time.sleep(600)",
    "backtracks": "re.match('(a+)+$', 'a' * 60 + 'b')",
    "exits": "os._exit(3)",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "server").mkdir()
    late = Server(tmp_path / "server")
    yield late
    late.stop()


def failed_prompts(run: Path) -> list[tuple[str, str, str]]:
    """The groups that have ended, of prompts whose reward must fail."""
    with closing(open_for_reading(run / FILE)) as journal:
        return journal.execute(
            "SELECT DISTINCT uid, state, reason FROM groups WHERE uid LIKE 'bad-%' "
            "AND state NOT IN ('running', 'finished') ORDER BY uid"
        ).fetchall()


def test_failing_rewards_cost_their_groups_and_an_mlflow_server_may_come_up_late(
    runs: Runs, tmp_path: Path, server: Server
) -> None:
    from mlflow.tracking import MlflowClient

    prompts = [{"uid": f"good-{index}", "prompt": f"word {index}"} for index in range(4000)]
    # Not in the first row: the start calls its reward.
    for place, (name, fault) in enumerate(FAULTS.items()):
        prompts.insert(2 * place + 1, {"uid": f"bad-{name}", "prompt": name, "fault": fault})
    (tmp_path / "bad_reward.py").write_text(textwrap.dedent(REWARD))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    spec = runs.write_spec(
        model=UNTRAINED,
        task={"use": "bad_reward:reward", "reward_timeout_s": 2.0},
        data={"train": {"path": "prompts.jsonl"}, "eval": {"path": "prompts.jsonl", "size": 10}, "shuffle": False},
        rollout={"group_size": 2, "max_failed_share": 1.0},
        pipeline={"groups_per_step": 4},
        tracking={"mlflow": True, "uri": server.uri},
        stop={"steps": 10_000},
    )
    process = runs.start("train", spec)

    until(lambda: runs.steps_done() >= 4 or process.poll() is not None, "four steps without a server")
    server.start()
    run = runs.newest()
    bad = [(f"bad-{name}", "rejected", "failed") for name in sorted(FAULTS)]
    until(lambda: failed_prompts(run) == bad or process.poll() is not None, "failed groups to be rejected")
    note = run / "mlflow.json"
    until(lambda: (note.exists() and json.loads(note.read_text())["offset"]) or process.poll() is not None, "MLflow")
    process.send_signal(signal.SIGINT)
    ended = runs.wait(process)
    assert ended.code == 130, ended.out + ended.err + runs.logs()
    steps = [row["step"] for row in rows(run, "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert failed_prompts(run) == bad
    with closing(open_for_reading(run / FILE)) as journal:
        causes = journal.execute("SELECT DISTINCT failure FROM rollouts WHERE failure != ''").fetchall()
    for cause in ("no such answer", "nan", "took more than 2 s", "exit status 3"):
        assert any(cause in text for (text,) in causes), (cause, causes)

    runs.succeed("track", "--runs-dir", tmp_path)
    mlflow_run = json.loads(note.read_text())["run_id"]
    client = MlflowClient(tracking_uri=server.uri)
    logged = client.get_metric_history(mlflow_run, "reward/mean")
    assert sorted(point.step for point in logged) == steps
    assert client.get_run(mlflow_run).info.status == "KILLED"
