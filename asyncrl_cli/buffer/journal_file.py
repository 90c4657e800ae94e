"""The journal's file for its only writer: commits, pruning, and reading back.

Invariant: only the process of the newest row of ``starts`` writes. Each transaction checks that this row is still the
one that the process has read or written, so a buffer that was replaced cannot write any more (decision 0024).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncrl_cli.journal.progress import OUTSTANDING
from asyncrl_cli.journal.rollout_rows import read_batch, row_crc
from asyncrl_cli.journal.schema import JournalError, explained, open_for_reading, open_for_writing, sound
from asyncrl_cli.records.training import TrainingBatch

P = ParamSpec("P")
T = TypeVar("T")

Statement = tuple[str, tuple[Any, ...]]

PRUNED_AT_ONCE = 64
"""Largest number of groups whose tokens one commit may drop, so that pruning never delays an answer for long."""


class JournalFile:
    """The open file of one run's journal. One process writes, through one thread at a time."""

    def __init__(self, path: Path, to_write: bool = True) -> None:
        """Open or create it; or only read it, which changes nothing on disk. Raises ``JournalError``."""
        self._path = path
        self._connection = open_for_writing(path) if to_write else open_for_reading(path)
        self._connection.create_function("row_crc", -1, row_crc, deterministic=True)
        self._start = self._newest_start()

    def commit(self, statements: Sequence[Statement]) -> None:
        """Write all of these or none; they are on disk when this returns. Raises ``JournalError``."""
        with self.transaction():
            self.write(statements)

    def write(self, statements: Sequence[Statement]) -> None:
        """Write these in the present ``transaction``."""
        for sql, alike in groupby(statements, key=lambda statement: statement[0]):
            self._connection.executemany(sql, (parameters for _, parameters in alike))

    def close(self) -> None:
        """Close the file; what is noted and not committed is lost."""
        self._connection.close()

    def needed_from(self, checkpoints: int, on_disk: Collection[int]) -> int:
        """The first step whose tokens are needed by the newest ``checkpoints`` checkpoints or any one ``on_disk``; 0 if
        all tokens are needed."""
        recorded = {step for (step,) in self._rows("SELECT step FROM checkpoints")}
        newest = sorted(recorded.union(on_disk))[-checkpoints:]
        return min([*newest, *on_disk]) if len(newest) == checkpoints else 0

    def prune(self, before_step: int) -> bool:
        """Drop the tokens of some groups trained before a step, or rejected before it; False when none is left."""
        with self.transaction():
            # Without the plus sign SQLite would search the table for the lowest id, from the run's first group on.
            (needed,) = self._row(
                f"""
                SELECT min(id) FROM (
                    SELECT min(+id) AS id FROM groups WHERE step >= ?
                    UNION ALL SELECT min(+id) FROM groups WHERE {OUTSTANDING}
                )
                """,
                before_step,
            )
            dropped = self._rows(
                "SELECT DISTINCT group_id FROM segments WHERE group_id < ? ORDER BY group_id LIMIT ?",
                needed or 0,
                PRUNED_AT_ONCE,
            )
            for table in ("segments", "experts"):
                self._connection.executemany(f"DELETE FROM {table} WHERE group_id = ?", dropped)
            if dropped:  # without the mark, tokens that are missing because of damage would look like dropped ones
                self._connection.execute(
                    "UPDATE meta SET value = max(CAST(value AS INTEGER), ?) WHERE key = 'pruned_to'",
                    (max(group_id for (group_id,) in dropped) + 1,),
                )
        return len(dropped) == PRUNED_AT_ONCE

    # -- reading back, for the writer's own use

    def read(self, query: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """The result of a query function of ``journal`` on this connection, as of the last commit. Raises
        ``JournalError``."""
        with explained(self._path):
            return query(self._connection, *arguments, **named)

    def batch(self, step: int) -> TrainingBatch:
        """The batch of a step, as it was taken. Raises ``LookupError`` like ``read_batch``, and ``JournalError``."""
        with sound(self._path):
            return self.read(read_batch, step)

    def _newest_start(self) -> int:
        (start,) = self._row("SELECT coalesce(max(id), 0) FROM starts")
        return int(start)

    def _rows(self, sql: str, *parameters: Any) -> list[Any]:
        with explained(self._path):
            return self._connection.execute(sql, parameters).fetchall()

    def _row(self, sql: str, *parameters: Any) -> Any:
        return self._rows(sql, *parameters)[0]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A block whose writes are committed together or not at all. Raises ``JournalError`` when another process has
        begun to write."""
        with explained(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                # The fence, inside the transaction: no other process can begin between check and commit (0024).
                if self._newest_start() != self._start:
                    raise JournalError(
                        "another process writes this journal now, so this one must stop",
                        location=str(self._path),
                        hint="`asyncrl inspect run` shows which process drives the run now",
                    )
                yield
                start = self._newest_start()
                self._connection.execute("COMMIT")
                self._start = start
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
