"""The trainer follows the ledger: whatever dies at any time, its weights are those of the batches in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import Notes, run, turns

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.replicas import Written
from asyncrl_cli.orchestrator.trainer_recovery import ResilientTrainer
from asyncrl_cli.orchestrator.trainers import TrainerLost
from asyncrl_cli.records.groups import Counts, Opening, PublishRecord
from asyncrl_cli.records.training import Probe, StepReport, TrainingBatch
from asyncrl_cli.runs.checkpoints import Checkpoint

Step = tuple[int, ...]


def batch(step: int) -> TrainingBatch:
    return TrainingBatch(step, step, ())


class Ranks:
    """Trainer ranks whose weights are the steps that they were trained on. ``dies(call)`` decides when they die.

    ``call`` is ``method:step`` before the call, and ``after method:step`` after it.
    """

    def __init__(self, weights: Step = (), dies: Callable[[str], bool] = lambda call: False) -> None:
        self.weights = weights
        self.checkpoints: dict[int, Step] = {}
        self.down = False
        self.dies = dies

    async def train_step(self, batch: TrainingBatch) -> StepReport:
        report: StepReport = await self.call("train_step", batch)
        return report

    async def call(self, method: str, *arguments: Any) -> Any:
        assert not self.down, "ranks that are gone are not called"
        call = f"{method}:{len(self.weights)}"
        self._die_at(call)
        answer: Any = None
        if method == "train_step":
            (trained,) = arguments
            assert trained.step == len(self.weights), "batches come in order, and each once"
            self.weights = (*self.weights, trained.step)
            answer = StepReport({"step": float(trained.step)})
        if method == "save":
            self.checkpoints[len(self.weights)] = self.weights
        self._die_at(f"after {call}")
        return answer

    async def check(self) -> None:
        await self.call("check")

    async def restart(self, folder: Path | None) -> None:
        self.weights = self.checkpoints[int(folder.name)] if folder else ()
        self.down = False
        self._die_at(f"restart:{len(self.weights)}")

    def _die_at(self, call: str) -> None:
        if self.dies(call):
            self.down = True
            raise TrainerLost("trainer-1", call)


class Harness:
    """A trainer with such ranks; this object is also its buffer and its publisher."""

    def __init__(self, ranks: Ranks, max_deaths: int = 100, version: int = -1, publish_every: int = 1000) -> None:
        self.ranks = ranks
        self.read: list[int] = []
        self.hosts: dict[int, Step] = {}
        """The weights that the hosts have, by version."""
        self.served: list[tuple[int, Step]] = []
        self.trained: list[int] = []
        self.notes = Notes()
        self.available = version < 0
        """Whether engines can load the weights of the present version."""
        self.missed = False
        """Whether all engines wait for weights that no host has."""
        self.lost_deliveries = 0
        """How many of the next publishes are lost by a host."""
        self.sum_of = str
        """The checksum of a publish, by its weights."""
        self.current: tuple[int, str] | None = None
        """As in the publisher."""
        self.recorded: list[int] = []
        here: Any = self
        self.trainer = ResilientTrainer(
            *(here.ranks, here, here, here),
            self.notes.budget(max_deaths),
            step=len(ranks.weights),
            opening=opening(version),
            publish_every=publish_every,
            repeated=self._repeated,
        )

    def newest(self, step: int) -> Checkpoint | None:
        newest = max((saved for saved in self.ranks.checkpoints if saved <= step), default=0)
        return Checkpoint(Path(str(newest)), newest) if newest else None

    async def at(self, step: int, method: str) -> Any:
        """Call a method of the ranks with the weights after this many steps."""
        return await self.trainer.save(step, lambda: self.ranks.call(method))

    @property
    def losses(self) -> list[str]:
        return [cause for _, _, cause in self.notes]

    async def batch(self, step: int) -> TrainingBatch:
        self.read.append(step)
        return batch(step)

    async def serve(self, version: int) -> PublishRecord:
        record = await self.deliver(await self.write(version))
        assert record is not None
        return record

    async def write(self, version: int) -> Written:
        await self.ranks.call("serve")
        self.hosts[version] = self.ranks.weights
        return Written(version, Probe((), np.zeros(0, np.float32)), (), 0.0, 0)

    async def deliver(self, written: Written) -> PublishRecord | None:
        if self.lost_deliveries:
            self.lost_deliveries -= 1
            return None
        version, weights = written.version, self.hosts[written.version]
        self.available, self.missed = True, False
        self.served.append((version, weights))
        self.current = version, self.sum_of(weights)
        return PublishRecord(version, len(weights), self.sum_of(weights), 0.0, 0.0, 0.0, 0.0)

    async def publish_next(self) -> PublishRecord:
        """Publish the version that is due."""
        return await self.trainer.deliver(await self.trainer.write(self.trainer.version + 1))

    async def publish(self, record: PublishRecord) -> None:
        self.recorded.append(record.version)

    def _repeated(self, again: TrainingBatch, report: StepReport) -> None:
        assert report.metrics == {"step": again.step}
        self.trained.append(again.step)


def opening(version: int) -> Opening:
    """A run with this many published versions; the last publish was not recorded."""
    counts = Counts(0, 0, 0, 0, 0, 0)
    return Opening(0, version, 0, None, 0, None, groups=(), waiting=(), evaluated={}, counts=counts)


@pytest.fixture(autouse=True)
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are those of the harness instead of the run folder's."""
    monkeypatch.setattr("asyncrl_cli.orchestrator.trainer_recovery.newest_undamaged", Harness.newest)


def once(*calls: str) -> Callable[[str], bool]:
    """The ranks die once at each of these calls."""
    left = list(calls)

    def dies(call: str) -> bool:
        if call in left:
            left.remove(call)
            return True
        return False

    return dies


def test_a_trainer_that_is_level_just_works() -> None:
    async def check() -> None:
        harness = Harness(Ranks())
        for step in range(3):
            report = await harness.trainer.train(batch(step))
            assert report.metrics == {"step": step}
            assert harness.trainer.step == step + 1
        assert await harness.at(3, "publish") is None
        assert harness.ranks.weights == (0, 1, 2)
        assert (harness.read, harness.trained, harness.losses) == ([], [], [])

    run(check())


def test_a_trainer_that_starts_behind_trains_the_recorded_batches_in_order() -> None:
    async def check() -> None:
        harness = Harness(Ranks(weights=(0, 1)))
        done: list[Step] = []

        async def work() -> str:
            done.append(harness.ranks.weights)
            return "done"

        assert await harness.trainer.save(5, work) == "done"
        assert done == [(0, 1, 2, 3, 4)], "only at the right step"
        assert harness.read == harness.trained == [2, 3, 4]
        assert harness.trainer.step == 5

    run(check())


@pytest.mark.parametrize("death", ["train_step:5", "after train_step:5"])
def test_a_death_in_a_step_repeats_what_was_lost_from_the_newest_checkpoint(death: str) -> None:
    async def check() -> None:
        harness = Harness(Ranks(dies=once(death)))
        for step in range(3):
            await harness.trainer.train(batch(step))
        await harness.at(3, "save")
        for step in range(3, 6):
            await harness.trainer.train(batch(step))
        assert harness.ranks.weights == (0, 1, 2, 3, 4, 5)
        assert harness.losses == [death]
        assert harness.read == harness.trained == [3, 4], "the caller trains the requested step itself"

    run(check())


def test_without_a_checkpoint_everything_is_repeated() -> None:
    async def check() -> None:
        harness = Harness(Ranks(dies=once("publish:4")))
        for step in range(4):
            await harness.trainer.train(batch(step))
        await harness.at(4, "publish")
        assert harness.ranks.weights == (0, 1, 2, 3)
        assert harness.read == [0, 1, 2, 3]

    run(check())


def test_deaths_while_catching_up_restart_it() -> None:
    async def check() -> None:
        deaths = ("publish:4", "restart:2", "train_step:3", "after train_step:3", "after publish:4")
        harness = Harness(Ranks())
        await harness.at(2, "save")
        await harness.trainer.train(batch(2))
        await harness.trainer.train(batch(3))
        harness.ranks.dies = once(*deaths)
        await harness.at(4, "publish")
        assert harness.losses == list(deaths)
        assert harness.ranks.weights == (0, 1, 2, 3)

    run(check())


@pytest.mark.parametrize("death", ["", "serve:4", "after serve:4", "train_step:4"])
def test_the_version_that_engines_serve_is_written_again_on_the_way(death: str) -> None:
    """Restarted engines wait for it. The ranks may die there, too."""

    async def check() -> None:
        harness = Harness(Ranks(weights=(0, 1), dies=once(death)), version=2, publish_every=2)
        harness.ranks.checkpoints[2] = (0, 1)
        await harness.at(5, "look")
        assert harness.losses == ([death] if death else [])
        assert harness.served == [(2, (0, 1, 2, 3))], "once it is written, the hosts have it"
        assert harness.recorded == [2], "its publish had not been recorded"
        assert harness.notes == [("trainer", "trainer-1", death)] * bool(death), "the bits are the same"

    run(check())


def test_other_bits_of_the_same_version_are_noted() -> None:
    async def check() -> None:
        harness = Harness(Ranks(), publish_every=2)
        await harness.publish_next()
        for step in range(2):
            await harness.trainer.train(batch(step))
        await harness.at(2, "save")
        await harness.publish_next()
        harness.sum_of = lambda weights: f"other bits of {weights}"
        harness.available = False
        for step in range(2, 4):
            await harness.trainer.train(batch(step))
        assert harness.served == [(0, ()), (1, (0, 1)), (1, (0, 1))]
        assert [kind for kind, _, _ in harness.notes] == ["weights"]
        assert harness.recorded == [], "the loop records what it publishes"

    run(check())


def test_a_version_that_is_due_is_published_and_not_the_one_before() -> None:
    async def check() -> None:
        harness = Harness(Ranks(weights=(0, 1), dies=once("serve:4")), version=1, publish_every=2)
        harness.ranks.checkpoints[2] = (0, 1)
        record = await harness.publish_next()
        assert (record.version, harness.trainer.version) == (2, 2)
        assert harness.served == [(2, (0, 1, 2, 3))]

    run(check())


def test_a_version_that_is_lost_while_the_trainer_trains_on_is_made_again() -> None:
    async def check() -> None:
        harness = Harness(Ranks(), publish_every=2)
        await harness.publish_next()
        for step in range(2):
            await harness.trainer.train(batch(step))
        written = await harness.trainer.write(1)
        await harness.at(2, "save")
        await harness.trainer.train(batch(2))
        harness.lost_deliveries = 1
        assert (await harness.trainer.deliver(written)).version == 1
        assert harness.served[-1] == (1, (0, 1)), "the weights after its steps, not the present ones"
        await harness.trainer.train(batch(3))
        assert harness.ranks.weights == (0, 1, 2, 3)
        assert harness.trained == [2], "the step that had been trained since was repeated from the journal"

    run(check())


def test_a_version_is_made_from_a_checkpoint_before_it() -> None:
    """In a resumed run the newest checkpoint may be a later one."""

    async def check() -> None:
        ranks = Ranks(weights=(0, 1, 2, 3))
        ranks.checkpoints = {2: (0, 1), 4: (0, 1, 2, 3)}
        harness = Harness(ranks, version=2, publish_every=1)
        assert (await harness.publish_next()).version == 3
        assert harness.served == [(3, (0, 1, 2))]
        assert len(harness.losses) == 1

    run(check())


def test_a_publish_whose_weights_are_lost_on_the_way_is_written_again() -> None:
    async def check() -> None:
        harness = Harness(Ranks(weights=(0, 1)), version=0, publish_every=2)
        harness.lost_deliveries = 2
        assert (await harness.publish_next()).version == 1
        assert harness.served == [(1, (0, 1))]

    run(check())


@pytest.mark.parametrize("checkpoint", [None, 2])
def test_the_trainer_goes_back_for_weights_that_all_engines_wait_for_in_vain(
    checkpoint: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without engines there is no batch from which the next version could be trained."""
    monkeypatch.setattr("asyncrl_cli.orchestrator.trainer_recovery.GUARD_S", 0.0)

    async def check() -> None:
        harness = Harness(Ranks(weights=(0, 1, 2)), version=1, publish_every=2)
        harness.ranks.checkpoints |= {} if checkpoint is None else {checkpoint: (0, 1)}
        harness.available, harness.missed = False, True
        guard = asyncio.create_task(harness.trainer.guard())
        await turns()
        assert harness.served == [(1, (0, 1))]
        assert harness.trainer.step == 3
        assert harness.losses == ["no host has version 1 any more, and all engines wait for it"]
        guard.cancel()

    run(check())


def test_weights_that_no_host_has_are_written_again_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No publish follows, and the last evaluation needs engines."""
    monkeypatch.setattr("asyncrl_cli.orchestrator.trainer_recovery.GUARD_S", 0.0)

    async def check() -> None:
        harness = Harness(Ranks(weights=(0, 1)), version=1, publish_every=2)
        harness.available, harness.missed = False, True
        guard = asyncio.create_task(harness.trainer.guard())
        await turns(50)
        assert harness.served == [(1, (0, 1))]
        assert harness.losses == []
        guard.cancel()

    run(check())


def test_it_does_not_go_back_for_weights_that_no_checkpoint_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.orchestrator.trainer_recovery.GUARD_S", 0.0)

    async def check() -> None:
        harness = Harness(Ranks(weights=(0, 1, 2, 3)), version=1, publish_every=2)
        harness.ranks.checkpoints[4] = (0, 1, 2, 3)
        harness.available, harness.missed = False, True
        guard = asyncio.create_task(harness.trainer.guard())
        await turns(100)
        assert harness.served == []
        assert len(harness.losses) == 1
        assert (await harness.publish_next()).version == 2, "which is due"
        guard.cancel()

    run(check())


def test_too_many_deaths_end_the_work() -> None:
    async def check() -> None:
        harness = Harness(Ranks(dies=lambda call: call.startswith("train_step")), max_deaths=3)
        with pytest.raises(RunError, match="restarted 3 times"):
            await harness.trainer.train(batch(0))
        assert len(harness.losses) == 4

    run(check())


def test_an_error_that_is_not_a_death_is_raised() -> None:
    async def check() -> None:
        harness = Harness(Ranks())

        async def work() -> None:
            raise RunError("the loss is not finite")

        with pytest.raises(RunError, match="not finite"):
            await harness.trainer.save(2, work)
        assert harness.losses == []
        await harness.trainer.train(batch(2))

    run(check())


def test_weights_of_a_step_that_was_cancelled_are_not_used() -> None:
    async def check() -> None:
        harness = Harness(Ranks())
        await harness.at(1, "save")
        begun, may_continue = asyncio.Event(), asyncio.Event()
        call = harness.ranks.call

        async def slow(method: str, *arguments: Any) -> list[Any]:
            begun.set()
            await may_continue.wait()
            return await call(method, *arguments)

        harness.ranks.call = slow  # type: ignore[method-assign]
        catching_up = asyncio.create_task(harness.at(3, "publish"))
        await begun.wait()
        assert not harness.trainer.between_steps
        catching_up.cancel()
        await asyncio.wait([catching_up])
        assert (harness.trainer.step, harness.trainer.between_steps) == (1, False), "the ranks are still training"
        harness.ranks.call = call  # type: ignore[method-assign]
        await harness.ranks.call("train_step", batch(1))
        await harness.at(2, "look")
        assert harness.ranks.weights == (0, 1), "from the checkpoint, and not twice"
        assert (harness.trainer.step, harness.trainer.between_steps) == (2, True)

    run(check())


def test_a_death_while_nothing_is_asked_of_the_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.orchestrator.trainer_recovery.GUARD_S", 0.0)

    async def check() -> None:
        harness = Harness(Ranks(dies=once("check:2")))
        await harness.trainer.train(batch(0))
        await harness.at(1, "save")
        await harness.trainer.train(batch(1))
        guarding = asyncio.create_task(harness.trainer.guard())
        while harness.trained != [1]:
            await asyncio.sleep(0)
        assert harness.losses == ["check:2"]
        await harness.trainer.train(batch(2))
        assert harness.ranks.weights == (0, 1, 2)
        guarding.cancel()

    run(check())


def test_weights_of_a_later_step_are_refused() -> None:
    async def check() -> None:
        harness = Harness(Ranks(weights=(0, 1, 2)))
        with pytest.raises(RuntimeError, match="the weights are those after 3 steps, not after 2"):
            await harness.at(2, "save")
        assert harness.ranks.checkpoints == {}

    run(check())


def test_one_piece_of_work_at_a_time() -> None:
    async def check() -> None:
        harness = Harness(Ranks())
        active = 0

        async def work() -> None:
            nonlocal active
            active += 1
            await asyncio.sleep(0)
            assert active == 1
            active -= 1

        await asyncio.gather(*(harness.trainer.save(2, work) for _ in range(5)))
        assert harness.ranks.weights == (0, 1)

    run(check())


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_whatever_dies_when_the_weights_are_those_of_the_batches_in_order(data: st.DataObject) -> None:
    deaths_left = data.draw(st.integers(0, 6))

    def dies(call: str) -> bool:
        nonlocal deaths_left
        died = deaths_left > 0 and data.draw(st.booleans(), label=call)
        deaths_left -= died
        return died

    async def check() -> None:
        behind = data.draw(st.integers(0, 4))
        ranks = Ranks(tuple(range(data.draw(st.integers(0, behind)))), dies)
        ranks.checkpoints[len(ranks.weights)] = ranks.weights
        harness = Harness(ranks)
        saved = {**ranks.checkpoints}
        await harness.trainer.save(behind, lambda: ranks.call("look"))
        for step in range(behind, behind + data.draw(st.integers(1, 5))):
            await harness.trainer.train(batch(step))
            assert ranks.weights == tuple(range(step + 1))
            if data.draw(st.booleans()):
                await harness.at(step + 1, "save")
                assert ranks.checkpoints[step + 1] == tuple(range(step + 1))
        assert ranks.checkpoints.items() >= saved.items()

    run(check())
