"""A run with steps and evaluations on disk, and the data that MLflow has received."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncrl_cli.monitors.mlflow.sender import Target
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec


def started_run(folder: Path) -> RunDirectory:
    """A run without steps."""
    directory = RunDirectory(folder / "spelling-1")
    for name in ("evaluations", "logs"):
        (directory.path / name).mkdir(parents=True)
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


def evaluate(run: RunDirectory, step: int, accuracy: float, samples: Sequence[Mapping[str, Any]] = ({},)) -> None:
    result = {"kind": "greedy", "step": step, "accuracy": accuracy, "mean_length": 9.5}
    run.write_text(
        f"evaluations/step-{step:06d}-greedy.jsonl", "".join(f"{json.dumps(line)}\n" for line in (result, *samples))
    )


@cache
def empty_store() -> bytes:
    """The database of an empty store. MLflow takes a second to create one."""
    from mlflow.tracking import MlflowClient

    with TemporaryDirectory() as folder:
        file = Path(folder, "mlflow.db")
        MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments()
        return file.read_bytes()


def local(folder: Path) -> Target:
    """A store in this folder, with its tables."""
    if not (file := folder / "mlflow.db").exists():
        file.write_bytes(empty_store())
    return Target(f"sqlite:///{folder}/mlflow.db", "tests", (folder / "artifacts").as_uri())


def spec_of(tracking: Mapping[str, Any], **sections: Any) -> ExperimentSpec:
    """A spec with this ``tracking`` section."""
    values = {"model": {"path": "m"}, "task": {"use": "chain_sum"}, "stop": {"steps": 1}, "tracking": tracking}
    return ExperimentSpec.model_validate(values | sections)


class Logged:
    """The data that MLflow has received for the only run in the experiment."""

    def __init__(self, uri: str, experiment_name: str = "tests") -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=uri)
        experiment = self.client.get_experiment_by_name(experiment_name)
        assert experiment is not None
        [self.run] = self.client.search_runs([experiment.experiment_id])

    def history(self, name: str) -> list[tuple[int, float]]:
        points = self.client.get_metric_history(self.run.info.run_id, name)
        return sorted((point.step, point.value) for point in points)

    def files(self, folder: str | None = None) -> set[str]:
        found: set[str] = set()
        for entry in self.client.list_artifacts(self.run.info.run_id, folder):
            found |= self.files(entry.path) if entry.is_dir else {entry.path}
        return found

    def content(self, path: str) -> bytes:
        return Path(self.client.download_artifacts(self.run.info.run_id, path)).read_bytes()


@contextmanager
def tracking_at(uri: str) -> Iterator[None]:
    """Set this process's store during the block, for MLflow functions that use only this one."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)
