"""The trainer follows the ledger: whichever rank dies, at any time, its weights follow from the batches in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import Notes, run

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.orchestrator.trainer_recovery import ResilientTrainer, StepPassed
from asyncrl_cli.orchestrator.trainers import TrainerLost
from asyncrl_cli.records.training import StepReport, TrainingBatch
from asyncrl_cli.runs.checkpoints import Checkpoint
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.train.worker import FullGpu

pytestmark = pytest.mark.slow

Step = tuple[int, ...]


def batch(step: int) -> TrainingBatch:
    return TrainingBatch(step, step, ())


class Ranks:
    """Trainer ranks with their trained steps as weights. ``dies(call)`` decides when they die.

    ``call`` is ``method:step`` before the call, and ``after method:step`` after it.
    """

    def __init__(self, weights: Step = (), dies: Callable[[str], bool] = lambda call: False) -> None:
        self.weights = weights
        self.checkpoints: dict[int, Step] = {}
        self.down = False
        self.dies = dies
        self.room: dict[int, int] = {}
        """Tokens of a micro-batch that fit into memory, for steps in which not all do."""

    async def train_step(self, batch: TrainingBatch, progress: Callable[[], None]) -> StepReport:
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
            if (trained.tokens_per_microbatch or 64) > self.room.get(trained.step, 64):
                raise FullGpu("the GPU's memory is full; torch's peak: 70.1 GB", location="trainer-1")
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
    """A trainer with these ranks. This object is also its buffer."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.read: list[int] = []
        self.trained: list[int] = []
        self.notes = Notes()
        self.recorded_tokens: dict[int, int] = {}
        here: Any = self
        self.trainer = ResilientTrainer(
            here.ranks,
            buffer=here,
            run=here,
            budget=self.notes.budget(100),
            microbatch_tokens=64,
            repeated=self._repeated,
        )
        self.trainer.step = len(ranks.weights)

    def newest(self, step: int) -> Checkpoint | None:
        newest = max((saved for saved in self.ranks.checkpoints if saved <= step), default=0)
        return Checkpoint(Path(str(newest)), newest) if newest else None

    async def at(self, step: int, method: str, go_back: str = "") -> Any:
        """Call a method of the ranks when they have trained this many steps."""
        return await self.trainer.at_step(step, lambda: self.ranks.call(method), go_back)

    @property
    def losses(self) -> list[str]:
        return [cause for _, _, cause in self.notes]

    async def batch(self, step: int) -> TrainingBatch:
        self.read.append(step)
        return replace(batch(step), tokens_per_microbatch=self.recorded_tokens.get(step))

    async def reduce_microbatches(self, step: int, tokens: int) -> None:
        self.recorded_tokens[step] = tokens

    def _repeated(self, again: TrainingBatch, report: StepReport) -> None:
        assert report.metrics == {"step": again.step}
        self.trained.append(again.step)


@pytest.fixture(autouse=True)
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the harness's checkpoints instead of the run folder's."""
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


async def test_an_error_that_is_not_a_death_is_raised() -> None:
    harness = Harness(Ranks())

    async def work() -> None:
        raise RunError("the loss is not finite")

    with pytest.raises(RunError, match="not finite"):
        await harness.trainer.at_step(2, work)
    assert harness.losses == []
    await harness.trainer.train(batch(2))


async def test_weights_of_a_step_that_was_cancelled_are_not_used() -> None:
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
    assert not harness.trainer.ready
    catching_up.cancel()
    await asyncio.wait([catching_up])
    assert (harness.trainer.step, harness.trainer.ready) == (1, False), "the ranks are still training"
    harness.ranks.call = call  # type: ignore[method-assign]
    await harness.ranks.call("train_step", batch(1))
    await harness.at(2, "look")
    assert harness.ranks.weights == (0, 1), "from the checkpoint, and not twice"
    assert (harness.trainer.step, harness.trainer.ready) == (2, True)


async def test_guard_finds_the_death_of_an_idle_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.orchestrator.trainer_recovery.GUARD_S", 0.0)
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


async def test_work_at_an_earlier_step_is_refused_or_returns_to_a_checkpoint_before_it() -> None:
    harness = Harness(Ranks(weights=(0, 1, 2, 3)))
    harness.ranks.checkpoints = {1: (0,), 4: (0, 1, 2, 3)}
    with pytest.raises(StepPassed, match="the weights are at step 4, past step 2"):
        await harness.at(2, "save")
    assert (harness.losses, 2 in harness.ranks.checkpoints) == ([], False)
    await harness.at(2, "save", go_back="every host has lost them")
    assert (harness.losses, harness.ranks.checkpoints[2]) == (["every host has lost them"], (0, 1))
    await harness.trainer.catch_up(1)
    assert harness.trainer.step == 2, "catching up never goes back"


async def test_one_piece_of_work_at_a_time() -> None:
    harness = Harness(Ranks())
    active = 0

    async def work() -> None:
        nonlocal active
        active += 1
        await asyncio.sleep(0)
        assert active == 1
        active -= 1

    await asyncio.gather(*(harness.trainer.at_step(2, work) for _ in range(5)))
    assert harness.ranks.weights == (0, 1)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_weights_follow_from_the_batches_in_order_whichever_call_dies(data: st.DataObject) -> None:
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
        await harness.trainer.at_step(behind, lambda: ranks.call("look"))
        for step in range(behind, behind + data.draw(st.integers(1, 5))):
            await harness.trainer.train(batch(step))
            assert ranks.weights == tuple(range(step + 1))
            if data.draw(st.booleans()):
                await harness.at(step + 1, "save")
                assert ranks.checkpoints[step + 1] == tuple(range(step + 1))
        assert ranks.checkpoints.items() >= saved.items()

    run(check())


async def test_a_batch_that_the_journal_lacks_ends_the_run_with_a_remedy() -> None:
    async def no_batch(step: int) -> TrainingBatch:
        raise LookupError(f"step {step} has no batch")

    harness = Harness(Ranks())
    harness.trainer.buffer = cast("Buffer", SimpleNamespace(batch=no_batch))
    harness.trainer.run = cast("RunDirectory", SimpleNamespace(argument="sums"))
    with pytest.raises(RunError, match="step 1 cannot be trained again: step 0 has no batch") as raised:
        await harness.trainer.catch_up(2)
    assert "--without-journal" in (raised.value.hint or "")


async def test_full_gpu_halves_micro_batches_of_that_batch_and_the_next_process_knows() -> None:
    harness = Harness(ranks := Ranks())
    ranks.room = {1: 16}
    for step in range(3):
        await harness.trainer.train(batch(step))
    assert ranks.weights == (0, 1, 2) and harness.recorded_tokens == {1: 16}
    first_cause, second_cause = harness.losses
    assert "70.1 GB; step 2 is trained with 32 tokens" in first_cause and "with 16 tokens" in second_cause
    next_process = Harness(Ranks())
    next_process.ranks.room, next_process.recorded_tokens = ranks.room, harness.recorded_tokens
    await next_process.trainer.catch_up(3)
    assert next_process.ranks.weights == (0, 1, 2) and not next_process.losses


async def test_full_gpu_with_single_rows_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingBatch, "longest_row", 40)
    harness = Harness(ranks := Ranks())
    ranks.room = {0: 0}
    with pytest.raises(FullGpu, match=r"70\.1 GB"):
        await harness.trainer.train(batch(0))
    assert harness.recorded_tokens == {0: 32}, "it is halved while there can be fewer rows"
