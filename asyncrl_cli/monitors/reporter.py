"""One place that the run reports to: state and metrics on disk, the view on screen, MLflow, Ray's metrics.

Nothing here may hold the run up or end it: files and output are written by threads, and the tracker is only told that
there is more to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from asyncrl_cli.monitors.mlflow.tracker import TrackerClient
from asyncrl_cli.monitors.notify import Notifier
from asyncrl_cli.monitors.ray_metrics import RayMetrics
from asyncrl_cli.monitors.records import EvaluationResult
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.recorder import Recorder


class View(Protocol):
    """What a person sees of a run."""

    def status(self, text: str) -> None:
        """What the run is doing while it starts or ends."""

    def doing(self, text: str, counts: Counts) -> None:
        """What the loop is doing, and what is in the buffer."""

    def warn(self, text: str) -> None:
        """Something failed or takes long, and the run goes on."""

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""

    def evaluated(self, result: EvaluationResult) -> None:
        """An evaluation is done."""


class Reporter:
    """Passes what happens on to everyone who wants to know."""

    def __init__(
        self,
        recorder: Recorder,
        view: View,
        tracker: TrackerClient | None,
        notifier: Notifier | None = None,
        ray_metrics: RayMetrics | None = None,
    ) -> None:
        self._recorder = recorder
        self._view = view
        self._tracker = tracker
        self._notifier = notifier
        self._ray_metrics = ray_metrics
        self.accuracy_before: dict[str, float] = dict(recorder.state.accuracy_before)
        self.accuracy: dict[str, float] = dict(recorder.state.accuracy)

    def status(self, text: str) -> None:
        """What the run is doing while it starts or ends."""
        self._view.status(text)

    def doing(self, text: str, counts: Counts) -> None:
        """What the loop is doing, and what is in the buffer."""
        self._view.doing(text, counts)
        if self._ray_metrics is not None:
            self._ray_metrics.doing(counts)

    def warn(self, text: str) -> None:
        """Something failed or takes long, and the run goes on."""
        self._view.warn(text)

    def faulted(self, kind: str) -> None:
        """A fault of this kind is about to be recorded."""
        if self._ray_metrics is not None:
            self._ray_metrics.faulted(kind)

    def stalled(self, text: str) -> None:
        """Something has been waited for for long, and may end the run."""
        self._view.warn(text)
        if self._notifier is not None:
            self._notifier.tell("stall", text)

    def stepped(self, step: int, version: int, metrics: Mapping[str, float], at: float) -> None:
        """A step is done, at the unix time ``at``."""
        self._recorder.append("metrics.jsonl", {"step": step, "version": version, "time": at, **metrics})
        self._recorder.update(phase="running", step=step, version=version)
        self._view.stepped(step, version, metrics)
        if self._ray_metrics is not None:
            self._ray_metrics.stepped(step, version, metrics)
        if self._tracker is not None:
            self._recorder.then(self._tracker.more)

    def evaluated(self, result: EvaluationResult) -> None:
        """An evaluation is done."""
        if result.step == 0:
            self.accuracy_before[result.kind] = result.accuracy
        self.accuracy[result.kind] = result.accuracy
        self._recorder.update(accuracy=dict(self.accuracy), accuracy_before=dict(self.accuracy_before))
        self._view.evaluated(result)
        if self._ray_metrics is not None:
            self._ray_metrics.evaluated(result)
        if self._tracker is not None:
            self._recorder.then(self._tracker.more)
