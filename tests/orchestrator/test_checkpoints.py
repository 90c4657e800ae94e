"""Saving during a run is atomic, and the driver's event loop never waits for a disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from stand_ins import spec

import asyncrl_cli.orchestrator.checkpoints as subject
from asyncrl_cli.orchestrator.checkpoints import Checkpoints
from asyncrl_cli.runs.checkpoints import Checkpoint, Digest, TrainerLayout, verified_checkpoint, verify
from asyncrl_cli.runs.directory import RunDirectory


class StandInRanks:
    """Trainer ranks that save one file."""

    def __init__(self) -> None:
        self.saves: list[str] = []

    async def save_checkpoint(self, folder: Path) -> None:
        self.saves.append(folder.name)

    async def write_checkpoint(self, folder: Path) -> dict[str, Digest]:
        (folder / "state").mkdir()
        (folder / "state/shard").write_bytes(b"%d" % len(self.saves) * 10)
        return {}


@pytest.fixture
def ranks() -> StandInRanks:
    return StandInRanks()


def checkpoints_of(run: RunDirectory, ranks: StandInRanks, **retention: int) -> Checkpoints:
    settings = spec(trainer={"ranks": 3, "zero_stage": 2}, checkpoints=retention)
    return Checkpoints(run.path / "checkpoints", ranks, settings)  # type: ignore[arg-type]


async def saved(checkpoints: Checkpoints, step: int, state: dict[str, Any]) -> Checkpoint:
    assert await checkpoints.copy(step)
    return await checkpoints.write(step, state)


def save(run: RunDirectory, ranks: StandInRanks, step: int) -> Checkpoint:
    return asyncio.run(saved(checkpoints_of(run, ranks), step, {"step": step, "waiting": ["é", None]}))


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def test_a_saved_checkpoint_is_read_back(run: RunDirectory, ranks: StandInRanks) -> None:
    saved = save(run, ranks, 40)
    assert saved.folder == run.path / "checkpoints/step-000040"
    assert ranks.saves == [".saving-step-000040"]
    checkpoint = verified_checkpoint(RunDirectory(run.path))
    assert checkpoint == saved
    assert {key: checkpoint.state()[key] for key in ("step", "waiting")} == {"step": 40, "waiting": ["é", None]}
    assert checkpoint.trainer() == TrainerLayout(3, 2, "float32")


@pytest.mark.parametrize("dies_at", ["write", "seal", "rename"])
def test_a_driver_that_dies_leaves_no_half_checkpoint(
    run: RunDirectory, ranks: StandInRanks, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if dies_at == "write":
            patched.setattr(Path, "write_text", die)
        else:
            patched.setattr(subject, dies_at, die)
        with pytest.raises(Killed):
            save(run, ranks, 40)
    assert verified_checkpoint(run) is None
    assert names(run) == [".saving-step-000040"]
    assert verify(save(run, ranks, 40)) == []
    assert names(run) == ["step-000040"]


def test_a_step_is_saved_once_unless_it_is_damaged(run: RunDirectory, ranks: StandInRanks) -> None:
    saved = save(run, ranks, 40)
    assert not asyncio.run(checkpoints_of(run, ranks).copy(40))
    assert len(ranks.saves) == 1
    (saved.folder / "state/shard").write_text("damaged")
    assert save(run, ranks, 40) == saved
    assert len(ranks.saves) == 2
    assert verify(saved) == []


async def test_a_save_that_is_cancelled_stops_and_leaves_no_checkpoint(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, cancelled, ended = threading.Event(), threading.Event(), threading.Event()
    seal = subject.seal

    def seal_slowly(folder: Path, check: Any, written: Any) -> None:
        def check_slowly() -> None:
            reading.set()
            assert cancelled.wait(300)
            check()

        try:
            seal(folder, check_slowly, written)
        finally:
            ended.set()

    monkeypatch.setattr(subject, "seal", seal_slowly)

    saving = asyncio.create_task(saved(checkpoints_of(run, StandInRanks()), 40, {}))
    assert await asyncio.to_thread(reading.wait, 60)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    cancelled.set()
    assert await asyncio.to_thread(ended.wait, 60)
    assert names(run) == [".saving-step-000040"]


async def test_the_loop_runs_while_a_checkpoint_is_written_and_pruned(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    renaming, looped = threading.Event(), threading.Event()
    rename = subject.rename

    def rename_after_the_loop(source: Path, target: Path) -> None:
        renaming.set()
        assert looped.wait(300), "the event loop was blocked"
        looped.clear()
        rename(source, target)

    monkeypatch.setattr(subject, "rename", rename_after_the_loop)
    checkpoints = checkpoints_of(run, StandInRanks(), keep_last=1)

    async def tick() -> None:
        while True:
            if renaming.is_set():
                renaming.clear()
                looped.set()
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    for step in (1, 2):
        await saved(checkpoints, step, {})
        checkpoints.prune({})
    ticking.cancel()
    assert names(run) == ["step-000002"]
