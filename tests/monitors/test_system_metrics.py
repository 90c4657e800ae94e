"""Metrics of the machine during a run: measured, stored and sent."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.monitors.mlflow.outbox import FILE, SAMPLES, Outbox
from asyncrl_cli.monitors.mlflow.sender import Sender
from asyncrl_cli.monitors.mlflow.tracker import machine_monitors, sample_machine
from asyncrl_cli.runs.directory import RunDirectory

from .mlflow_runs import Logged, do_steps, local, started_run

LIMIT_S = 120.0
pytestmark = pytest.mark.stack

CPU, MEMORY = "system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return started_run(tmp_path)


def sampled(run: RunDirectory, count: int) -> list[dict[str, Any]]:
    """Sample at least this often in a thread, and stop it."""
    there, stopped = threading.Semaphore(0), threading.Event()
    thread = threading.Thread(target=sample_machine, args=(run, machine_monitors(), there.release, stopped, 0.01))
    thread.start()
    for _ in range(count):
        assert there.acquire(timeout=LIMIT_S)
    stopped.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    return run.read(SAMPLES)


def test_samples_have_the_names_of_mlflow_and_the_step_of_the_run(run: RunDirectory) -> None:
    run.update(phase="running", step=7)
    rows = sampled(run, 3)
    assert len(rows) >= 3
    for row in rows:
        assert row["step"] == 7
        assert 0 <= row[CPU] <= 100
        assert row[MEMORY] > 1
        assert {"system/disk_usage_percentage", "system/network_receive_megabytes"} <= row.keys()
    times = [row["time"] for row in rows]
    assert times == sorted(set(times))


def test_shares_of_time_count_since_the_previous_sample(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    askers: list[int] = []

    def cpu_percent() -> float:  # psutil remembers each thread's last call, and returns 0 for the first call
        askers.append(threading.get_ident())
        return float(askers.count(threading.get_ident()) - 1)

    monkeypatch.setattr(psutil, "cpu_percent", cpu_percent)
    rows = sampled(run, 3)
    assert [row[CPU] for row in rows] == list(range(1, len(rows) + 1))


def test_existing_gpus_are_measured(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.system_metrics.metrics import gpu_monitor

    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=30e9, total=40e9),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=85),
        nvmlDeviceGetPowerUsage=lambda _: 350_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda _: 700_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_monitor, "pynvml", nvml, raising=False)
    row = sampled(run, 1)[0]
    assert row["system/gpu_0_utilization_percentage"] == 85
    assert row["system/gpu_0_memory_usage_megabytes"] == 30_000
    assert row["system/gpu_0_power_usage_watts"] == 350


def test_repeated_attempts_send_each_sample_once(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    for second in range(1, 4):
        run.append(SAMPLES, {"step": 1, "time": 1e6 + second, CPU: 10.0 * second})
    Sender(run, target).send("RUNNING")
    assert Outbox(run, target.uri, target.experiment).samples() == []
    run.append(SAMPLES, {"step": 2, "time": 1e6 + 4, CPU: 40.0})
    do_steps(run, 1, 2)
    Sender(run, target).send("RUNNING")
    expected = [(1, 10.0), (1, 20.0), (1, 30.0), (2, 40.0)]
    assert Logged(target.uri).history(CPU) == expected

    (run.path / FILE).unlink()  # as if killed before recording the sent data
    Sender(run, target).send("FINISHED")
    logged = Logged(target.uri)
    assert logged.history(CPU) == expected
    points = logged.client.get_metric_history(logged.run.info.run_id, CPU)
    assert sorted(point.timestamp for point in points) == [1_000_001_000, 1_000_002_000, 1_000_003_000, 1_000_004_000]
