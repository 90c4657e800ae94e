"""`asyncrl track` after the run, without Ray: once in a separate process, otherwise in this one."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.load import dump_spec, load_spec
from tests.cli.conftest import Done, process

pytestmark = pytest.mark.slow

Track = Callable[..., Done]

RESULT = {"kind": "greedy", "step": 0, "accuracy": 0.5, "mean_length": 9.5}
SPEC = "model: {path: org/model}\ntask: {use: chain_sum}\nstop: {steps: 10}\n"


@pytest.fixture
def track(asyncrl: Callable[..., Done]) -> Callable[..., Done]:
    return partial(asyncrl, "track")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that failed after three steps, in the folder ``runs``."""
    run = RunDirectory.create(tmp_path / "runs", "spelling")
    run.write_json("manifest.json", {"started": "2026-01-01T00:00:00+00:00"})
    (tmp_path / "spec.yaml").write_text(SPEC)
    run.write_text("spec.yaml", dump_spec(load_spec(tmp_path / "spec.yaml").spec, {}))
    for step in (1, 2, 3):
        run.append("metrics.jsonl", {"step": step, "version": step, "time": 1e6 + step, "loss": 0.5})
    run.write_text("evaluations/step-000000-greedy.jsonl", json.dumps(RESULT) + "\n")
    run.update(phase="failed", step=3, steps=10)
    run.unlock()
    return run


@pytest.mark.stack
def test_track_sends_the_missing_data_once(track: Track, run: RunDirectory, tmp_path: Path) -> None:
    first = process("track", cwd=tmp_path)
    assert (first.code, first.err) == (0, "")
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    mlflow_run = json.loads((run.path / "mlflow.json").read_text())["run_id"]
    assert first.out.splitlines() == [f"to       {uri}", f"MLflow   run {mlflow_run} in experiment asyncrl"]
    assert track(run.run_id[:-2], "--runs-dir", "runs").out == first.out
    from mlflow.tracking import MlflowClient

    logged = MlflowClient(tracking_uri=uri).get_run(mlflow_run)
    assert logged.info.status == "FAILED"
    assert logged.data.metrics["loss"] == 0.5


@pytest.mark.stack
@pytest.mark.rotating
def test_an_evaluation_outside_a_run_goes_to_the_store_of_the_runs(tmp_path: Path) -> None:
    """`asyncrl evaluate SPEC` sends to the store of the runs, although its folder is in `RUNS_DIR/evaluate`."""
    made = RunDirectory.create(tmp_path / "runs/evaluate", "mine")
    (tmp_path / "spec.yaml").write_text(SPEC)
    made.begin(dump_spec(load_spec(tmp_path / "spec.yaml").spec, {}), 0, {"evaluated": "spec.yaml"})
    made.write_text("evaluations/step-000000-offline-greedy.jsonl", json.dumps(RESULT) + "\n")
    made.update(phase="finished")
    made.unlock()
    sent = process("track", f"runs/evaluate/{made.run_id}", cwd=tmp_path)
    assert (sent.code, sent.err) == (0, "")
    assert sent.out.splitlines()[0] == f"to       sqlite:///{tmp_path}/runs/mlflow.db"
    assert not (tmp_path / "runs/evaluate/mlflow.db").exists()


@pytest.mark.stack
def test_a_server_that_is_down_is_named_and_nothing_is_lost(track: Track, run: RunDirectory, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
    failed = track("--uri", uri)
    assert (failed.code, failed.out) == (1, "")
    assert failed.err.startswith("error: MLflow did not accept everything: MlflowException: API request to ")
    assert uri in failed.err and failed.err.endswith(
        f" --> {run.run_id}\n"
        f"hint: everything is kept in the run's folder; try again later: asyncrl track {run.run_id}\n"
    )
    done = process("track", cwd=tmp_path)  # in this process, MLflow may log that it creates the store
    assert (done.code, done.err) == (0, "")


def test_a_run_that_is_driven_is_refused(track: Track, run: RunDirectory, tmp_path: Path) -> None:
    run.lock()
    refused = track()
    assert refused.code == 1
    assert f"being driven by pid {os.getpid()}" in refused.err
    assert not (run.path / "mlflow.json").exists()


def test_a_run_without_its_spec_is_refused_with_what_is_missing(
    track: Track, run: RunDirectory, tmp_path: Path
) -> None:
    (run.path / "spec.yaml").unlink()
    refused = track()
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("error: the run's folder has no spec.yaml")
    assert "check the path" not in refused.err and "restore the file" in refused.err
