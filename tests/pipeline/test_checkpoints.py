"""Checkpoints: whole or not there, and nothing of a run's place is lost in one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import prompts

from asyncrl_cli.buffer.ledger import Batch, Ledger
from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.pipeline.checkpoints import Checkpoints, complete_checkpoints, load_newest
from asyncrl_cli.runs.directory import RunDirectory, RunError


class StandInFleet:
    """Trainer ranks that save one small file, or die."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.dies = False

    async def train(self, method: str, *arguments: str) -> list[Any]:
        self.calls.append((method, *arguments))
        if self.dies:
            raise RunError("the process died", place="trainer-0")
        (Path(arguments[0]) / "state").mkdir()
        (Path(arguments[0]) / "state/shard").write_text(f"shard {len(self.calls)}")
        return [None]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "test")


@pytest.fixture
def fleet() -> StandInFleet:
    return StandInFleet()


def save(
    run: RunDirectory,
    fleet: StandInFleet,
    ledger: Ledger,
    outstanding: list[Prompt] | None = None,
    loader: dict[str, int] | None = None,
    keep_last: int = 2,
) -> Path:
    checkpoints = Checkpoints(run, fleet, keep_last)  # type: ignore[arg-type]
    return asyncio.run(checkpoints.save(ledger, loader or {"epoch": 0, "position": 0}, outstanding or []))


def step(ledger: Ledger) -> None:
    """Fill the room, finish what the next batch needs, train and publish."""
    while ledger.room():
        ledger.admit()
    while not isinstance(batch := ledger.next_batch(), Batch):
        ledger.finish(ledger.running[0])
    ledger.take(batch)
    if ledger.publish_due:
        ledger.publish()


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def test_a_round_trip_gives_the_outstanding_prompts_back(run: RunDirectory, fleet: StandInFleet) -> None:
    ledger = Ledger(2, 1, 2, total_steps=10)
    step(ledger)
    step(ledger)
    ledger.finish(ledger.running[1])
    chat = Prompt("chat", ({"role": "user", "content": "é?"}, {"role": "user", "content": "!"}), {"n": [1, None]})
    outstanding = [*prompts(3), chat]
    folder = save(run, fleet, ledger, outstanding, {"epoch": 1, "position": 4})
    assert folder == run.path / "checkpoints/step-000002"
    assert (folder / "state/shard").read_text() == "shard 1"
    assert fleet.calls[0][0] == "save_checkpoint"
    assert ledger.running, "saving changes nothing"

    saved = load_newest(RunDirectory(run.path), total_steps=20)
    assert saved.folder == folder
    assert saved.loader == {"epoch": 1, "position": 4}
    assert saved.prompts == tuple(outstanding)
    assert (saved.ledger.step, saved.ledger.version, saved.ledger.total_steps) == (2, 2, 20)
    assert saved.ledger.running == saved.ledger.finished == ()
    assert saved.ledger.rejections == {"interrupted": len(ledger.running) + len(ledger.finished)}
    assert saved.ledger.admit().group_id == ledger.snapshot()["next_id"], "a number is never used twice"


@given(
    groups=st.integers(1, 3),
    every=st.integers(1, 3),
    staleness=st.integers(0, 3),
    versions=st.integers(0, 3),
    started=st.integers(0, 20),
    finished=st.integers(0, 20),
)
@settings(deadline=None, max_examples=40)
def test_a_resumed_ledger_has_room_for_all_that_was_under_way(
    tmp_path_factory: pytest.TempPathFactory,
    groups: int,
    every: int,
    staleness: int,
    versions: int,
    started: int,
    finished: int,
) -> None:
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "test")
    ledger = Ledger(groups, every, staleness, total_steps=12)
    for _ in range(versions * every):
        step(ledger)
    for _ in range(min(started, ledger.room())):
        ledger.admit()
    for group_id in ledger.running[:finished]:
        ledger.finish(group_id)
    room, outstanding = ledger.room(), len(ledger.running) + len(ledger.finished)
    save(run, StandInFleet(), ledger)
    resumed = load_newest(run, 12).ledger
    assert resumed.room() == room + outstanding
    assert resumed.step == ledger.step
    while not resumed.done:
        step(resumed)


def test_only_whole_checkpoints_count(run: RunDirectory, fleet: StandInFleet) -> None:
    folder = run.path / "checkpoints"
    for name in (".step-000009", "step-000008"):
        (folder / name / "state").mkdir(parents=True)
    (folder / ".step-000009/run.json").write_text("{}")
    (folder / "notes").mkdir()
    assert complete_checkpoints(folder) == []
    with pytest.raises(RunError, match=f"{run.run_id}: the run has no checkpoint to resume from. Start it anew"):
        load_newest(run, 10)
    ledger = Ledger(1, 1, 0)
    step(ledger)
    saved = save(run, fleet, ledger)
    assert complete_checkpoints(folder) == [saved]
    assert complete_checkpoints(run.path / "missing") == []


def test_a_save_that_fails_leaves_the_older_one(run: RunDirectory, fleet: StandInFleet) -> None:
    ledger = Ledger(1, 1, 1)
    step(ledger)
    first = save(run, fleet, ledger)
    step(ledger)
    fleet.dies = True
    with pytest.raises(RunError, match="trainer-0"):
        save(run, fleet, ledger)
    assert complete_checkpoints(run.path / "checkpoints") == [first]
    assert load_newest(run, 10).ledger.step == 1
    fleet.dies = False
    assert save(run, fleet, ledger).name == "step-000002", "the remains of the failed one are no hindrance"
    assert names(run) == ["step-000001", "step-000002"]


@pytest.mark.parametrize("damage", ["", "{}", '{"ledger": 3'])
def test_a_damaged_checkpoint_is_named(run: RunDirectory, fleet: StandInFleet, damage: str) -> None:
    folder = save(run, fleet, Ledger(1, 1, 1))
    (folder / "run.json").write_text(damage)
    with pytest.raises(RunError, match="the checkpoint is damaged") as error:
        load_newest(run, 10)
    assert error.value.place == str(folder)


def test_a_step_is_saved_once(run: RunDirectory, fleet: StandInFleet) -> None:
    ledger = Ledger(1, 1, 1)
    assert save(run, fleet, ledger) == save(run, fleet, ledger)
    assert len(fleet.calls) == 1
    assert load_newest(run, 10).ledger.step == 0


@pytest.mark.parametrize("keep_last", [1, 3])
def test_the_last_few_are_kept(run: RunDirectory, fleet: StandInFleet, keep_last: int) -> None:
    ledger = Ledger(1, 1, 0)
    for _ in range(12):
        step(ledger)
        save(run, fleet, ledger, keep_last=keep_last)
    assert names(run) == [f"step-{number:06d}" for number in range(13 - keep_last, 13)]
    assert load_newest(run, 20).ledger.step == 12
