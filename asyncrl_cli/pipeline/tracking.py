"""A run's MLflow side: where it logs to, what it logs at the start, how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl_cli.observe.tracker import TrackerClient
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec

TRACKING_S = {"FINISHED": 30.0, "FAILED": 10.0, "KILLED": 2.0}
"""Seconds that the end of a run waits for MLflow, by how it ended."""


@dataclass(frozen=True, slots=True)
class Tracking:
    """Where MLflow logged to, and its run or what went wrong."""

    uri: str
    note: str


def tracking_uri(spec: ExperimentSpec) -> str:
    """Where MLflow logs to: the spec's URI, or a SQLite store in the runs folder."""
    return spec.tracking.uri or f"sqlite:///{spec.runs_dir.absolute()}/mlflow.db"


def start_tracker(spec: ExperimentSpec, run: RunDirectory) -> TrackerClient:
    artifacts = None if spec.tracking.uri else (spec.runs_dir.absolute() / "mlflow-artifacts").as_uri()
    tracker = TrackerClient(
        tracking_uri(spec),
        spec.tracking.experiment,
        artifacts,
        run.run_id,
        run.manifest.get("mlflow_run_id"),
        str(run.path / "logs"),
    )
    tracker.log_parameters(_flatten(spec.model_dump(mode="json")))
    tracker.log_artifacts([run.path / "spec.yaml"])
    return tracker


async def note_tracking(tracker: TrackerClient, run: RunDirectory) -> None:
    """Write MLflow's run id down as soon as there is one, so that a resumed run continues it."""
    run_id = await tracker.run_id()
    if run_id is not None:
        run.write_json("manifest.json", run.manifest | {"mlflow_run_id": run_id})


def close_tracker(tracker: TrackerClient, run: RunDirectory, spec: ExperimentSpec, status: str) -> Tracking:
    tracker.log_artifacts([run.path / "evaluations"])
    if problem := tracker.close(status, TRACKING_S[status]):
        return Tracking(tracking_uri(spec), f"did not take everything ({problem}); see logs/mlflow.log")
    return Tracking(
        tracking_uri(spec), f"run {run.manifest.get('mlflow_run_id')} in experiment {spec.tracking.experiment}"
    )


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        flat: dict[str, str] = {}
        for key, item in value.items():
            flat |= _flatten(item, f"{prefix}.{key}" if prefix else key)
        return flat
    return {prefix: str(value)}
