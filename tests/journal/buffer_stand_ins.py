"""Made-up prompts, rollouts and settings for the buffer, the journal and the durable ledger."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.ledger import Ledger
from asyncrl_cli.journal.progress import newest_serial
from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import open_for_reading
from asyncrl_cli.records.generation import Rollout, Segment, training_rollout_id
from asyncrl_cli.records.groups import BufferSettings, Candidate, Group, OnStale, Outcome, PublishRecord
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import Scored
from asyncrl_cli.records.training import TrainingBatch

PROMPT_IDS = (7, 2**31 - 1)

SETTINGS = BufferSettings(
    groups_per_step=2,
    publish_every=1,
    max_staleness=1,
    on_stale="wait",
    total_steps=1000,
    group_size=2,
    reject_uniform=True,
)


def made_ledger(
    groups_per_step: int = 1,
    publish_every: int = 1,
    max_staleness: int = 0,
    on_stale: OnStale = "wait",
    total_steps: int | None = None,
    ahead: int | None = None,
) -> Ledger:
    """A ledger with these settings; the default ``total_steps`` is enough for every test."""
    steps = 10**9 if total_steps is None else total_steps
    return Ledger(BufferSettings(groups_per_step, publish_every, max_staleness, on_stale, steps, 1, False, ahead=ahead))


def candidates(first: int, count: int) -> list[Candidate]:
    """The prompts of ``count`` serials from ``first`` on."""
    return [
        Candidate(serial, Prompt(f"p{serial}", f"text {serial}"), PROMPT_IDS, {"epoch": 0, "position": serial})
        for serial in range(first, first + count)
    ]


def rollout(rollout_id: str, versions: Sequence[int] = (0, 0), seed: int = 0) -> Rollout:
    """A finished rollout with one token per version. Its log-probs have random bits, so some of them are NaN."""
    bits = np.random.default_rng([seed, zlib.crc32(rollout_id.encode())])
    return Rollout(
        rollout_id=rollout_id,
        prompt_ids=PROMPT_IDS,
        ids=bits.integers(-(2**31), 2**31, len(versions)).astype(np.int32),
        logprobs=bits.integers(0, 2**32, len(versions), np.uint32).view(np.float32),
        versions=np.array(versions, np.int32),
        text="",
        finish_reason="stop" if len(versions) % 2 else "length",
    )


def part(of: Rollout, start: int, end: int | None = None) -> Rollout:
    """Some of a rollout's tokens."""
    where = slice(start, end)
    return replace(of, ids=of.ids[where], logprobs=of.logprobs[where], versions=of.versions[where])


def pieces(of: Rollout, start: int = 0, end: int | None = None) -> list[Segment]:
    """Some of a rollout's tokens, split where the version changes, as an engine delivers them."""
    return of.slice(start, end).segments(of.rollout_id, start)


def extended(of: Rollout, more: Rollout) -> Rollout:
    """A rollout with another rollout's tokens appended."""
    return replace(
        of,
        ids=np.concatenate([of.ids, more.ids]),
        logprobs=np.concatenate([of.logprobs, more.logprobs]),
        versions=np.concatenate([of.versions, more.versions]),
    )


def episode(sequences: Iterable[Rollout]) -> Rollout:
    """A rollout with these sequences. Branches get the first one's finish reason, because theirs is not recorded."""
    root, *branches = sequences
    return replace(root, branches=tuple(replace(branch, finish_reason=root.finish_reason) for branch in branches))


def joined(rollout_id: str, segments: Iterable[Segment]) -> Rollout:
    so_far = rollout(rollout_id, ())
    for segment in segments:
        assert segment.rollout_id == rollout_id
        assert segment.start == len(so_far.ids), "a gap or an overlap"
        versions = np.full(len(segment.ids), segment.version, np.int32)
        more = replace(so_far, ids=segment.ids, logprobs=segment.logprobs, versions=versions)
        so_far = extended(so_far, more)
    return so_far


def tokens(of: Rollout) -> tuple[str, Any, ...]:
    """A rollout's id and the bits of its arrays, to be compared."""
    return (of.rollout_id, *((array.dtype.str, array.tobytes()) for array in (of.ids, of.logprobs, of.versions)))


def contents(of: Rollout) -> tuple[Any, ...]:
    """All data of a rollout as bits, to be compared."""
    return (*tokens(of), of.prompt_ids, of.finish_reason, tuple(map(contents, of.branches)))


def content(batch: TrainingBatch) -> tuple[Any, ...]:
    """All data of a batch as bits, to be compared."""
    groups = tuple(
        (
            group.group_id,
            group.uid,
            group.version,
            tuple(map(contents, group.rollouts)),
            group.rewards,
            group.metrics,
            group.earlier,
        )
        for group in batch.groups
    )
    return (batch.step, batch.version, groups)


def publish_record(version: int, step: int) -> PublishRecord:
    return PublishRecord(version, step, f"checksum {version}", 0.0, 0.0, 0.0, 0.0)


def group_rollouts(group_id: int, versions: Sequence[int] = (0, 0)) -> list[Rollout]:
    return [rollout(training_rollout_id(group_id, index), versions) for index in range(SETTINGS.group_size)]


def group_outcomes(group_id: int) -> list[Outcome]:
    """Different rewards, which keep the group from being rejected."""
    return [Outcome(training_rollout_id(group_id, index), Scored(float(index))) for index in range(SETTINGS.group_size)]


def opened(path: Path, settings: BufferSettings = SETTINGS, kind: str = "train") -> DurableLedger:
    """A ledger that has begun to write its journal."""
    book = DurableLedger.begin(path, settings, kind, "")
    book.opening()
    return book


def fill(book: DurableLedger) -> tuple[Group, ...]:
    """Admit the next prompts until there is no more room."""
    return book.admit(candidates(book.journal.read(newest_serial) + 1, book.ledger.room()))


def commit(book: DurableLedger) -> None:
    book.journal.commit(book.journal.noted())


def finish(book: DurableLedger, *group_ids: int) -> None:
    """Record and score all rollouts of groups, with tokens of the groups' versions."""
    for group_id in group_ids:
        book.record(group_rollouts(group_id, [book.ledger.entry(group_id).version] * 2))
        assert book.score(group_outcomes(group_id)).finished == (group_id,)


def prune(book: DurableLedger, before_step: int) -> int:
    """Prune until nothing is left to prune. Returns the number of commits."""
    commits = 1
    while book.journal.prune(before_step):
        commits += 1
    return commits


def batch_in(path: Path, step: int, earlier: bool = False) -> TrainingBatch:
    """Read a batch through a read-only connection."""
    with closing(open_for_reading(path)) as connection:
        return read_batch(connection, step, earlier)


def rows_in(path: Path, table: str) -> int:
    with closing(open_for_reading(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def one_step(book: DurableLedger) -> None:
    """Train the next two groups, and publish the version after them; more groups are running."""
    step = book.ledger.step
    fill(book)
    finish(book, *book.ledger.running[:2])
    assert book.take(step) is None
    book.publish(publish_record(step + 1, step + 1))
    commit(book)
