"""Snapshots of a run's journal during the run, to be compared with its later content.

A snapshot has everything that is committed at that moment, read through a read-only connection. Every later snapshot
must contain the same and may contain more: a finished rollout does not change, an unfinished one is only continued, a
batch keeps its groups. ``Evidence.contradictions`` lists every violation of this.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from asyncrl_cli.journal.schema import JournalError, open_for_reading
from asyncrl_cli.records.generation import CONTEXT

Place = tuple[int, int]
"""A rollout: its group, and its index in it."""


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """What is recorded of one rollout: raw bytes of tokens and log-probs, and the version of each token.

    ``finish_reason`` is None while it is unfinished, ``reward`` before it has one.
    """

    finish_reason: str | None
    reward: float | None
    tokens: bytes
    logprobs: bytes
    versions: tuple[int, ...]

    def became(self, later: RecordedRollout) -> bool:
        """Whether ``later`` can be a later state of the same rollout."""
        goes_on = (
            later.tokens.startswith(self.tokens)
            and later.logprobs.startswith(self.logprobs)
            and later.versions[: len(self.versions)] == self.versions
        )
        if self.finish_reason is not None:
            goes_on &= (self.finish_reason, len(self.versions)) == (later.finish_reason, len(later.versions))
        return goes_on and self.reward in (None, later.reward)

    def __str__(self) -> str:
        return f"{self.finish_reason or 'unfinished'}, {len(self.versions)} tokens, reward {self.reward}"


@dataclass(slots=True)
class Snapshot:
    """Everything committed at one moment: rollouts by id, batches (their groups) and digests by step, groups."""

    rollouts: dict[Place, RecordedRollout] = field(default_factory=dict)
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    checksums: dict[int, str] = field(default_factory=dict)
    uids: dict[int, str] = field(default_factory=dict)

    @property
    def finished(self) -> int:
        return sum(rollout.finish_reason is not None for rollout in self.rollouts.values())

    @property
    def prefixes(self) -> int:
        """Unfinished rollouts of which tokens are recorded."""
        return sum(rollout.finish_reason is None and bool(rollout.tokens) for rollout in self.rollouts.values())


@dataclass(slots=True)
class Evidence:
    """All snapshots of one run. ``prefixes_seen`` is the sum of the unfinished rollouts in each of them."""

    seen: Snapshot = field(default_factory=Snapshot)
    snapshots: int = 0
    prefixes_seen: int = 0
    contradictions: list[str] = field(default_factory=list)

    def take_snapshot(self, journal: Path) -> None:
        """Read the present journal, if there is one yet."""
        try:
            connection = open_for_reading(journal)
        except JournalError:
            if self.snapshots:
                raise
            return  # the run has only just begun
        with closing(connection):
            self.add(read_snapshot(connection))

    def add(self, now: Snapshot) -> None:
        """Compare a snapshot with the one before."""
        self.snapshots += 1
        self.prefixes_seen += now.prefixes
        for index, rollout in self.seen.rollouts.items():
            later = now.rollouts.get(index)
            if later is None:
                self.contradictions.append(f"rollout {index} is lost ({rollout})")
            elif not rollout.became(later):
                self.contradictions.append(f"rollout {index} was {rollout}, and is {later}, or has other tokens")
        for what in ("batches", "digests", "checksums", "uids"):
            before, after = getattr(self.seen, what), getattr(now, what)
            self.contradictions += _changes(what, before, after)
        self.seen = now


def read_snapshot(connection: sqlite3.Connection) -> Snapshot:
    """Read everything in one transaction."""
    connection.execute("BEGIN")
    try:
        return Snapshot(
            rollouts=_rollouts(connection),
            batches=_batches(connection),
            digests=dict(connection.execute("SELECT step, digest FROM batches WHERE trained_at IS NOT NULL")),
            checksums=dict(connection.execute("SELECT version, checksum FROM publishes")),
            uids=dict(connection.execute("SELECT id, uid FROM groups")),
        )
    finally:
        connection.rollback()


def _rollouts(connection: sqlite3.Connection) -> dict[Place, RecordedRollout]:
    rows = connection.execute(
        "SELECT r.group_id, r.rollout_index, r.finish_reason, r.reward, s.version, s.tokens, s.logprobs "
        "FROM rollouts r "
        "LEFT JOIN segments s ON s.group_id = r.group_id AND s.rollout_index = r.rollout_index "
        "ORDER BY r.group_id, r.rollout_index, s.branch, s.start"
    )
    found = {}
    for index, parts in groupby(rows, key=lambda row: (row[0], row[1])):
        cut = list(parts)
        segments = [row[4:] for row in cut if row[4] is not None]
        # The input of a turn without a reply goes if its program leaves.
        while cut[0][2] is None and segments and segments[-1][0] == CONTEXT:
            segments.pop()
        found[index] = RecordedRollout(
            finish_reason=cut[0][2],
            reward=cut[0][3],
            tokens=b"".join(tokens for _, tokens, _ in segments),
            logprobs=b"".join(logprobs for _, _, logprobs in segments),
            versions=tuple(version for version, tokens, _ in segments for _ in range(len(tokens) // 4)),
        )
    return found


def _batches(connection: sqlite3.Connection) -> dict[int, tuple[int, ...]]:
    rows = connection.execute("SELECT step, id FROM groups WHERE step IS NOT NULL ORDER BY step, id")
    return {step: tuple(group_id for _, group_id in of_step) for step, of_step in groupby(rows, lambda row: row[0])}


def _changes(what: str, before: Mapping[int, Any], after: Mapping[int, Any]) -> list[str]:
    return [
        f"{what}: that of {key} was {value}, and is {after.get(key)}"
        for key, value in before.items()
        if after.get(key) != value
    ]
