"""A run's MLflow side: where it is sent to, and how that ended."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.monitors.mlflow.outbox import Outbox
from asyncrl_cli.monitors.mlflow.sender import FINISHED, Sender, Target, failure
from asyncrl_cli.monitors.mlflow.tracker import TrackerClient
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec

TRACKING_S = {"FINISHED": 30.0, "FAILED": 10.0, "KILLED": 2.0}
"""Seconds that the end of a run waits for MLflow, by how it ended."""
ENDED = ("finished", "interrupted", "failed")
"""Phases of a run that could say how it ended."""
STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}
"""MLflow's word for a phase at which a run has ended; any other one is FAILED."""


@dataclass(frozen=True, slots=True)
class Tracking:
    """Where MLflow logged to, and its run or what is still to be sent."""

    uri: str
    note: str


def tracking_target(spec: ExperimentSpec) -> Target:
    """The spec's MLflow server, or a SQLite store in the runs folder."""
    tracking, folder = spec.tracking, spec.runs_dir.absolute()
    if tracking.uri:
        return Target(tracking.uri, tracking.experiment, model=tracking.register_model)
    artifacts = (folder / "mlflow-artifacts").as_uri()
    return Target(f"sqlite:///{folder}/mlflow.db", tracking.experiment, artifacts, tracking.register_model)


def start_tracker(spec: ExperimentSpec, run: RunDirectory) -> TrackerClient:
    """Have the run sent from now on."""
    return TrackerClient(run, tracking_target(spec), spec.tracking.system_metrics)


def close_tracker(
    tracker: TrackerClient, run: RunDirectory, spec: ExperimentSpec, status: str, reason: str = ""
) -> Tracking:
    """Give the tracker its last seconds. ``status`` is MLflow's word for how the run ended, ``reason`` says why."""
    target = tracking_target(spec)
    problem = tracker.finish(status, TRACKING_S[status], reason)
    outbox = Outbox(run, target.uri, target.experiment)
    if not problem:
        model = f", {target.model} version {outbox.version}" if target.model and status == FINISHED else ""
        return Tracking(hide(target.uri), f"run {outbox.sent.run_id} in experiment {target.experiment}{model}")
    kept = len(outbox.steps())
    what = f"{kept} step{'s' if kept > 1 else ''}" if kept else "the rest"
    return Tracking(hide(target.uri), f"{what} kept, not sent ({problem}); later: asyncrl track {run.argument}")


def send_rest(spec: ExperimentSpec, run: RunDirectory) -> Sender:
    """Send what a run that has ended still owes. Raises ``RunError`` when not everything went through."""
    target = tracking_target(spec)
    sender = Sender(run, target)
    phase = run.state.phase
    ended = run if phase in ENDED else run.as_if(phase="failed", reason="its process died")
    try:
        sender.send(STATUS.get(phase, "FAILED"), ended)
    except Exception as error:
        raise RunError(
            f"MLflow did not take everything: {failure(error, target.uri)}",
            location=run.run_id,
            hint=f"everything is kept in the run's folder; try again later: asyncrl track {run.argument}",
        ) from error
    return sender
