"""Sends a run's data to MLflow: metrics, parameters, evaluations, responses and the spec.

Invariant: all data comes from the run's folder, and sending data again changes nothing: a metric has the step and the
time at which it was recorded, and a file replaces its earlier version. So ``send`` may fail or be killed at any point,
and any process may call it again. ``mlflow.json`` only saves work; without it everything is sent again.

The MLflow run is tagged with the run's id, which finds it even if the answer to its creation was lost.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.inspect.resolved import resolved_spec, spec_text
from asyncrl_cli.inspect.response_tables import ResponseRow, TableId, response_tables
from asyncrl_cli.monitors.base import evaluation_metrics
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec

PROGRESS = "mlflow.json"
RUN_TAG = "asyncrl_run"
STEPS = "metrics.jsonl"
SPEC, EVALUATIONS = "spec.yaml", "evaluations/*.jsonl"
RESPONSES = "responses"
"""MLflow's folder for tables of responses."""
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
"""MLflow's status by the phase of an ended run."""
BLOCK = 2**18
"""Bytes of a file's lines that are sent before the progress is noted."""
METRICS_AT_ONCE, PARAMETERS_AT_ONCE = 1000, 100
METRIC_LENGTH, PARAMETER_LENGTH = 250, 6000
"""MLflow's limits: entries in one request, and characters in a metric's name and in a parameter's value."""
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
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
    artifacts: str | None = None  # where a new experiment stores its files; None leaves the choice to MLflow


def target_of(spec: ExperimentSpec) -> Target:
    """The spec's MLflow server, or a SQLite store in the runs folder."""
    tracking, folder = spec.tracking, spec.runs_dir.absolute()
    if tracking.uri:
        return Target(tracking.uri, tracking.experiment)
    artifacts = (folder / "mlflow-artifacts").as_uri()
    return Target(f"sqlite:///{folder}/mlflow.db", tracking.experiment, artifacts)


@dataclass(frozen=True, slots=True)
class SendingProgress:
    """The content of ``mlflow.json``. One process at a time may write it."""

    run_id: str = ""
    """MLflow's id of the run. The other fields belong to this MLflow run."""
    offset: int = 0
    """Byte offset up to which the lines of metrics.jsonl were sent."""
    tail: str = ""
    """The last bytes before the offset. If a resume has replaced the file, it has others, and is sent from its
    beginning."""

    @classmethod
    def of(cls, run: RunDirectory) -> SendingProgress:
        """Read the noted progress; none if the file is missing, damaged or from another version of asyncrl."""
        try:
            return cls(**json.loads((run.path / PROGRESS).read_text()))
        except (OSError, ValueError, TypeError):
            return cls()


class Sender:
    """Sends one run."""

    def __init__(self, run: RunDirectory, target: Target) -> None:
        # A separate view of the folder, because the driver's view caches the state that it wrote.
        self._run = RunDirectory(run.path)
        self._target = target
        self._client: Any = None
        self._sent_files: dict[str, int] = {}  # modification time (ns) by purpose and path
        self._sent_tables: set[TableId] | None = None  # None until the first look
        self._searched: tuple[int, int] | None = None  # step and number of evaluations at the last search for tables
        self._status = self._health = ""
        self.progress = SendingProgress.of(run)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    def send(self, status: str) -> None:
        """Send the data that MLflow may not have, and the run's status in MLflow's words. Raises MLflow's errors."""
        if self._client is None:
            self._connect()
        run_id = self.progress.run_id
        self._send_steps()
        for _ in self._new_files("parameters", SPEC):
            self._send_parameters()
        for path in self._new_files("metrics", EVALUATIONS):
            with path.open() as file:
                result = json.loads(file.readline())
            row = {"step": result["step"], "time": path.stat().st_mtime, **dict(evaluation_metrics(result))}
            self._log(_metrics(json.dumps(row).encode()))
        self._send_status(status)
        # Files come last: numbers arrive even if the artifact store does not work.
        for path in self._new_files("artifact", SPEC):
            self._client.log_text(run_id, spec_text(self._run), path.name)
        for path in self._new_files("artifact", EVALUATIONS):
            self._client.log_artifact(run_id, str(path), artifact_path=path.parent.name)
        self._send_responses()

    def _connect(self) -> None:
        from mlflow.tracking import MlflowClient

        client, name = MlflowClient(tracking_uri=self._target.uri), self._target.experiment
        experiment = client.get_experiment_by_name(name)
        create = partial(client.create_experiment, name, artifact_location=self._target.artifacts)
        experiment_id, run_id = experiment.experiment_id if experiment else create(), self._run.run_id
        tagged_runs = client.search_runs([experiment_id], f"tags.{RUN_TAG} = '{run_id}'", max_results=1)
        if tagged_runs:
            mlflow_run = tagged_runs[0]
        else:
            started = self._run.manifest.get("started")
            start_time = int(datetime.fromisoformat(started).timestamp() * 1000) if started else None
            mlflow_run = client.create_run(experiment_id, start_time, tags={RUN_TAG: run_id}, run_name=run_id)
        if mlflow_run.info.run_id != self.progress.run_id:  # a new MLflow run, or one on another server
            self._note(SendingProgress(mlflow_run.info.run_id))
        self._client = client

    def _note(self, progress: SendingProgress) -> None:
        self.progress = progress
        self._run.write_json(PROGRESS, asdict(self.progress), private=True)

    def _send_steps(self) -> None:
        """Send the complete lines of metrics.jsonl that are not noted as sent."""
        path = self._run.path / STEPS
        if not path.exists():
            return
        with path.open("rb") as file:
            offset, tail = self.progress.offset, self.progress.tail
            file.seek(offset - len(tail))
            if file.read(len(tail)) != tail.encode("latin-1"):
                offset = 0
            while True:
                file.seek(offset)
                lines = [line for line in file.readlines(BLOCK) if line.endswith(b"\n")]
                if not lines:
                    return
                self._log([metric for line in lines for metric in _metrics(line)])
                offset += sum(map(len, lines))
                self._note(SendingProgress(self.progress.run_id, offset, lines[-1][-100:].decode("latin-1")))

    def _log(self, metrics: Sequence[Any]) -> None:
        for batch in _chunks(metrics, METRICS_AT_ONCE):
            self._client.log_batch(self.progress.run_id, metrics=batch, synchronous=True)

    def _send_parameters(self) -> None:
        """MLflow keeps a parameter's first value. A resumed run's changes are in its spec.yaml."""
        from mlflow.entities import Param

        logged = self._client.get_run(self.progress.run_id).data.params
        spec = flatten(resolved_spec(self._run)).items()
        values = {re.sub(r"[^\w.\-/ ]", "_", key): str(value)[:PARAMETER_LENGTH] for key, value in spec}
        new_parameters = [Param(key, value) for key, value in values.items() if key not in logged]
        for batch in _chunks(new_parameters, PARAMETERS_AT_ONCE):
            self._client.log_batch(self.progress.run_id, params=batch, synchronous=True)

    def _send_responses(self) -> None:
        """Append the tables that MLflow lacks. MLflow's files are read once, because appending is not repeatable."""
        step = self._run.state.step
        progress = step, len(list(self._run.path.glob(EVALUATIONS)))
        if progress == self._searched:
            return
        if self._sent_tables is None:
            self._sent_tables = set(self._stored_tables())
        for table in response_tables(self._run, resolved_spec(self._run), step, self._sent_tables):
            columns = dict(zip(ResponseRow._fields, map(list, zip(*table.rows, strict=True)), strict=True))
            self._client.log_table(self.progress.run_id, columns, f"{RESPONSES}/{table.name}.json")
            self._sent_tables.add((table.name, table.step))
        self._searched = progress

    def _stored_tables(self) -> Iterator[TableId]:
        run_id = self.progress.run_id
        for file in self._client.list_artifacts(run_id, RESPONSES):
            with TemporaryDirectory() as folder:
                stored = json.loads(Path(self._client.download_artifacts(run_id, file.path, folder)).read_text())
            steps = {row[stored["columns"].index("step")] for row in stored["data"]}
            yield from ((Path(file.path).stem, step) for step in steps)

    def _send_status(self, status: str) -> None:
        state = self._run.state
        if status == "RUNNING" != self._status:
            self._client.update_run(self.progress.run_id, status=status)
        elif status != self._status:
            end_time = int(state.updated * 1000) or None
            self._client.set_terminated(self.progress.run_id, status=status, end_time=end_time)
        self._status = status
        health = ", ".join(state.findings) or "ok" if state.step else ""
        if health != self._health:
            self._client.set_tag(self.progress.run_id, "health", health)
            self._health = health

    def _new_files(self, purpose: str, pattern: str) -> Iterator[Path]:
        """Yield the files that this object has not sent for this purpose, or that were written again since. A file
        counts as sent when the caller asks for the next one."""
        for path in sorted(self._run.path.glob(pattern)):
            key, modified = f"{purpose} {path}", path.stat().st_mtime_ns
            if self._sent_files.get(key) != modified:
                yield path
                self._sent_files[key] = modified


def send_rest(run: RunDirectory, target: Target) -> Sender:
    """Send the remaining data of an ended run. Raises ``RunError`` if not everything could be sent."""
    sender = Sender(run, target)
    try:
        sender.send(STATUS.get(run.state.phase, "FAILED"))  # a run that is still active on disk has died
    except Exception as error:
        raise RunError(
            f"MLflow did not accept everything: {failure(error)}",
            location=run.run_id,
            hint=f"everything is kept in the run's folder; try again later: asyncrl track {run.argument}",
        ) from error
    return sender


def failure(error: Exception) -> str:
    """Return the cause of a failed request in one line."""
    return hide(" ".join(f"{type(error).__name__}: {error}".split())[:300])


def _metrics(line: bytes) -> list[Any]:
    """The metrics in a line; none if it is incomplete, which a kill or a full disk can cause."""
    from mlflow.entities import Metric

    try:
        row = json.loads(line)
        step, timestamp = int(row["step"]), int(row["time"] * 1000)
    except (ValueError, TypeError, KeyError):
        return []
    return [
        Metric(metric_name(name), float(value), timestamp=timestamp, step=step)
        for name, value in row.items()
        if name not in ("step", "version", "time") and isinstance(value, int | float)
    ]


def metric_name(name: str) -> str:
    """Return a name that MLflow accepts. It would refuse a whole step for a name with other characters, an empty
    folder, or a folder of dots."""
    folders = name[:METRIC_LENGTH].split("/")
    return "/".join(re.sub(r"[^\w. -]", "_", folder) for folder in folders if folder.strip(".")) or "_"


def _chunks(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (entries[start : start + size] for start in range(0, len(entries), size))
