"""TensorBoard: event files in the run's folder, for `tensorboard --logdir RUN/tensorboard`.

Metrics of steps have their own names, evaluations those of MLflow. A resumed run writes a further file; steps that it
repeats are there twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from asyncrl_cli.monitors.base import Ending, EvaluationResult, Monitor, RunInfo, evaluation_metrics

FOLDER = "tensorboard"


class TensorBoard(Monitor):
    """Writes every number as a scalar."""

    name = "TensorBoard"

    def __init__(self) -> None:
        self._writer: Any = None

    def started(self, run: RunInfo) -> None:
        from tensorboard.summary import Writer

        self._folder = run.folder / FOLDER
        self._writer = Writer(str(self._folder))

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._write(step, {"version": version, **metrics}.items())

    def evaluated(self, result: EvaluationResult) -> None:
        self._write(result.step, evaluation_metrics(asdict(result)))

    def finish(self, ending: Ending) -> str:
        self._writer.close()
        return f"tensorboard --logdir {self._folder}"

    def _write(self, step: int, numbers: Iterable[tuple[str, float]]) -> None:
        for name, value in numbers:
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a killed run loses nothing
