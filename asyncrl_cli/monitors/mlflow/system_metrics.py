"""The load of the machine during a run: its processors, memory, disk, network and GPUs, under MLflow's own names.

MLflow's monitors measure; MLflow's own thread around them ends at the first request that a server does not answer.
Here samples are rows of the run's folder, and are sent like steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncrl_cli.monitors.mlflow.outbox import SAMPLES
from asyncrl_cli.runs.directory import RunDirectory

EVERY_S = 10.0
"""Seconds between two samples, as in MLflow."""
PREFIX = "system/"


class MachineSampler:
    """Writes a sample periodically, in its own thread, until ``stop``."""

    def __init__(self, run: RunDirectory, on_sample: Callable[[], None], every_s: float = EVERY_S) -> None:
        self._run = run
        self._on_sample = on_sample
        self._every_s = every_s
        self._monitors = _monitors()
        self._stopped = threading.Event()
        threading.Thread(target=self._sample_until_stopped, name="machine", daemon=True).start()

    def stop(self) -> None:
        """Take no further samples; one that is being written is finished."""
        self._stopped.set()

    def _sample_until_stopped(self) -> None:
        self._measure()  # the first sample is dropped: shares of time are those since the sample before
        while not self._stopped.wait(self._every_s):
            row = {"step": self._run.state.step, "time": time.time(), **self._measure()}
            self._run.append(SAMPLES, row)
            self._on_sample()

    def _measure(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            found |= {PREFIX + name: value for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        return found


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for gpus in (GPUMonitor, ROCMMonitor):
        with suppress(Exception):  # no such GPU, or no library for it; each library has its own type of error
            monitors.append(gpus())
    return monitors
