"""The message about MLflow at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.monitors.base import Ending
from asyncrl_cli.monitors.mlflow.outbox import Outbox
from asyncrl_cli.monitors.mlflow.sender import target_of
from asyncrl_cli.monitors.mlflow.tracker import Mlflow
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder

from .mlflow_runs import empty_store, spec_of


def closed(run: RunDirectory, problem: str, **tracking: Any) -> str:
    """The message if ``problem`` keeps data from being sent."""

    class Answered(Mlflow):
        def _end(self, ending: Ending) -> str:
            return problem

    return Answered(Recorder(run, pytest.fail), spec_of(tracking)).finish(Ending("finished"))


@pytest.mark.parametrize(("steps", "kept"), [(0, "the rest"), (1, "1 step"), (12, "12 steps")])
def test_unsent_steps_are_kept_and_the_note_says_how_to_send_them(tmp_path: Path, steps: int, kept: str) -> None:
    run = RunDirectory(tmp_path)
    for step in range(1, steps + 1):
        run.append("metrics.jsonl", {"step": step, "time": float(step), "loss": 0.5})
    note = closed(run, "no answer from http://there")
    assert note == f"{kept} kept, not sent (no answer from http://there); later: asyncrl track {run.argument}"


def test_the_note_names_the_mlflow_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    Outbox(run, "http://there", "mine").note(run_id="abc")
    assert closed(run, "", uri="http://there", experiment="mine") == "run abc in experiment mine"
    Outbox(run, "http://there", "mine").note(registered={"speller, models/step-000001": "4"})
    note = closed(run, "", uri="http://there", experiment="mine", register_model="speller")
    assert note == "run abc in experiment mine, speller version 4"


def test_without_a_server_there_is_a_store_in_the_runs_folder(tmp_path: Path) -> None:
    target = target_of(spec_of({}, runs_dir=str(tmp_path)))
    assert target.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert target.artifacts == f"file://{tmp_path}/mlflow-artifacts"
    assert target_of(spec_of({"uri": "http://there"})).artifacts is None


@pytest.mark.stack
@pytest.mark.parametrize("name", ["a?b", "a%20b", "a#b ü;&"])
def test_the_store_is_in_the_runs_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    from mlflow.tracking import MlflowClient

    (tmp_path / name).mkdir()
    (tmp_path / name / "mlflow.db").write_bytes(empty_store())
    target = target_of(spec_of({}, runs_dir=str(tmp_path / name)))
    client = MlflowClient(target.uri)
    made = client.create_experiment("mine", artifact_location=target.artifacts)
    client.log_text(client.create_run(made).info.run_id, "text", "file.txt")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert b"mine" in (tmp_path / name / "mlflow.db").read_bytes()
    assert len(list((tmp_path / name / "mlflow-artifacts").rglob("file.txt"))) == 1


@pytest.mark.parametrize("uri", [None, "http://there"])
def test_the_model_is_registered_wherever_the_run_is_logged(uri: str | None) -> None:
    assert target_of(spec_of({"uri": uri})).model is None
    assert target_of(spec_of({"uri": uri, "register_model": "mine"})).model == "mine"
