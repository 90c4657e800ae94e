"""A run's numbers arrive in a real MLflow once it is available."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.monitors.base import FINISH_S, Ending, RunInfo
from asyncrl_cli.monitors.mlflow import sender as sender_module
from asyncrl_cli.monitors.mlflow import tracker
from asyncrl_cli.monitors.mlflow.sender import (
    PARAMETER_LENGTH,
    PROGRESS,
    Sender,
    SendingProgress,
    metric_name,
    target_of,
)
from asyncrl_cli.monitors.mlflow.tracker import Mlflow, send_until_end
from asyncrl_cli.runs.directory import RunDirectory

from .mlflow_runs import Logged, do_steps, evaluate, local, spec_of, started_run

LIMIT_S = 120.0
pytestmark = pytest.mark.stack


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return started_run(tmp_path)


def losses(last: int) -> list[tuple[int, float]]:
    return [(step, step / 8) for step in range(1, last + 1)]


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


# -- one attempt


def test_mlflow_has_everything_once_after_repeated_and_killed_attempts(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    run.write_text("spec.yaml", (run.path / "spec.yaml").read_text() + "\ntracking: {responses_every: 1}\n")
    do_steps(run, 1, 3)
    evaluate(run, 0, 0.25)
    run.update(step=3)
    Sender(run, target).send("RUNNING")
    do_steps(run, 4, 5)
    evaluate(run, 5, 0.75, [{"prompt": "1+1", "response": "2", "reward": 1.0}])
    run.update(step=5, steps=5)
    logged = Logged(target.uri)
    assert logged.run.data.tags["health"] == "ok"
    run.update(findings=("equal_groups", "entropy"))
    Sender(run, target).send("RUNNING")
    (run.path / PROGRESS).unlink()  # as if killed before anything was noted
    Sender(run, target).send("FINISHED")

    first_id, logged = logged.run.info.run_id, Logged(target.uri)
    assert logged.run.info.run_id == first_id
    assert logged.run.info.status == "FINISHED"
    assert logged.run.info.run_name == "spelling-1"
    assert logged.run.data.tags["health"] == "equal_groups, entropy"
    assert logged.run.info.start_time == 1767225600000
    assert logged.run.info.end_time == int(run.state.updated * 1000)
    assert logged.run.data.params["seed"] == "3"
    assert logged.run.data.params["task.options.a_b_"] == "[1, 2]"
    assert len(logged.run.data.params["long"]) == PARAMETER_LENGTH
    assert logged.history("loss") == losses(5)
    assert len(logged.history("ratio")) == 5, "not a number"
    assert logged.history("eval/greedy_accuracy") == [(0, 0.25), (5, 0.75)]
    assert logged.files() == {
        "spec.yaml",
        "evaluations/step-000000-greedy.jsonl",
        "evaluations/step-000005-greedy.jsonl",
        "responses/greedy.json",
    }
    responses = json.loads(logged.content("responses/greedy.json"))
    assert [row[:4] for row in responses["data"]] == [[0, "", "", None], [5, "1+1", "2", 1.0]], "each table once"


def test_a_resumed_run_continues_the_same_mlflow_run(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    do_steps(run, 1, 3)
    Sender(run, target).send("KILLED")
    run.write_rows("metrics.jsonl", run.read("metrics.jsonl")[:2])
    run.write_text("spec.yaml", "seed: 4\nadded: 1\n")
    do_steps(run, 3, 4, at=2_000_000.0)
    Sender(run, target).send("RUNNING")
    logged = Logged(target.uri)
    assert logged.run.info.status == "RUNNING"
    assert {step for step, _ in logged.history("loss")} == {1, 2, 3, 4}
    assert (logged.run.data.params["seed"], logged.run.data.params["added"]) == ("3", "1")


def test_a_deleted_mlflow_run_is_made_again(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    do_steps(run, 1, 2)
    Sender(run, target).send("RUNNING")
    logged = Logged(target.uri)
    logged.client.delete_run(logged.run.info.run_id)
    Sender(run, target).send("RUNNING")
    assert Logged(target.uri).history("loss") == losses(2)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"unknown": 1}', '{"run_id": "of another server", "sent": {}}'])
def test_everything_is_sent_if_the_progress_is_damaged_or_belongs_elsewhere(
    run: RunDirectory, tmp_path: Path, text: str
) -> None:
    do_steps(run, 1, 2)
    (run.path / PROGRESS).write_text(text)
    Sender(run, local(tmp_path)).send("RUNNING")
    assert Logged(local(tmp_path).uri).history("loss") == losses(2)


def sent_lines(run: RunDirectory, sender: Sender, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose lines an attempt sends."""
    steps: list[int] = []
    monkeypatch.setattr(sender, "_log", lambda metrics: steps.extend(metric.step for metric in metrics))
    sender._send_steps()
    return list(dict.fromkeys(steps))


def test_only_lines_after_the_noted_offset_are_sent(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "BLOCK", 100)
    sender = Sender(run, local(tmp_path))
    assert sent_lines(run, sender, monkeypatch) == [], "there is no file yet"
    do_steps(run, 1, 5)
    assert sent_lines(run, sender, monkeypatch) == [1, 2, 3, 4, 5]
    run.write_rows("metrics.jsonl", run.read("metrics.jsonl"))
    do_steps(run, 6, 6)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "ti')
    assert sent_lines(run, sender, monkeypatch) == [6]
    do_steps(run, 8, 9)
    another = Sender(run, local(tmp_path))
    assert sent_lines(run, another, monkeypatch) == [9], "the first line after half a line cannot be read"
    run.write_rows("metrics.jsonl", run.read("metrics.jsonl")[:2])
    assert sent_lines(run, another, monkeypatch) == [1, 2], "a file that was cut is sent from its beginning"


@given(st.text())
def test_mlflow_accepts_every_name_of_a_metric(name: str) -> None:
    from mlflow.utils.validation import _validate_length_limit, _validate_metric_name

    _validate_metric_name(metric_name(name))
    _validate_length_limit("key", 250, metric_name(name))


def test_numbers_arrive_although_the_artifact_store_fails(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("a file where a folder should be")
    do_steps(run, 1, 2)
    evaluate(run, 0, 0.5)
    with pytest.raises(OSError):  # noqa: PT011
        Sender(run, local(tmp_path)).send("FINISHED")
    logged = Logged(local(tmp_path).uri)
    assert logged.history("loss") == losses(2)
    assert logged.history("eval/greedy_accuracy") == [(0, 0.5)]
    assert logged.run.info.status == "FINISHED"


# -- the child's side


def test_data_arrives_once_mlflow_accepts_it(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/e2e/test_outside_faults.py has a server that comes up late."""
    monkeypatch.setattr(tracker, "PAUSE_S", 0.1)
    (tmp_path / "artifacts").write_text("a file where a folder should be")
    do_steps(run, 1, 3)
    commands, driver = os.pipe()
    child = Thread(target=send_until_end, args=[run, local(tmp_path), FileIO(commands)], daemon=True)
    child.start()
    until(lambda: "Error" in capsys.readouterr().out, "an attempt to fail")
    (tmp_path / "artifacts").unlink()
    until(lambda: "everything is sent again" in capsys.readouterr().out, "the files to be sent")
    do_steps(run, 4, 6)
    os.write(driver, b'"FINISHED"\n')
    child.join(LIMIT_S)
    os.close(driver)
    assert not child.is_alive()
    logged = Logged(local(tmp_path).uri)
    assert logged.history("loss") == losses(6) and logged.run.info.status == "FINISHED"
    assert logged.files() == {"spec.yaml"}


# -- the driver's side


def monitor_of(run: RunDirectory, tmp_path: Path, **tracking: Any) -> Mlflow:
    monitor = Mlflow(run, spec_of({"experiment": "tests", **tracking}, runs_dir=str(tmp_path)))
    monitor.started(RunInfo(run.run_id, run.path, 4, {}))
    return monitor


def test_a_killed_child_starts_again_and_sends_the_rest(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast("dict[str, float]", FINISH_S), "finished", LIMIT_S)
    target = local(tmp_path)
    monitor = monitor_of(run, tmp_path)
    do_steps(run, 1, 2)
    until(lambda: SendingProgress.of(run).offset, "the first steps")
    monitor._child.kill()
    monitor._child.wait()
    do_steps(run, 3, 4)
    monitor.stepped(4, 4, {})
    note = monitor.finish(Ending("finished"))
    logged = Logged(target.uri)
    assert note == f"run {logged.run.info.run_id} in experiment tests"
    assert logged.history("loss") == losses(4)
    assert logged.run.info.status == "FINISHED"


def test_a_child_that_dies_at_the_end_leaves_the_rest_to_track(run: RunDirectory, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monitor = monitor_of(run, tmp_path, uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()  # it has connected
        with connection:
            Thread(target=monitor._child.send_signal, args=[signal.SIGKILL]).start()
            note = monitor.finish(Ending("finished"))
    assert note == (
        "the sending process ended with exit code -9, see logs/mlflow.log; the rest is kept, later: "
        f"asyncrl track {run.argument}"
    )


def test_a_server_that_never_answers_delays_the_end_by_its_limit_at_most(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast("dict[str, float]", FINISH_S), "finished", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monitor = monitor_of(run, tmp_path, uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()
        with connection:
            note = monitor.finish(Ending("finished"))
    assert note.startswith("not done within 0 s, see logs/mlflow.log; the rest is kept, later: ")
    assert monitor._child.poll() == -signal.SIGKILL


def test_the_child_ends_when_its_driver_is_gone(run: RunDirectory, tmp_path: Path) -> None:
    monitor = monitor_of(run, tmp_path)
    assert monitor._child.stdin is not None
    monitor._child.stdin.close()
    assert monitor._child.wait(LIMIT_S) == 1


def test_without_a_server_there_is_a_store_in_the_runs_folder(tmp_path: Path) -> None:
    target = target_of(spec_of({}, runs_dir=str(tmp_path)))
    assert target.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert target.artifacts == f"file://{tmp_path}/mlflow-artifacts"
    assert target_of(spec_of({"uri": "http://there"})).artifacts is None
