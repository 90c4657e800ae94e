"""Sends the contents of a run's outbox to MLflow.

Invariant: ``send`` may fail or be killed at any point and be called again, by any process; in the end MLflow has one
run with all data once. The MLflow run has the run's id in a tag, by which it is found again even if
the answer to its creation was lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch
from typing import Any, TypeVar

from asyncrl_cli.core.errors import RunError, UserError
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.inspect.resolved import resolved_spec, spec_text
from asyncrl_cli.monitors.mlflow.model_registry import RUN_TAG, register
from asyncrl_cli.monitors.mlflow.outbox import EVALUATIONS, SPEC, STEPS, Outbox
from asyncrl_cli.monitors.mlflow.rows import (
    TAG,
    Number,
    evaluation_numbers,
    parameters,
    row_numbers,
    table,
    table_of,
    tag,
)
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec

Entry = TypeVar("Entry")
FINISHED = "FINISHED"
STATUS = {"finished": FINISHED, "interrupted": "KILLED", "failed": "FAILED"}
"""MLflow's status for each phase of a run that has ended."""
REPORT = "report.html"
METRICS_AT_ONCE = 1000
PARAMETERS_AT_ONCE = 100
"""MLflow's limits: entries of one request."""
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""MLflow waits two minutes for an answer and tries seven times; here the caller tries again. And it writes to the
terminal. What the user has set stays."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a run's data is sent. ``artifacts`` is where a new experiment keeps its files; None leaves that to MLflow.
    ``model`` is the registered model of which a finished run becomes a version; None for none."""

    uri: str
    experiment: str
    artifacts: str | None = None
    model: str | None = None


def target_of(spec: ExperimentSpec) -> Target:
    """The spec's MLflow server, or a SQLite store in the runs folder."""
    tracking, folder = spec.tracking, spec.runs_dir.absolute()
    if tracking.uri:
        return Target(tracking.uri, tracking.experiment, model=tracking.register_model)
    artifacts = (folder / "mlflow-artifacts").as_uri()
    return Target(f"sqlite:///{folder}/mlflow.db", tracking.experiment, artifacts, tracking.register_model)


class Sender:
    """Sends one run. ``steps`` and ``evaluations`` count what it has sent; ``reported`` says whether it sent a report,
    and ``unreported`` why it could make none."""

    def __init__(self, run: RunDirectory, target: Target) -> None:
        # Its own view of the folder: the driver's remembers the state that it wrote.
        self._run = RunDirectory(run.path)
        self._target = target
        self._outbox = Outbox(run, target.uri, target.experiment)
        self._client: Any = None
        self.steps = 0
        self.evaluations = 0
        self.reported = False
        self.unreported = ""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    @property
    def mlflow_run_id(self) -> str:
        """Empty before the first successful ``send``."""
        return self._outbox.sent.run_id

    @property
    def version(self) -> str:
        """The newest version of the target's registered model that the run is; empty for none."""
        return self._outbox.version if self._target.model is not None else ""

    def send(self, status: str, ended: RunDirectory | None = None) -> None:
        """Send what is missing; ``status`` is MLflow's word for the state of the run. ``ended`` is the run as the
        report shows it; None for no report. Raises what MLflow raises.
        """
        self._connect()
        self._send_steps()
        self._send_samples()
        self._send_parameters()
        self._send_evaluations()
        self._send_status(status)
        # Files come last, so that numbers arrive even if the artifact store does not work.
        self._upload()
        if ended is not None:
            self._upload_report(ended)
        if self._target.model is not None and status == FINISHED:
            register(self._client, self._outbox, self._run, self._target.model)

    def _connect(self) -> None:
        if self._client is not None:
            return
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self._target.uri)
        if self.mlflow_run_id:
            try:
                client.get_run(self.mlflow_run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                self._outbox.forget()
        if not self.mlflow_run_id:
            self._find_or_create_run(client)
        self._client = client

    def _find_or_create_run(self, client: Any) -> None:
        name = self._target.experiment
        experiment = client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(name, artifact_location=self._target.artifacts)
        )
        run_id = self._run.run_id
        found = client.search_runs([experiment_id], f"tags.{RUN_TAG} = '{run_id}'", max_results=1)
        if found:
            self._outbox.note(run_id=found[0].info.run_id)
            return
        started = self._run.manifest.get("started")
        start_time = int(datetime.fromisoformat(started).timestamp() * 1000) if started else None
        created = client.create_run(experiment_id, start_time=start_time, tags={RUN_TAG: run_id}, run_name=run_id)
        self._outbox.note(run_id=created.info.run_id, status="RUNNING")

    def _send_steps(self) -> None:
        for rows in _requests(self._outbox.steps()):
            self._log([entry for row in rows for entry in row_numbers(row)])
            sent, last = self._outbox.sent, rows[-1]
            self._outbox.note(step=max(sent.step, last["step"]), time=max(sent.time, last["time"]))
            self.steps += len(rows)

    def _send_samples(self) -> None:
        for rows in _requests(self._outbox.samples()):
            self._log([entry for row in rows for entry in row_numbers(row)])
            self._outbox.note(sampled=rows[-1]["time"])

    def _send_parameters(self) -> None:
        """MLflow keeps a parameter as it was first logged; what a resumed run changed is in its spec.yaml."""
        for name, version in self._outbox.files(SPEC, self._outbox.sent.logged).items():
            from mlflow.entities import Param

            spec = resolved_spec(self._run)
            known = self._client.get_run(self.mlflow_run_id).data.params
            entries = [Param(key, value) for key, value in parameters(spec).items() if key not in known]
            for params in _chunks(entries, PARAMETERS_AT_ONCE):
                self._client.log_batch(self.mlflow_run_id, params=params, synchronous=True)
            self._note_logged(name, version)

    def _send_evaluations(self) -> None:
        for name, version in self._outbox.files(EVALUATIONS, self._outbox.sent.logged).items():
            with (self._run.path / name).open() as file:
                self._log(list(evaluation_numbers(file.readline(), version / 1e9)))
            self._note_logged(name, version)
            self.evaluations += 1

    def _send_status(self, status: str) -> None:
        if self._outbox.sent.status == status:
            return
        if status == "RUNNING":
            self._client.update_run(self.mlflow_run_id, status=status)
        else:
            ended = int(self._run.state.updated * 1000) or None
            self._client.set_terminated(self.mlflow_run_id, status=status, end_time=ended)
        self._outbox.note(status=status)

    def _upload(self) -> None:
        for pattern in (SPEC, EVALUATIONS):
            for name, version in self._outbox.files(pattern, self._outbox.sent.uploaded).items():
                if pattern == SPEC:
                    self._client.log_text(self.mlflow_run_id, spec_text(self._run), name)
                else:
                    folder = name.rpartition("/")[0]
                    self._client.log_artifact(self.mlflow_run_id, str(self._run.path / name), artifact_path=folder)
                    self._upload_table(name)
                self._outbox.note(uploaded={**self._outbox.sent.uploaded, name: version})

    def _upload_table(self, evaluation: str) -> None:
        name = table_of(evaluation)
        self._client.log_text(self.mlflow_run_id, table(self._run.path / evaluation), name)
        sent = {table_of(one) for one in self._outbox.sent.uploaded if fnmatch(one, EVALUATIONS)}
        self._client.set_tag(self.mlflow_run_id, TAG, tag(sorted({name, *sent})))

    def _upload_report(self, ended: RunDirectory) -> None:
        of = self._outbox.files(STEPS, self._outbox.sent.reported)
        if not of:
            return
        from asyncrl_cli.inspect.report.page import render
        from asyncrl_cli.inspect.report.summary import summarize

        try:
            page = render([summarize(ended)])
        except Exception as error:  # trying again would not help, and `asyncrl report` says more
            self.unreported = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            return
        self._client.log_text(self.mlflow_run_id, page, REPORT)
        self._outbox.note(reported=of)
        self.reported = True

    def _log(self, numbers: Sequence[Number]) -> None:
        from mlflow.entities import Metric

        entries = [Metric(name, value, int(at * 1000), step) for name, value, at, step in numbers]
        for metrics in _chunks(entries, METRICS_AT_ONCE):
            self._client.log_batch(self.mlflow_run_id, metrics=metrics, synchronous=True)

    def _note_logged(self, name: str, version: int) -> None:
        self._outbox.note(logged={**self._outbox.sent.logged, name: version})


def send_rest(run: RunDirectory, target: Target) -> Sender:
    """Send the remaining data of a run that has ended. Raises ``RunError`` when not everything could be sent."""
    sender = Sender(run, target)
    phase = run.state.phase
    ended = run if phase in STATUS else run.as_if(phase="failed", reason="its process died")
    try:
        sender.send(STATUS.get(phase, "FAILED"), ended)
    except RunError:  # what is missing is not MLflow's fault, and trying again later would not help
        raise
    except Exception as error:
        raise RunError(
            f"MLflow did not take everything: {failure(error, target.uri)}",
            location=run.run_id,
            hint=f"everything is kept in the run's folder; try again later: asyncrl track {run.argument}",
        ) from error
    return sender


def failure(error: Exception, uri: str) -> str:
    """The cause of a failed request, in one line."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__module__.startswith("requests"):
            return f"no answer from {hide(uri)}"
        cause = cause.__cause__ or cause.__context__
    lines = str(error).splitlines()
    return hide(f"{type(error).__name__}: {lines[0] if lines else 'no message'}")


def _requests(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    """Split rows into parts that fit into one request each, if no single row is too long."""
    return _chunks(rows, max(1, METRICS_AT_ONCE // max(map(len, rows), default=1)))


def _chunks(entries: Sequence[Entry], size: int) -> Iterator[Sequence[Entry]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]
