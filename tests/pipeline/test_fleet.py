"""Actors that die while a run starts are started again; whatever else goes wrong ends the start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from stand_ins import Notes

from asyncrl_cli.pipeline.fleet import start_fleet
from asyncrl_cli.pipeline.remote import ActorDied
from asyncrl_cli.pipeline.trainers import TrainerLost
from asyncrl_cli.runs.directory import RunError

Fate = Callable[[str], None]
"""What happens in a call: it may raise."""


class Engine:
    """An engine's process that meets its fate in `preload` and `start`."""

    def __init__(self, name: str, fate: Fate) -> None:
        self.name = name
        self.fate = fate
        self.calls: list[str] = []

    async def preload(self) -> None:
        await self._do("preload")

    async def start(self, folder: Path) -> str:
        assert folder == Path("/skeleton")
        await self._do("start")
        return "node-1"

    def renew(self) -> None:
        self.calls.append("renew")

    async def _do(self, call: str) -> None:
        self.calls.append(call)
        await asyncio.sleep(0)
        self.fate(f"{self.name} {call}")


class Trainers(Engine):
    """Trainer ranks, likewise."""

    node = "node-1"

    async def prepare_model(self, progress: Callable[[str], None]) -> str:
        await self._do("prepare_model")
        return "/model"

    async def start(self, checkpoint: Path | None) -> None:  # type: ignore[override]
        assert checkpoint == Path("/step-000004")
        await self._do("start")


def dying(*deaths: str) -> Fate:
    """Dies in each of these calls once."""
    left = list(deaths)

    def fate(call: str) -> None:
        if call in left:
            left.remove(call)
            name = call.split()[0]
            raise (
                TrainerLost(name, "the process died")
                if "trainer" in name
                else ActorDied("the process died", place=name)
            )

    return fate


def start(fate: Fate, notes: Notes | None = None, max_restarts: int = 10) -> tuple[str, Trainers, list[Engine]]:
    """Start two engines and a trainer; returns the model's folder, and them."""
    trainers, engines = Trainers("trainer-0", fate), [Engine(f"engine-{index}", fate) for index in range(2)]

    async def check() -> str:
        faults = (notes if notes is not None else Notes()).faults(max_restarts)
        skeleton, checkpoint = (lambda: Path("/skeleton")), Path("/step-000004")
        try:
            return await start_fleet(engines, trainers, skeleton, checkpoint, lambda text: None, faults)  # type: ignore[arg-type]
        finally:
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing goes on after the start"

    return run(check()), trainers, engines


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(test)


def test_everything_starts_once() -> None:
    model_dir, trainers, engines = start(dying())
    assert model_dir == "/model"
    assert trainers.calls == ["preload", "prepare_model", "start"]
    assert [engine.calls for engine in engines] == [["preload", "start"]] * 2


@pytest.mark.parametrize("call", ["preload", "start"])
def test_an_engine_that_dies_starts_again_alone(call: str) -> None:
    notes = Notes()
    _, trainers, engines = start(dying(f"engine-1 {call}"), notes)
    assert engines[1].calls[-3:] == ["renew", "preload", "start"]
    assert engines[0].calls == ["preload", "start"]
    assert trainers.calls == ["preload", "prepare_model", "start"]
    assert notes == [("engine", "engine-1", "the process died")]


@pytest.mark.parametrize("call", ["preload", "prepare_model", "start"])
def test_trainer_ranks_start_again_from_the_beginning(call: str) -> None:
    notes = Notes()
    model_dir, trainers, engines = start(dying(f"trainer-0 {call}"), notes)
    assert model_dir == "/model"
    assert trainers.calls[-4:] == ["renew", "preload", "prepare_model", "start"]
    assert [engine.calls for engine in engines] == [["preload", "start"]] * 2
    assert notes == [("trainer", "trainer-0", "the process died")]


def test_too_many_deaths_end_the_start() -> None:
    def always(call: str) -> None:
        if call == "engine-0 start":
            raise ActorDied("the process died", place="engine-0")

    with pytest.raises(RunError, match="restarted 2 times"):
        start(always, max_restarts=2)


def test_what_is_no_death_ends_the_start_at_once() -> None:
    def refuses(call: str) -> None:
        if call == "engine-0 start":
            raise RunError("ValueError: no such block size", place="engine-0")

    with pytest.raises(RunError, match="no such block size"):
        start(refuses)
