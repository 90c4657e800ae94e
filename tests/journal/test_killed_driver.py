"""The driver is killed at every commit of a small run: before it, within it, and before its answer.

Each driver is a child process with the real buffer, made-up rollouts, and a trainer that uses digests of batches as
weights. Every answer that a driver gets goes to a log that outlives the driver. After each kill the journal must have
all answers; the next driver completes the run, and the whole journal is audited.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from buffer_stand_ins import SETTINGS, candidates, publish_record, rollout

from asyncrl_cli.journal import buffer as subject
from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.file import JournalFile, Statement
from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import FILE, reading
from asyncrl_cli.orchestrator.metrics import batch_digest
from asyncrl_cli.records.generation import training_rollout_id
from asyncrl_cli.records.groups import Opening, Outcome, StepRecord, TakenBatch
from asyncrl_cli.records.rewards import Scored
from asyncrl_cli.records.training import TrainingBatch
from tests.e2e.faults.audit import audit

pytestmark = pytest.mark.slow

STEPS = 2
TOKENS, HALF = 6, 3
Moment = Literal["before", "within", "after"]
"""When a commit is interrupted: nothing is written, half is written, or everything is durable but not answered."""


class Log:
    """The answers that drivers got, one JSON array per line. A driver writes an answer before it does anything else."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, *answer: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(answer) + "\n")

    def read(self) -> list[list[Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []


class Driver:
    """Drives a run from the journal's end to the run's end."""

    def __init__(self, buffer: Buffer, opening: Opening, log: Log) -> None:
        self._buffer = buffer
        self._opening = opening
        self._log = log
        self._version, self._step, self._serial = opening.version, opening.step, opening.serial
        self._running = {group.group_id: group for group in opening.groups}

    async def run(self) -> None:
        if self._opening.checksum is None:
            await self._publish(self._version)
        for step in range(self._step):  # the trainer has no checkpoint: it trains all batches again
            await self._train(await self._buffer.batch(step))
        while self._version < self._step:
            await self._publish(self._version + 1)
        while self._step < STEPS:
            await self._admit()
            taken = await self._buffer.take(self._step, 0.0)
            if isinstance(taken, TakenBatch):
                self._log.note("taken", self._step, batch_digest(taken.batch))
                self._step += 1
                await self._train(taken.batch)
                await self._publish(self._step)
            else:
                await self._generate(min(self._running))
        await self._buffer.close()

    async def _admit(self) -> None:
        offered = candidates(self._serial + 1, self._buffer.room())
        self._serial += len(offered)
        for admission in await self._buffer.admit(offered):
            self._log.note("admitted", admission.group_id, admission.prompt.uid)
            self._running[admission.group_id] = admission

    async def _generate(self, group_id: int) -> None:
        """Generate a group's missing tokens, and report the first half early."""
        group = self._running.pop(group_id)
        for index in range(SETTINGS.group_size):
            if index in group.scored:
                continue
            name = training_rollout_id(group_id, index)
            ended = group.unscored.get(index)
            if ended is None:
                old = [part.version for part in group.prefixes.get(index, {}).get(0, ()) for _ in part.ids]
                ended = rollout(name, [*old, *[self._version] * (TOKENS - len(old))])
                if not old:
                    await self._buffer.record(segments=ended.slice(0, HALF).segments(name))
                    self._log.note("tokens", name, HALF)
            if index == 0 and index not in group.unscored:  # its reward is slow
                await self._buffer.record([ended])
                self._log.note("tokens", name, TOKENS)
            await self._buffer.record([ended], outcomes=[Outcome(name, Scored(float(index)))])
            self._log.note("scored", name)

    async def _train(self, batch: TrainingBatch) -> None:
        self._log.note("trains", batch.step, batch_digest(batch), [group.group_id for group in batch.groups])
        self._buffer.trained(StepRecord(batch.step, batch_digest(batch), {}))
        await self._buffer.record()  # returns after the commit
        self._log.note("trained", batch.step)

    async def _publish(self, version: int) -> None:
        await self._buffer.publish(publish_record(version, version))
        self._version = version
        self._log.note("published", version)


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a child process. Returns its exit status, negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def drive(folder: Path, at: int = 0, moment: Moment = "before") -> None:
    """Drive the run in ``folder``, and die at a ``moment`` of commit ``at``; the opening's commit is 1."""
    log, write, transaction, count = Log(folder / "log"), JournalFile.write, JournalFile.transaction, 0
    subject.LAZY_S = 0.0

    def written(self: JournalFile, statements: Sequence[Statement]) -> None:
        if count == at and moment == "within":
            write(self, statements[: (len(statements) + 1) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, statements)

    def transacted(self: JournalFile) -> Any:
        nonlocal count
        count += 1
        if count == at and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        return transaction(self)

    def commit(self: JournalFile, statements: Sequence[Statement]) -> None:
        with self.transaction():
            self.write(statements)
        if count == at and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    JournalFile.write, JournalFile.transaction, JournalFile.commit = written, transacted, commit  # type: ignore[method-assign]

    async def run() -> None:
        kind = "resume" if log.read() else "train"
        buffer, opening = await Buffer.open(folder / FILE, SETTINGS, kind, limit_s=60.0)
        if count == at and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        buffer._book.journal._connection.execute("PRAGMA synchronous = OFF")  # a kill is not a power failure
        await Driver(buffer, opening, log).run()
        (folder / "commits").write_text(str(count))

    asyncio.run(run())


def check_answers(connection: sqlite3.Connection, answers: list[list[Any]]) -> None:
    """Check that the journal has every answer that a driver got."""
    rows = {
        f"{group}-{index}": (tokens, reward)
        for group, index, tokens, reward in connection.execute(
            "SELECT group_id, rollout_index, tokens, reward FROM rollouts"
        )
    }
    uids = dict(connection.execute("SELECT id, uid FROM groups"))
    trained = dict(connection.execute("SELECT step, digest FROM batches WHERE trained_at IS NOT NULL"))
    published = {version for (version,) in connection.execute("SELECT version FROM publishes")}
    for what, key, *more in answers:
        if what == "admitted":
            assert uids[key] == more[0]
        elif what == "tokens":
            assert rows[key][0] >= more[0]
        elif what == "scored":
            assert rows[key][0] == TOKENS and rows[key][1] is not None
        elif what in ("taken", "trains"):
            assert batch_digest(read_batch(connection, key)) == more[0], "the batch is the same ever after"
        elif what == "trained":
            assert key in trained
        elif what == "published":
            assert key in published


def check_training(answers: list[list[Any]]) -> None:
    """Check that every driver trains the steps in order, and no group in two steps."""
    trained: dict[int, list[int]] = {}
    for what, step, *more in answers:
        if what == "trains":
            assert step <= len(trained)
            trained.setdefault(step, more[1])
            assert trained[step] == more[1]
    groups = [group for step in trained.values() for group in step]
    assert len(groups) == len(set(groups)) == STEPS * SETTINGS.groups_per_step


def commits_of_a_run(folder: Path) -> int:
    folder.mkdir()
    assert in_child(partial(drive, folder)) == 0
    return int((folder / "commits").read_text())


def kill_at_every_commit(folder: Path) -> None:
    commits = commits_of_a_run(folder / "undisturbed")
    assert commits > 15
    for moment, at in product(get_args(Moment), range(1, commits + 1)):
        own = folder / f"{moment}-{at}"
        own.mkdir()
        log = Log(own / "log")
        assert in_child(partial(drive, own, at, moment)) == -signal.SIGKILL, own.name
        if log.read():
            with reading(own / FILE) as connection:
                check_answers(connection, log.read())
        assert in_child(partial(drive, own)) == 0, own.name
        with reading(own / FILE) as connection:
            check_answers(connection, log.read())
            found = audit(connection, STEPS, lambda serial: f"p{serial}").violations
        assert [one for one in found if "groups are still" not in one] == [], own.name
        check_training(log.read())


def test_a_driver_killed_at_any_commit_loses_nothing_and_trains_nothing_twice(tmp_path: Path) -> None:
    """In a separate process: a fork of this one, which has imported all libraries, takes longer than a driver's run."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", f"from test_killed_driver import *; kill_at_every_commit(Path({str(tmp_path)!r}))"],
        env=os.environ | {"PYTHONPATH": f"{folder.parents[1]}:{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
