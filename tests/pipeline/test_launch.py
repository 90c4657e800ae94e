"""How a run is interrupted: what is under way ends, and where the run stands is saved if there is time."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from stand_ins import run

from asyncrl_cli.pipeline import launch
from asyncrl_cli.pipeline.interrupts import Interrupted, Stop, until_stopped
from asyncrl_cli.pipeline.launch import _save_before_leaving
from asyncrl_cli.runs.directory import RunError


def test_work_that_ends_first_has_its_result_or_its_error() -> None:
    async def check() -> None:
        stop = Stop()
        stop.attach()
        assert await until_stopped(asyncio.sleep(0, "done"), stop) == "done"

        async def fails() -> None:
            raise RunError("no memory")

        with pytest.raises(RunError, match="no memory"):
            await until_stopped(fails(), stop)

    run(check())


def test_a_stop_cancels_the_work_and_waits_until_it_has_ended() -> None:
    ended: list[str] = []

    async def works() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    async def check() -> None:
        stop = Stop()
        stop.attach()
        asyncio.get_running_loop().call_soon(stop.handle, signal.SIGTERM, None)
        with pytest.raises(Interrupted):
            await until_stopped(works(), stop)
        assert ended == ["cleaned up"]

    run(check())


def test_what_work_raises_while_it_ends_is_nobodys_business(caplog: pytest.LogCaptureFixture) -> None:
    async def works() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise RuntimeError("the loop is gone")

    async def check() -> None:
        stop = Stop()
        stop.attach()
        asyncio.get_running_loop().call_soon(stop.handle, signal.SIGTERM, None)
        with pytest.raises(Interrupted):
            await until_stopped(works(), stop)

    run(check())
    gc.collect()
    assert caplog.text == ""


class Conductor:
    """Saves, or does not come to it."""

    def __init__(self, settle: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.settle = settle
        self.saved = False

    async def checkpoint(self) -> None:
        self.saved = True


async def at_once() -> None:
    pass


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def fails() -> None:
    raise RunError("the process died", place="trainer-0")


@pytest.mark.parametrize(("settle", "saves"), [(at_once, True), (never, False), (fails, False)])
def test_an_interrupted_run_saves_if_it_can(
    settle: Callable[[], Coroutine[Any, Any, None]], saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settle is never:
        monkeypatch.setattr(launch, "INTERRUPT_S", 0.01)
    conductor = Conductor(settle)

    class View:
        said: str = ""

        def status(self, text: str) -> None:
            self.said = text

    view = View()
    run(_save_before_leaving(conductor, view))  # type: ignore[arg-type]
    assert conductor.saved == saves
    assert view.said == "stopping: saving where the run is"


def test_before_anything_has_started_there_is_nothing_to_save() -> None:
    run(_save_before_leaving(None, None))  # type: ignore[arg-type]
