"""An interrupted run ends its work, and saves a checkpoint if there is time."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from stand_ins import run

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.monitors.base import Monitor
from asyncrl_cli.orchestrator import cluster, launch
from asyncrl_cli.orchestrator.cluster import while_ray_lives
from asyncrl_cli.orchestrator.interrupts import SIGNALS, Interrupted, Stop
from asyncrl_cli.orchestrator.launch import _save_before_leaving, link_model
from asyncrl_cli.runs.directory import ADAPTER, MODEL, WARM_START, RunDirectory

pytestmark = pytest.mark.slow


async def test_a_stop_cancels_the_work_and_waits_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_until_ray_ends", lambda _: never())
    ended: list[str] = []

    async def works() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    stop = Stop()
    stop.attach()
    asyncio.get_running_loop().call_soon(stop.handle, signal.SIGTERM, None)
    with pytest.raises(Interrupted):
        await while_ray_lives(works(), "", stop)
    assert ended == ["cleaned up"]


class Orchestrator:
    """Saves a checkpoint, or first fails or hangs."""

    def __init__(self, settle: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.settle = settle
        self.saved = False

    async def checkpoint(self) -> None:
        self.saved = True


async def at_once() -> None:
    pass


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def fails() -> None:
    raise RunError("the process died", location="trainer-0")


@pytest.mark.parametrize(("settle", "saves"), [(at_once, True), (never, False), (fails, False), (full_disk, False)])
def test_an_interrupted_run_saves_if_it_can(
    settle: Callable[[], Coroutine[Any, Any, None]], saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settle is never:
        monkeypatch.setattr(launch, "INTERRUPT_S", 0.01)
    orchestrator, view = Orchestrator(settle), Mock()
    run(_save_before_leaving(orchestrator, view))  # type: ignore[arg-type]
    assert orchestrator.saved == saves
    assert view.warn.called == (settle is full_disk)
    view.status.assert_called_once_with("stopping: saving a checkpoint if there is time")


# -- Ctrl-C after the work has ended


@pytest.mark.parametrize(("cause", "phase"), [(None, "finished"), (RunError("out of memory"), "failed")])
def test_ctrl_c_after_the_work_does_not_change_its_result(
    cause: Exception | None, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def cluster(*_: Any) -> Iterator[None]:
        try:
            yield
        finally:
            signal.raise_signal(signal.SIGINT)

    async def work(experiment: Any, recorder: Any, reporter: Any, start: Any, stop: Stop) -> launch.RunResult:
        stop.attach()
        if cause is not None:
            raise cause
        return launch.RunResult(1.0)

    monkeypatch.setattr(launch, "ray_cluster", cluster)
    monkeypatch.setattr(launch, "_run", work)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    directory = RunDirectory.create(tmp_path, "test")
    experiment: Any = SimpleNamespace(spec=None, monitors=())
    try:
        with pytest.raises(type(cause)) if cause is not None else nullcontext():
            launch.run_experiment(experiment, directory, Monitor(), launch.DriverStart())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert RunDirectory(directory.path).state.phase == phase


def test_a_resume_completes_a_model_that_a_killed_driver_had_begun(tmp_path: Path) -> None:
    (tmp_path / WARM_START / ADAPTER).mkdir(parents=True)
    for name in ("config.json", "weights", f"{ADAPTER}/weights"):
        (tmp_path / WARM_START / name).write_text(name)
    link_model(tmp_path, has_adapter=True)
    (tmp_path / MODEL / "config.json").unlink()
    link_model(tmp_path, has_adapter=True)
    assert sorted(path.name for path in (tmp_path / MODEL).iterdir()) == ["config.json", "weights"]
    assert [path.name for path in (tmp_path / ADAPTER).iterdir()] == ["weights"]
