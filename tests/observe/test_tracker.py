"""A run's numbers reach a real MLflow, whenever that can be reached."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.observe import sender as sender_module
from asyncrl_cli.observe.outbox import FILE
from asyncrl_cli.observe.sender import Sender, Target
from asyncrl_cli.observe.tracker import Tracker, TrackerClient
from asyncrl_cli.runs.directory import RunDirectory

from .mlflow_server import Server

LIMIT_S = 120.0
pytestmark = pytest.mark.stack


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "spell-1")
    for folder in ("evaluations", "logs"):
        (directory.path / folder).mkdir(parents=True)
    directory.write_json("manifest.json", {"started": "2026-01-01T00:00:00+00:00"})
    directory.write_text(
        "spec.yaml", "seed: 3\ntask: {use: spell_backward, options: {'a:b?': [1, 2]}}\nlong: " + "x" * 9000
    )
    directory.update(phase="running", steps=10)
    return directory


def do_steps(run: RunDirectory, first: int, last: int, at: float = 1_000_000.0) -> None:
    for step in range(first, last + 1):
        row = {"step": step, "version": step, "time": at + step, "loss": step / 8, "ratio": float("nan")}
        run.append("metrics.jsonl", row)


def evaluate(run: RunDirectory, step: int, accuracy: float) -> None:
    result = {"kind": "greedy", "step": step, "accuracy": accuracy, "mean_length": 9.5}
    run.write_text(f"evaluations/step-{step:06d}-greedy.jsonl", json.dumps(result) + "\n{}\n")


def local(folder: Path) -> Target:
    return Target(f"sqlite:///{folder}/mlflow.db", "tests", (folder / "artifacts").as_uri())


class Logged:
    """What MLflow has of the one run in the experiment."""

    def __init__(self, uri: str) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=uri)
        experiment = self.client.get_experiment_by_name("tests")
        assert experiment is not None
        [self.run] = self.client.search_runs([experiment.experiment_id])

    def history(self, name: str) -> list[tuple[int, float]]:
        points = self.client.get_metric_history(self.run.info.run_id, name)
        return sorted((point.step, point.value) for point in points)

    def files(self) -> set[str]:
        run_id = self.run.info.run_id
        return {entry.path for folder in (None, "evaluations") for entry in self.client.list_artifacts(run_id, folder)}


def losses(last: int) -> list[tuple[int, float]]:
    return [(step, step / 8) for step in range(1, last + 1)]


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


def sent(run: RunDirectory) -> dict[str, Any]:
    try:
        noted: dict[str, Any] = json.loads((run.path / FILE).read_text())
    except OSError:
        return {"step": 0}
    return noted


# -- one attempt


def test_everything_is_sent_once_however_often_it_is_tried(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    do_steps(run, 1, 3)
    evaluate(run, 0, 0.25)
    Sender(run, target).send("RUNNING")
    noted = sent(run)
    do_steps(run, 4, 5)
    evaluate(run, 5, 0.75)
    again = Sender(run, target)
    again.send("RUNNING")
    assert (again.steps, again.evaluations) == (2, 1)

    # Killed before it could note what it had sent, and before it knew the MLflow run.
    (run.path / FILE).unlink()
    Sender(run, target).send("FINISHED")
    logged = Logged(target.uri)
    assert logged.run.info.run_id == noted["run_id"] == sent(run)["run_id"]
    assert logged.run.info.status == "FINISHED"
    assert logged.run.info.run_name == "spell-1"
    assert logged.run.info.start_time == 1767225600000
    assert logged.run.info.end_time == int(run.state.updated * 1000)
    assert logged.run.data.params["seed"] == "3"
    assert logged.run.data.params["task.options.a_b_"] == "[1, 2]"
    assert len(logged.run.data.params["long"]) == sender_module.PARAMETER_LENGTH
    assert logged.history("loss") == losses(5)
    assert len(logged.history("ratio")) == 5
    assert logged.history("eval/greedy_accuracy") == [(0, 0.25), (5, 0.75)]
    assert {
        "spec.yaml",
        "evaluations/step-000000-greedy.jsonl",
        "evaluations/step-000005-greedy.jsonl",
    } <= logged.files()
    idle = Sender(run, target)
    idle.send("FINISHED")
    assert (idle.steps, idle.evaluations) == (0, 0)


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    do_steps(run, 1, 3)
    Sender(run, target).send("KILLED")
    run.forget_after("metrics.jsonl", 2)
    run.write_text("spec.yaml", "seed: 4\nadded: 1\n")
    do_steps(run, 3, 4, at=2_000_000.0)
    Sender(run, target).send("RUNNING")
    logged = Logged(target.uri)
    assert logged.run.info.status == "RUNNING"
    assert {step for step, _ in logged.history("loss")} == {1, 2, 3, 4}
    assert (logged.run.data.params["seed"], logged.run.data.params["added"]) == ("3", "1")


def test_a_store_that_was_removed_is_filled_again(run: RunDirectory, tmp_path: Path) -> None:
    do_steps(run, 1, 2)
    Sender(run, local(tmp_path)).send("RUNNING")
    noted = sent(run)
    elsewhere = tmp_path / "new"
    elsewhere.mkdir()
    run.write_json(FILE, noted | {"uri": local(elsewhere).uri})
    Sender(run, local(elsewhere)).send("RUNNING")
    assert Logged(local(elsewhere).uri).history("loss") == losses(2)


def test_an_artifact_store_out_of_order_keeps_no_number_back(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("a file where a folder should be")
    do_steps(run, 1, 2)
    evaluate(run, 0, 0.5)
    with pytest.raises(OSError):  # noqa: PT011
        Sender(run, local(tmp_path)).send("FINISHED")
    logged = Logged(local(tmp_path).uri)
    assert logged.history("loss") == losses(2)
    assert logged.history("eval/greedy_accuracy") == [(0, 0.5)]
    assert logged.run.info.status == "FINISHED"


# -- a server that is down


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "server").mkdir()
    late = Server(tmp_path / "server")
    yield late
    late.stop()


def test_what_a_server_missed_arrives_once_it_is_up(run: RunDirectory, server: Server) -> None:
    tracker = Tracker(run, Target(server.uri, "tests"))
    do_steps(run, 1, 3)
    tracker.more()
    until(lambda: tracker.finish("RUNNING", 0.0) == f"no answer from {server.uri}", "the first attempt to fail")
    server.start()
    until(lambda: sent(run)["step"] == 3, "the steps to be sent")
    server.stop()
    do_steps(run, 4, 6)
    evaluate(run, 6, 0.5)
    tracker.more()
    until(lambda: tracker.finish("RUNNING", 0.0) == f"no answer from {server.uri}", "an attempt to fail")
    server.start()
    assert tracker.finish("FINISHED", LIMIT_S) == ""
    logged = Logged(server.uri)
    assert logged.history("loss") == losses(6)
    assert logged.run.info.status == "FINISHED"
    assert {"spec.yaml", "evaluations/step-000006-greedy.jsonl"} <= logged.files()


# -- in its actor


def test_the_driver_only_nudges_and_a_killed_process_starts_again(run: RunDirectory, tmp_path: Path) -> None:
    import tempfile

    import psutil
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=tempfile.mkdtemp(prefix="ray-"))
    try:
        target = local(tmp_path)
        client = TrackerClient(run, target)
        do_steps(run, 1, 2)
        client.more()
        until(lambda: sent(run)["step"] == 2, "the first steps")
        [process] = [
            process
            for process in psutil.Process(os.getpid()).children(recursive=True)
            if "TrackerActor" in " ".join(process.cmdline())
        ]
        process.kill()
        do_steps(run, 3, 4)
        client.more()
        assert client.finish("FINISHED", LIMIT_S) == ""
    finally:
        ray.shutdown()
    logged = Logged(target.uri)
    assert logged.history("loss") == losses(4)
    assert logged.run.info.status == "FINISHED"
