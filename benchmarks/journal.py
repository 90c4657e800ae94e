"""Finished rollouts per second that the buffer makes durable, and the time of `inspect` on a large journal.

    python benchmarks/journal.py [--rollouts N] [--tokens N] [--per-call N] [--folder DIR]
    python benchmarks/journal.py --inspect [--rollouts N] [--folder DIR]

The first form calls ``Buffer.record``: a call counts when it is answered, that is, when its rollouts are on disk.

The second form builds a journal of a million rollouts, keeps a writer's connection to it open, and measures the time of
``asyncrl inspect``, including the start of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import subprocess
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import ASYNCRL, header, row

from asyncrl_cli.journal.buffer import Buffer
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.rollout_rows import LOGPROBS, TOKENS
from asyncrl_cli.journal.schema import FILE, open_for_reading, open_for_writing
from asyncrl_cli.records.generation import Rollout, training_rollout_id
from asyncrl_cli.records.groups import BufferSettings, Candidate, PublishRecord, StepRecord
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.runs.directory import RunDirectory

GROUP_SIZE = 8
IN_FLIGHT = (1, 4, 16)
"""Numbers of simultaneous calls."""
LOOKS = ("--help", "inspect buffer", "inspect buffer --json", "inspect buffer --group 9", "inspect run")
"""Commands of `asyncrl` about the long history; the first one measures only the start of the process."""
LIMIT_S = 600.0

Send = Callable[[list[Rollout]], Awaitable[Any]]


def settings(groups_per_step: int, steps: int) -> BufferSettings:
    return BufferSettings(
        groups_per_step=groups_per_step,
        publish_every=1,
        max_staleness=1,
        on_stale="wait",
        total_steps=steps,
        group_size=GROUP_SIZE,
        reject_uniform=False,
    )


def candidates(count: int) -> list[Candidate]:
    return [
        Candidate(i, Prompt(f"p{i}", "2 + 2 = ?"), (1, 2, 3), {"epoch": 0, "position": i}) for i in range(1, count + 1)
    ]


# -- writing


def calls_of(groups: range, tokens: int, per_call: int) -> list[list[Rollout]]:
    """The rollouts of some groups, ``per_call`` per call. They share arrays, which saves memory only here."""
    bits = np.random.default_rng(0)
    one = Rollout(
        rollout_id="",
        prompt_ids=(1, 2, 3),
        ids=bits.integers(0, 150_000, tokens).astype(np.int32),
        logprobs=bits.normal(-1.0, 1.0, tokens).astype(np.float32),
        versions=np.zeros(tokens, np.int32),
        text="",
        finish_reason="stop",
    )
    names = [training_rollout_id(group_id, index) for group_id in groups for index in range(GROUP_SIZE)]
    rollouts = [replace(one, rollout_id=name) for name in names]
    return [rollouts[start : start + per_call] for start in range(0, len(rollouts), per_call)]


async def flood(send: Send, calls: list[list[Rollout]], in_flight: int) -> list[float]:
    """Make all calls, ``in_flight`` at a time; returns the seconds of each."""
    slots = asyncio.Semaphore(in_flight)

    async def timed(call: list[Rollout]) -> float:
        async with slots:
            started = time.perf_counter()
            await send(call)
            return time.perf_counter() - started

    return await asyncio.gather(*map(timed, calls))


def calls_row(in_flight: int, calls: list[list[Rollout]], seconds: float, latencies: list[float]) -> str:
    rollouts = sum(map(len, calls))
    size = sum(rollout.ids.nbytes + rollout.logprobs.nbytes for call in calls for rollout in call)
    half, most = np.percentile(latencies, (50, 99)) * 1e3
    figures = (f"{rollouts / seconds:,.0f}", f"{size / seconds / 1e6:.1f}", f"{half:.0f}", f"{most:.0f}")
    return row(str(in_flight), *figures)


async def journal_rows(folder: Path, rollouts: int, tokens: int, per_call: int) -> list[str]:
    """Rows for the buffer, with several numbers of calls in flight."""
    per_round = rollouts // GROUP_SIZE
    groups = per_round * len(IN_FLIGHT)
    path = folder / FILE
    buffer, _ = await Buffer.open(path, settings(groups, 1), "train", limit_s=LIMIT_S)
    await buffer.admit(candidates(groups))
    rows = []
    for turn, in_flight in enumerate(IN_FLIGHT):
        calls = calls_of(range(turn * per_round, (turn + 1) * per_round), tokens, per_call)
        started = time.perf_counter()
        latencies = await flood(buffer.record, calls, in_flight)
        rows.append(calls_row(in_flight, calls, time.perf_counter() - started, latencies))
    await buffer.close()
    with closing(open_for_reading(path)) as connection:
        (found,) = connection.execute("SELECT count(*) FROM rollouts WHERE finish_reason IS NOT NULL").fetchone()
    assert found == groups * GROUP_SIZE, f"{found} rollouts in the journal"
    return rows


def disk_row(folder: Path) -> str:
    """The time of this disk's fsync, which is a lower bound for a commit."""
    seconds = []
    with (folder / "fsync").open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(bytes(16384))
            started = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - started)
    half, most = np.percentile(seconds, (50, 99)) * 1e3
    return f"fsync of 16 KiB on this disk: {half:.1f} ms, p99 {most:.1f} ms"


def write(folder: Path, rollouts: int, tokens: int, per_call: int) -> None:
    """Print the table of the first form."""
    print(f"{rollouts:,} rollouts of {tokens:,} tokens, {per_call} to a call; {disk_row(folder)}\n")
    print(header("calls in flight", "rollouts/s", "MB/s", "p50 ms", "p99 ms"))
    for line in asyncio.run(journal_rows(folder, rollouts, tokens, per_call)):
        print(line, flush=True)


# -- reading


class Group(NamedTuple):
    group_id: int
    state: str
    reason: str
    step: int | None
    version: int


def history(groups: int, per_step: int) -> list[Group]:
    """The state of each group: one in fifty is rejected, the newest are running, the others are taken in batches."""
    made, taken, steps = [], 0, (groups - groups // 50) // per_step - 2
    for group_id in range(groups):
        version = taken // per_step
        if group_id % 50 == 7:
            made.append(Group(group_id, "rejected", "uniform", None, version))
        elif taken < steps * per_step:
            made.append(Group(group_id, "taken", "", version, max(version - group_id % 2, 0)))
            taken += 1
        else:
            made.append(Group(group_id, "finished" if groups - group_id > per_step else "running", "", None, steps))
    return made


def build(path: Path, groups: int, per_step: int) -> sqlite3.Connection:
    """Build a journal with this many groups; returns the writer's connection."""
    made, now = history(groups, per_step), time.time()
    steps = sum(group.state == "taken" for group in made) // per_step
    book = DurableLedger(path, settings(per_step, 2 * steps))
    book.start("train", "")
    for step in range(steps):
        metrics = {"tokens/trained": 8.0 * GROUP_SIZE * per_step, "time/step_s": 1.0, "reward/mean": 0.5}
        book.journal.trained(StepRecord(step, f"{step:064x}", metrics))
        book.journal.published(PublishRecord(step + 1, step + 1, f"{step:064x}", 0.1, 0.1, 0.0, 0.0))
    noted = book.journal.noted()
    book.journal.close()

    bits = np.random.default_rng(0)
    tokens = bits.integers(0, 150_000, 8).astype(TOKENS).tobytes()
    logprobs = bits.normal(-1.0, 1.0, 8).astype(LOGPROBS).tobytes()
    crc = zlib.crc32(logprobs, zlib.crc32(tokens))
    connection = open_for_writing(path)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO batches (step, version, late, taken_at) VALUES (?1, ?1, 0, ?2)",
        ((step, now) for step in range(steps)),
    )
    connection.executemany(
        """
        INSERT INTO groups (id, state, reason, step, version, admitted_at, ended_at,
                            uid, prompt, fields, prompt_ids, serial, epoch, position)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 'p' || ?1, '"2 + 2 = ?"', '{}', x'01000000', ?1 + 1, 0, ?1 + 1)
        """,
        ((*group, now, None if group.state == "running" else now) for group in made),
    )
    connection.executemany(
        "INSERT INTO rollouts (group_id, rollout_index, tokens, finish_reason, reward, oldest, newest, recorded_at) "
        "VALUES (?, ?, 8, ?, ?, ?, ?, ?)",
        (
            (group.group_id, index, *ended, group.version, group.version, now)
            for group in made
            for index in range(GROUP_SIZE)
            for ended in [(None, None) if group.state == "running" else ("stop", float(index % 2))]
        ),
    )
    connection.executemany(
        "INSERT INTO segments (group_id, rollout_index, branch, start, version, tokens, logprobs, crc) "
        "VALUES (?, ?, 0, 0, ?, ?, ?, ?)",
        (
            (group.group_id, index, group.version, tokens, logprobs, crc)
            for group in made
            for index in range(GROUP_SIZE)
        ),
    )
    for sql, parameters in noted:
        connection.execute(sql, parameters)
    connection.execute("COMMIT")
    return connection


def inspect(folder: Path, rollouts: int, repeats: int = 5) -> None:
    """Print the times of commands on a long history."""
    run = RunDirectory.create(folder, "million")
    run.write_json("manifest.json", {"started": "2026-01-01T00:00:00+00:00", "spec_file": "spec.yaml"})
    run.update(phase="running")
    started = time.perf_counter()
    with closing(build(run.path / FILE, rollouts // GROUP_SIZE, 64)):
        size = sum(file.stat().st_size for file in run.path.glob(f"{FILE}*")) / 1e6
        print(f"{rollouts:,} rollouts, {size:,.0f} MB, built in {time.perf_counter() - started:.0f} s\n")
        print(header("asyncrl", f"median of {repeats}, s", "slowest, s"))
        for words in LOOKS:
            command = [*ASYNCRL, *words.split()]
            if words != "--help":
                command += ["--runs-dir", str(folder)]
            seconds = []
            for _ in range(repeats):
                began = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                seconds.append(time.perf_counter() - began)
            print(row(words, f"{np.median(seconds):.2f}", f"{max(seconds):.2f}"), flush=True)
    run.unlock()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, help="rollouts of each row, or of the journal that is inspected")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each rollout")
    parser.add_argument("--per-call", type=int, default=64, help="rollouts of each call")
    parser.add_argument("--folder", type=Path, help="the folder of the journal: its disk is measured")
    parser.add_argument("--inspect", action="store_true", help="measure commands on a long history instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.folder) as folder:
        if arguments.inspect:
            inspect(Path(folder), arguments.rollouts or 1_000_000)
        else:
            write(Path(folder), arguments.rollouts or 20_480, arguments.tokens, arguments.per_call)


if __name__ == "__main__":
    main()
