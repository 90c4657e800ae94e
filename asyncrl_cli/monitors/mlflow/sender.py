"""Sends a run's data to MLflow: numbers, parameters, evaluations and their tables, files, the report and the model.

Invariant: ``send`` may fail or be killed at any point, and any process may call it again. In the end MLflow has one run
with all data once. The MLflow run is tagged with the run's id, which finds it even if the answer to its creation was
lost.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from asyncrl_cli.core.errors import RunError, UserError
from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.inspect.resolved import resolved_spec, spec_text
from asyncrl_cli.monitors.base import evaluation_metrics
from asyncrl_cli.monitors.mlflow.model_registry import RUN_TAG, register
from asyncrl_cli.monitors.mlflow.outbox import EVALUATIONS, SPEC, STEPS, Outbox
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec

Entry = TypeVar("Entry")
Number = tuple[str, float, float, int]
"""Name, value, unix time (s) and step."""

FINISHED = "FINISHED"
STATUS = {"finished": FINISHED, "interrupted": "KILLED", "failed": "FAILED"}
"""MLflow's status by the phase of an ended run."""
REPORT = "report.html"
NO_METRICS = ("step", "version", "time")
"""Keys of a row that are not metrics."""
HEALTH_TAG = "health"
"""MLflow's tag with the rules of health that are broken now, or `ok`."""
TABLES_TAG = "mlflow.loggedArtifacts"
"""A run's tag that lists its tables."""
FIRST_COLUMNS = ("step", "kind", "uid", "prompt", "response", "reward", "finished")
"""Columns of every table. An evaluation's other fields follow."""
METRICS_AT_ONCE = 1000
PARAMETERS_AT_ONCE = 100
PARAMETER_LENGTH = 6000
TAG_LENGTH = 8000
"""MLflow's limits: entries in one request, and characters in a parameter's or a tag's value."""
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
"""By default MLflow waits two minutes for an answer, tries seven times, and writes to the terminal. Here the caller
tries again. The user's own settings take precedence."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a run's data is sent."""

    uri: str
    experiment: str
    artifacts: str | None = None
    """Where a new experiment stores its files; None leaves the choice to MLflow."""
    model: str | None = None
    """Name of the registered model that gets a finished run's model as a version, if any."""


def target_of(spec: ExperimentSpec) -> Target:
    """The spec's MLflow server, or a SQLite store in the runs folder."""
    tracking, folder = spec.tracking, spec.runs_dir.absolute()
    if tracking.uri:
        return Target(tracking.uri, tracking.experiment, model=tracking.register_model)
    store = f"sqlite:///{folder}/mlflow.db"
    if "%" in store or "?" in store:
        from sqlalchemy import URL

        # SQLite decodes a `file:` URI itself. Named with its driver, because otherwise MLflow makes a folder from the
        # encoded path, and encoded by SQLAlchemy, because its releases differ in what they decode.
        url = URL.create("sqlite+pysqlite", database=f"{folder.as_uri()}/mlflow.db", query={"uri": "true"})
        store = url.render_as_string()
    artifacts = (folder / "mlflow-artifacts").as_uri()
    return Target(store, experiment=tracking.experiment, artifacts=artifacts, model=tracking.register_model)


class Sender:
    """Sends one run."""

    def __init__(self, run: RunDirectory, target: Target) -> None:
        # A separate view of the folder, because the driver's view caches the state that it wrote.
        self._run = RunDirectory(run.path)
        self._target = target
        self._client: Any = None
        self.outbox = Outbox(run, target.uri, target.experiment)
        self.steps = 0
        self.evaluations = 0
        """Number of steps and evaluations that this object has sent."""
        self.reported = False
        """True once this object has sent a report."""
        self.unreported = ""
        """Why no report could be made."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    @property
    def mlflow_run_id(self) -> str:
        """Empty before the first successful ``send``."""
        return self.outbox.sent.run_id

    def send(self, status: str, ended: RunDirectory | None = None) -> None:
        """Send the missing data. ``status`` is MLflow's status for the run, ``ended`` the run as its report shows it
        (None for no report). Raises MLflow's errors.
        """
        if self._client is None:
            self._connect()
        self._send_rows()
        self._send_parameters()
        self._send_evaluations()
        self._send_status(status)
        self._send_health()
        # Files come last: numbers arrive even if the artifact store does not work.
        self._upload()
        if ended is not None:
            self._upload_report(ended)
        if self._target.model is not None and status == FINISHED:
            register(self._client, outbox=self.outbox, run=self._run, name=self._target.model)
        if self.outbox.sent.problem:
            self.outbox.note(problem="")

    def _connect(self) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self._target.uri)
        if self.mlflow_run_id:
            try:
                client.get_run(self.mlflow_run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                self.outbox.forget()  # the MLflow run was deleted
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
            self.outbox.note(run_id=found[0].info.run_id)
            return
        started = self._run.manifest.get("started")
        start_time = int(datetime.fromisoformat(started).timestamp() * 1000) if started else None
        created = client.create_run(experiment_id, start_time=start_time, tags={RUN_TAG: run_id}, run_name=run_id)
        self.outbox.note(run_id=created.info.run_id, status="RUNNING")

    def _send_rows(self) -> None:
        for rows in _requests(self.outbox.steps()):
            self._log_rows(rows)
            sent, last = self.outbox.sent, rows[-1]
            self.outbox.note(step=max(sent.step, last["step"]), time=max(sent.time, last["time"]))
            self.steps += len(rows)
        for rows in _requests(self.outbox.samples()):
            self._log_rows(rows)
            self.outbox.note(sampled=rows[-1]["time"])

    def _log_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._log(
            (name, float(value), row["time"], row["step"])
            for row in rows
            for name, value in row.items()
            if name not in NO_METRICS and isinstance(value, int | float)
        )

    def _send_parameters(self) -> None:
        """MLflow keeps a parameter's first value. A resumed run's changes are in its spec.yaml."""
        for _ in self.outbox.files("parameters", self._run.path.glob(SPEC)):
            from mlflow.entities import Param

            known = self._client.get_run(self.mlflow_run_id).data.params
            values = parameters(resolved_spec(self._run))
            entries = [Param(key, value) for key, value in values.items() if key not in known]
            for params in _chunks(entries, PARAMETERS_AT_ONCE):
                self._client.log_batch(self.mlflow_run_id, params=params, synchronous=True)

    def _send_evaluations(self) -> None:
        for path in self.outbox.files("metrics", self._run.path.glob(EVALUATIONS)):
            at = path.stat().st_mtime
            with path.open() as file:
                result = json.loads(file.readline())
            self._log((metric, value, at, result["step"]) for metric, value in evaluation_metrics(result))
            self.evaluations += 1

    def _send_status(self, status: str) -> None:
        if self.outbox.sent.status == status:
            return
        if status == "RUNNING":
            self._client.update_run(self.mlflow_run_id, status=status)
        else:
            ended = int(self._run.state.updated * 1000) or None
            self._client.set_terminated(self.mlflow_run_id, status=status, end_time=ended)
        self.outbox.note(status=status)

    def _send_health(self) -> None:
        state = self._run.state
        health = ", ".join(state.findings) or "ok" if state.step else ""
        if health != self.outbox.sent.health:
            self._client.set_tag(self.mlflow_run_id, HEALTH_TAG, health)
            self.outbox.note(health=health)

    def _upload(self) -> None:
        for path in self.outbox.files("artifact", self._run.path.glob(SPEC)):
            self._client.log_text(self.mlflow_run_id, spec_text(self._run), path.name)
        tables = []
        for path in sorted(self._run.path.glob(EVALUATIONS)):
            tables.append(f"{path.parent.name}/{path.stem}.json")
            for _ in self.outbox.files("artifact", [path]):
                self._client.log_artifact(self.mlflow_run_id, str(path), artifact_path=path.parent.name)
                self._client.log_text(self.mlflow_run_id, table(path), tables[-1])
                self._client.set_tag(self.mlflow_run_id, TABLES_TAG, tables_tag(tables))

    def _upload_report(self, ended: RunDirectory) -> None:
        for _ in self.outbox.files("report", self._run.path.glob(STEPS)):
            from asyncrl_cli.inspect.report.page import render, summarize

            try:
                page = render(summarize(ended))
            except Exception as error:  # trying again would not help; `asyncrl report` says more
                self.unreported = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                return
            self._client.log_text(self.mlflow_run_id, page, REPORT)
            self.reported = True

    def _log(self, numbers: Iterable[Number]) -> None:
        from mlflow.entities import Metric

        entries = [Metric(name, value, int(at * 1000), step) for name, value, at, step in numbers]
        for metrics in _chunks(entries, METRICS_AT_ONCE):
            self._client.log_batch(self.mlflow_run_id, metrics=metrics, synchronous=True)


def send_rest(run: RunDirectory, target: Target) -> Sender:
    """Send the remaining data of an ended run. Raises ``RunError`` if not everything could be sent."""
    sender = Sender(run, target)
    phase = run.state.phase
    ended = run if phase in STATUS else run.as_if(phase="failed", reason="its process died")
    try:
        sender.send(STATUS.get(phase, "FAILED"), ended)
    except RunError:  # the run's folder lacks a file, so trying again later would not help
        raise
    except Exception as error:
        raise RunError(
            f"MLflow did not accept everything: {failure(error, target.uri)}",
            location=run.run_id,
            hint=f"everything is kept in the run's folder; try again later: asyncrl track {run.argument}",
        ) from error
    return sender


def failure(error: Exception, uri: str) -> str:
    """Return the cause of a failed request in one line."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__module__.startswith("requests"):
            return f"no answer from {hide(uri)}"
        cause = cause.__cause__ or cause.__context__
    lines = str(error).splitlines()
    return hide(f"{type(error).__name__}: {lines[0] if lines else 'no message'}")


def parameters(spec: dict[str, Any]) -> dict[str, str]:
    """Convert a spec to MLflow's parameters: dotted names, short texts."""
    return {re.sub(r"[^\w.\-/ ]", "_", key): str(value)[:PARAMETER_LENGTH] for key, value in flatten(spec).items()}


def table(evaluation: Path) -> str:
    """Convert an evaluation's responses to an MLflow table: JSON with ``columns`` and ``data``.

    MLflow's ``log_table`` would append to an existing table. Here a table is one whole evaluation, so sending it twice
    changes nothing (decision 0020).
    """
    with evaluation.open(encoding="utf-8") as file:
        result = json.loads(file.readline())
        rows = []
        for line in file:
            sample = json.loads(line)
            metrics = sample.pop("metrics", {})
            rows.append({"step": result["step"], "kind": result["kind"], **sample, **metrics})
    columns = list(dict.fromkeys([*FIRST_COLUMNS, *(name for row in rows for name in row)]))
    data = [[_cell(row.get(name)) for name in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, ensure_ascii=False)


def _cell(value: Any) -> Any:
    """A cell's value: messages as JSON text, and None for NaN and infinity, which JSON lacks."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables_tag(tables: Iterable[str]) -> str:
    """Return the tag that lists these tables, or as many of the last tables as fit into it."""
    entries = [json.dumps({"path": name, "type": "table"}) for name in tables]
    lengths = accumulate((len(entry) + len(", ") for entry in reversed(entries)), initial=len("[]"))
    fitting = sum(length <= TAG_LENGTH for length in lengths) - 1
    return f"[{', '.join(entries[len(entries) - fitting :])}]"


def _requests(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    """Split rows into parts that fit into one request, unless a single row is too long."""
    return _chunks(rows, max(1, METRICS_AT_ONCE // max(map(len, rows), default=1)))


def _chunks(entries: Sequence[Entry], size: int) -> Iterator[Sequence[Entry]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]
