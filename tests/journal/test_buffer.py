"""The buffer's calls: many calls share a commit, and each returns after its commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from buffer_stand_ins import (
    SETTINGS,
    candidates,
    content,
    contents,
    group_outcomes,
    group_rollouts,
    pieces,
    publish_record,
    rollout,
)

from asyncrl_cli.journal import buffer as subject
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.file import Statement
from asyncrl_cli.journal.schema import FILE, JournalError
from asyncrl_cli.records.groups import BufferSettings, Opening, Outcome, StepRecord, TakenBatch, Waiting
from asyncrl_cli.records.rewards import RewardFailure

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
"""A test counts as hung after this many seconds."""
NEVER_S = 1e6


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No commit is delayed."""
    monkeypatch.setattr(subject, "LAZY_S", 0.0)


async def opened(folder: Path, settings: BufferSettings = SETTINGS, kind: str = "train") -> Buffer:
    return (await Buffer.open(folder / FILE, settings, kind, limit_s=LIMIT_S))[0]


def opening_of(folder: Path, settings: BufferSettings = SETTINGS) -> Opening:
    """Read the journal as another process would."""
    return DurableLedger(folder / FILE, settings).opening()


async def started(*calls: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Return when all calls have begun and are waiting."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


class Gate:
    """Stops each of the journal's commits until the test lets it continue or fail."""

    def __init__(self, buffer: Buffer) -> None:
        self.commits: list[Sequence[Statement]] = []
        self._commit = buffer._book.journal.commit
        self._begun, self._through = threading.Semaphore(0), threading.Semaphore(0)
        self._error: Exception | None = None
        buffer._book.journal.commit = self._gated  # type: ignore[method-assign]

    def _gated(self, statements: Sequence[Statement]) -> None:
        self.commits.append(statements)
        self._begun.release()
        assert self._through.acquire(timeout=LIMIT_S)
        if self._error is not None:
            raise self._error
        self._commit(statements)

    async def begun(self) -> None:
        """Return when the next commit waits at the gate."""
        await asyncio.get_running_loop().run_in_executor(None, self._begun.acquire)

    def release(self, error: Exception | None = None) -> None:
        """Let the commit at the gate continue, or fail."""
        self._error = error
        self._through.release()


# -- cancellation


@pytest.mark.parametrize("turns", range(4))
async def test_take_ends_when_it_is_cancelled_during_a_change(tmp_path: Path, turns: int) -> None:
    """Ctrl-C may cancel the loop at any turn of its event loop, also between a change and the take that it wakes."""
    buffer = await opened(tmp_path)
    (taking,) = await started(buffer.take(0, patience_s=NEVER_S))
    await asyncio.sleep(0)
    await buffer.admit(candidates(1, 1))
    for _ in range(4):  # the take waits again
        await asyncio.sleep(0)
    buffer._changed.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking], timeout=120)
    assert taking.cancelled()


# -- commits in groups

settings_of_50 = replace(SETTINGS, groups_per_step=50)


@pytest.mark.usefixtures("at_once")
async def test_calls_share_commits_and_return_after_their_own(tmp_path: Path) -> None:
    buffer = await opened(tmp_path, settings_of_50)
    await buffer.admit(candidates(1, 100))
    gate = Gate(buffer)
    (first,) = await started(buffer.record(group_rollouts(0), [], []))
    await gate.begun()
    others = await started(*(buffer.record(group_rollouts(group_id), [], []) for group_id in range(1, 50)))
    (failure,) = await started(buffer.failed("engine", "engine-0", "went away"))
    assert not first.done()
    gate.release()
    await first
    found = opening_of(tmp_path, settings_of_50)
    assert [group.group_id for group in found.groups if group.unscored] == [0]
    await gate.begun()
    assert not any(task.done() for task in [*others, failure])
    gate.release()
    await asyncio.gather(*others, failure)
    assert len(gate.commits) == 2
    found = opening_of(tmp_path, settings_of_50)
    assert [group.group_id for group in found.groups if group.unscored] == list(range(50))


async def test_a_commit_without_a_waiting_caller_is_delayed_until_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "LAZY_S", NEVER_S)
    buffer = await opened(tmp_path)
    await buffer.admit(candidates(1, 4))
    gate = Gate(buffer)
    buffer.trained(StepRecord(0, "digest", {}))
    lazy = await started(
        buffer.record(group_rollouts(0), [], []),
        buffer.record([], pieces(rollout("1-0")), []),
        buffer.failed("engine", "engine-0", "went away"),
    )
    assert not gate.commits
    (urgent,) = await started(buffer.fallback(0))
    await gate.begun()
    assert not any(task.done() for task in [*lazy, urgent])
    gate.release()
    await asyncio.gather(*lazy, urgent)
    assert len(gate.commits) == 1


async def test_many_notes_are_committed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "LAZY_S", NEVER_S)
    monkeypatch.setattr(subject, "MANY", 6)
    buffer = await opened(tmp_path)
    await buffer.admit(candidates(1, 4))
    await asyncio.gather(*(buffer.record(group_rollouts(group_id), [], []) for group_id in range(4)))
    assert len(opening_of(tmp_path).groups[3].unscored) == SETTINGS.group_size


@pytest.mark.usefixtures("at_once")
async def test_a_call_without_notes_returns_at_once(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    await with_one_step(buffer)
    gate = Gate(buffer)
    assert (await buffer.batch(0)).step == 0
    assert await buffer.admit([]) == ()
    assert isinstance(await buffer.take(1, 0.0), Waiting)
    await buffer.prune(5)
    assert not gate.commits
    with pytest.raises(LookupError, match="step 1 has no batch"):
        await buffer.batch(1)


@pytest.mark.usefixtures("at_once")
async def test_a_cancelled_caller_does_not_cancel_the_commit(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    await buffer.admit(candidates(1, 4))
    gate = Gate(buffer)
    gone, stays = await started(buffer.record(group_rollouts(0), [], []), buffer.record(group_rollouts(1), [], []))
    await gate.begun()
    gone.cancel()
    gate.release()
    await stays
    assert gone.cancelled()
    assert [len(group.unscored) for group in opening_of(tmp_path).groups] == [2, 2, 0, 0]


# -- a commit that fails


LATER: dict[str, Callable[[Buffer], Coroutine[Any, Any, Any]]] = {
    "admit": lambda buffer: buffer.admit([]),
    "record": lambda buffer: buffer.record([], [], []),
    "take": lambda buffer: buffer.take(1, NEVER_S),
    "batch": lambda buffer: buffer.batch(0),
    "requeue": lambda buffer: buffer.requeue([]),
    "publish": lambda buffer: buffer.publish(publish_record(0, 0)),
    "fallback": lambda buffer: buffer.fallback(0),
    "checkpointed": lambda buffer: buffer.checkpointed(1, "folder", 0.0, 0.0, []),
    "failed": lambda buffer: buffer.failed("engine", "engine-0", "went away"),
    "prune": lambda buffer: buffer.prune(1),
}


@pytest.mark.usefixtures("at_once")
async def test_a_failed_commit_fails_every_later_call(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    await with_one_step(buffer)
    snapshot = buffer._book.ledger.snapshot()
    gate = Gate(buffer)
    running = buffer._book.ledger.running
    (waiting,) = await started(buffer.take(1, NEVER_S))
    first = await started(*(buffer.record([rollout(f"{group_id}-0")], [], []) for group_id in running))
    await gate.begun()
    second = await started(*(buffer.record([rollout(f"{group_id}-1")], [], []) for group_id in running))
    error = JournalError("the journal failed: database or disk is full", location="journal.db", hint="Free space")
    gate.release(error)
    answers = await asyncio.gather(waiting, *first, *second, return_exceptions=True)
    assert all(answer is error for answer in answers)
    for name, call in LATER.items():
        (answer,) = await asyncio.gather(call(buffer), return_exceptions=True)
        assert answer is error, name
    assert len(gate.commits) == 1
    assert DurableLedger(tmp_path / FILE, SETTINGS).ledger.snapshot() == snapshot
    assert not any(group.unscored for group in opening_of(tmp_path).groups)


async def test_a_disk_that_is_full_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    await with_one_step(buffer)
    batch = content(await buffer.batch(0))
    connection = buffer._book.journal._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    big = rollout(f"{buffer._book.ledger.running[0]}-0", [1] * 100_000)
    for call in (buffer.record([big], [], []), buffer.admit(candidates(9, 1)), buffer.batch(0)):
        with pytest.raises(JournalError, match="disk is full"):
            await call
    again = await opened(tmp_path, kind="resume")
    assert content(await again.batch(0)) == batch
    await again.record([big], [], [])
    assert contents(opening_of(tmp_path).groups[0].unscored[0]) == contents(big)


# -- batches


async def with_one_step(buffer: Buffer) -> None:
    """The first two groups are taken, and version 1 is published."""
    await buffer.admit(candidates(1, 4))
    for group_id in (0, 1):
        await buffer.record(group_rollouts(group_id), [], group_outcomes(group_id))
    assert isinstance(await buffer.take(0, 0.0), TakenBatch)
    await buffer.publish(publish_record(1, 1))


async def test_take_waits_for_a_batch_and_commits_it(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    await buffer.admit(candidates(1, 4))
    (taking,) = await started(buffer.take(0, NEVER_S))
    settled = await buffer.record(group_rollouts(2), [], group_outcomes(2))
    assert settled.finished == (2,)
    assert not taking.done()
    await buffer.record(group_rollouts(0), [], group_outcomes(0))
    taken = await taking
    assert [group.group_id for group in taken.batch.groups] == [0, 2]
    assert [contents(r) for r in taken.batch.groups[1].rollouts] == [contents(r) for r in group_rollouts(2)]
    assert (taken.counts.taken, taken.counts.running) == (2, 2)
    assert opening_of(tmp_path).step == 1
    assert content(await buffer.batch(0)) == content(taken.batch)


@pytest.mark.usefixtures("at_once")
async def test_take_returns_the_reason_when_there_is_no_batch(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    waiting = await buffer.take(0, 0.0)
    assert isinstance(waiting, Waiting)
    assert (waiting.reason, waiting.overdue) == ("only 0 of 2 groups have finished", ())
    await with_one_step(buffer)
    (taking,) = await started(buffer.take(1, NEVER_S))
    await buffer.record([], [], [Outcome("2-0", RewardFailure("the engine refused"))])
    assert not taking.done()
    await buffer.admit(candidates(5, 3))
    for group_id in (3, 4):
        await buffer.record(group_rollouts(group_id), [], group_outcomes(group_id))
    assert isinstance(await taking, TakenBatch)


@pytest.mark.usefixtures("at_once")
async def test_overdue_groups_are_reported_at_once(tmp_path: Path) -> None:
    buffer = await opened(tmp_path, replace(SETTINGS, on_stale="requeue"))
    await with_one_step(buffer)
    await buffer.admit(candidates(5, 2))
    for group_id in (4, 5):
        await buffer.record(group_rollouts(group_id), [], group_outcomes(group_id))
    waiting = await buffer.take(1, NEVER_S)
    assert isinstance(waiting, Waiting)
    assert waiting.overdue == (2, 3)
    (taking,) = await started(buffer.take(1, NEVER_S))
    assert await buffer.requeue([2, 3]) == [(2, 6, 1), (3, 7, 1)]
    assert isinstance(await taking, Waiting | TakenBatch)
    taken = await buffer.take(1, NEVER_S)
    assert isinstance(taken, TakenBatch)
    assert [group.group_id for group in taken.batch.groups] == [4, 5]


# -- a disk that does not answer, and the end


async def test_a_hanging_disk_ends_the_run_in_bounded_time_and_does_not_block_the_loop(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    buffer._disk._limit_s = 0.2  # only now: on a busy machine a good disk takes longer
    gate = Gate(buffer)
    with pytest.raises(JournalError, match="the disk has not answered for 0 s") as caught:
        await buffer.admit(candidates(1, 1))
    assert caught.value.location == str(tmp_path / FILE)
    assert "asyncrl resume" in caught.value.hint
    with pytest.raises(JournalError, match="has not answered"):
        await buffer.failed("engine", "engine-0", "went away")
    gate.release()


async def test_a_closed_journal_is_one_file_and_answers_no_call(tmp_path: Path) -> None:
    buffer = await opened(tmp_path)
    admitting = asyncio.create_task(buffer.admit(candidates(1, 2)))
    await asyncio.sleep(0)
    await buffer.close()
    assert len(await admitting) == 2
    assert [found.name for found in tmp_path.iterdir()] == [FILE]
    assert len(opening_of(tmp_path).groups) == 2
    with pytest.raises(JournalError, match="the journal is closed"):
        await buffer.failed("engine", "engine-0", "went away")


async def test_a_rollout_that_was_handed_out_is_known_to_the_next_driver(tmp_path: Path) -> None:
    """A row without tokens stands for the program that has the rollout."""
    buffer = await opened(tmp_path)
    (group,) = await buffer.admit(candidates(1, 1))
    await buffer.handed_out(f"{group.group_id}-1")
    assert dict(opening_of(tmp_path).groups[0].prefixes) == {1: {}}
    await buffer.record(segments=pieces(rollout(f"{group.group_id}-1")))
    assert list(opening_of(tmp_path).groups[0].prefixes[1]) == [0], "its tokens follow"
    assert await buffer.outcome(f"{group.group_id}-1") == ("running", "", None)
    await buffer.record(group_rollouts(group.group_id), outcomes=group_outcomes(group.group_id))
    state, _, score = await buffer.outcome(f"{group.group_id}-1") or ("", "", None)
    assert state == "finished"
    assert score == group_outcomes(group.group_id)[1].score
    assert await buffer.outcome("99-0") is None
    await buffer.close()
