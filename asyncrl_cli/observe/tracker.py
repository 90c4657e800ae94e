"""MLflow, in an actor of its own: its imports, its database and its server's moods cost the run nothing.

Metrics are logged under step numbers, so what arrives late or twice changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.runs.logs import redirect_output


class Tracker:
    """The Ray actor: one MLflow run."""

    def __init__(
        self, uri: str, experiment: str, artifacts: str | None, run_name: str, run_id: str | None, log_dir: str
    ) -> None:
        redirect_output(log_dir, "mlflow")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        if run_id is None:
            found = self._client.get_experiment_by_name(experiment)
            experiment_id = (
                found.experiment_id
                if found
                else self._client.create_experiment(experiment, artifact_location=artifacts)
            )
            run_id = self._client.create_run(experiment_id, run_name=run_name).info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id: str = run_id

    def run_id(self) -> str:
        """MLflow's id of the run."""
        return self._run_id

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Log parameters, once."""
        from mlflow.entities import Param

        entries = [Param(key, value[:6000]) for key, value in parameters.items()]
        for start in range(0, len(entries), 100):
            self._client.log_batch(self._run_id, params=entries[start : start + 100])

    def log_metrics(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step; ``at`` is unix time in seconds."""
        from mlflow.entities import Metric

        entries = [Metric(key, value, int(at * 1000), step) for key, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=entries)

    def log_artifacts(self, paths: list[str]) -> None:
        """Copy files or folders to the run's artifacts."""
        for path in paths:
            if Path(path).is_dir():
                self._client.log_artifacts(self._run_id, path, artifact_path=Path(path).name)
            else:
                self._client.log_artifact(self._run_id, path)

    def end(self, status: str) -> None:
        """End the MLflow run: FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self._run_id, status=status)


class TrackerClient:
    """The driver's end: never waits for MLflow before the run's end, and never fails because of it."""

    def __init__(
        self, uri: str, experiment: str, artifacts: str | None, run_name: str, run_id: str | None, log_dir: str
    ) -> None:
        import ray

        actor_class = ray.remote(Tracker).options(num_cpus=0)
        self._actor = actor_class.remote(uri, experiment, artifacts, run_name, run_id, log_dir)
        self._first: Any = self._actor.run_id.remote()
        self._calls: list[Any] = []

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Log parameters, once."""
        self._calls.append(self._actor.log_parameters.remote(dict(parameters)))

    def log(self, step: int, at: float | None, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        self._calls.append(self._actor.log_metrics.remote(step, time.time() if at is None else at, dict(metrics)))

    def log_artifacts(self, paths: list[Path]) -> None:
        """Copy files or folders to the run's artifacts."""
        self._calls.append(self._actor.log_artifacts.remote([str(path) for path in paths]))

    async def run_id(self) -> str | None:
        """MLflow's id of the run, once it has one; None when it has failed."""
        try:
            return str(await self._first)
        except Exception:
            return None

    def close(self, status: str, timeout_s: float) -> str:
        """Wait up to ``timeout_s`` until everything is logged; returns what went wrong, empty if nothing did."""
        import ray
        from ray.exceptions import GetTimeoutError

        self._calls.append(self._actor.end.remote(status))
        try:
            ray.get([self._first, *self._calls], timeout=timeout_s)
        except GetTimeoutError:
            return f"no answer within {timeout_s:.0f} s"
        except Exception as error:
            cause = getattr(error, "cause", error)
            return f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), 'no message')}"
        return ""
