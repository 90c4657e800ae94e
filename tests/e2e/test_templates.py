"""From `asyncrl init` to a trained run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asyncrl_cli.records.generation import CONTEXT

from .conftest import LIMIT_S, Runs, rows, until
from .journal import groups_of

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def test_an_agent_is_trained_as_it_comes(shared_runs: Runs) -> None:
    shared_runs.succeed("init", "agent", "my-task")
    spec = shared_runs.folder / "my-task/spec.yaml"
    changes = ("stop.steps=3", f"runs_dir={shared_runs.folder}", "tracking.mlflow=false")
    run = shared_runs.train_spec(spec, *changes)
    assert run.name.startswith("my-task-")
    metrics = rows(run, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(1.0 <= row["task/tries"] <= 2.0 for row in metrics), "the agent's measurement is a metric"
    trained = groups_of(run)
    assert len(trained) == 3 * 4 and all(group.row.state == "trained" for group in trained)
    for rollout in (rollout for group in trained for rollout in group.rollouts):
        # One sequence: question, reply, and (unless that was right) hint and reply.
        given = [segment.version == CONTEXT for segment in rollout.segments]
        assert {segment.rollout_id for segment in rollout.segments} == {rollout.rollout_id}
        assert given[0] and not given[-1] and sum(given) == rollout.metrics["tries"]


def test_a_program_outside_of_the_run_is_trained_as_it_comes(shared_runs: Runs) -> None:
    shared_runs.succeed("init", "outside-agent", "outside-task")
    folder = shared_runs.folder / "outside-task"
    changes = ("stop.steps=2", f"runs_dir={folder}/runs", "tracking.mlflow=false", "rollout.gateway.port=0")
    driver = shared_runs.start(
        "train", folder / "spec.yaml", *(word for change in changes for word in ("--set", change))
    )
    (access,) = until(lambda: list(folder.glob("runs/*/sessions.json")) or driver.poll(), "the run's address")
    client = subprocess.run(
        [sys.executable, folder / "client.py", access], check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    ended = shared_runs.wait(driver)
    assert ended.code == 0, ended.out + ended.err
    assert client.returncode == 0, client.stderr
    metrics = rows(access.parent, "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert int(client.stdout.split()[0]) >= metrics[-1]["buffer/groups_taken"] * 4
    assert metrics[-1]["sessions/handed_out"] >= 2 * 4 * 4
