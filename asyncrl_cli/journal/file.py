"""The journal's file as its only writer sees it: commits, pruning, and reading back.

Invariant: only the newest process in ``starts`` writes. Each transaction checks that no other process has added a row
there, so a buffer that was replaced cannot write any more (decision 0013).

Invariant: a commit succeeds only if the open files are still at the journal's path, and no other process has truncated
them. Without this check, writes to a deleted file would succeed, and be lost when the process ends (decision 0013).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncrl_cli.journal.progress import ACCEPTED, OUTSTANDING
from asyncrl_cli.journal.rollout_rows import read_batch, row_crc
from asyncrl_cli.journal.schema import DAMAGED, FILE, JournalError, explained, open_for_reading, open_for_writing, sound
from asyncrl_cli.records.training import TrainingBatch

P = ParamSpec("P")
T = TypeVar("T")

Statement = tuple[str, tuple[Any, ...]]

FILES = ("", "-wal", "-shm")
"""Suffixes of SQLite's file names."""
PRUNED_AT_ONCE = 64
"""Number of groups pruned in one commit: a longer commit would delay the answers that wait for the next one."""


class JournalFile:
    """The open file of one run's journal. One process writes, through one thread at a time."""

    def __init__(self, path: Path, to_write: bool = True) -> None:
        """Open or create the file, or open it only for reading, which changes nothing on disk. Raises
        ``JournalError``."""
        self._path = path
        self._connection = open_for_writing(path) if to_write else open_for_reading(path)
        self._connection.create_function("row_crc", -1, row_crc, deterministic=True)
        self._start = self._newest_start()
        self._files = self._look() if to_write else {}

    def commit(self, statements: Sequence[Statement]) -> None:
        """Write all statements or none; they are on disk when this returns. Raises ``JournalError``."""
        with self.transaction():
            self.write(statements)

    def write(self, statements: Sequence[Statement]) -> None:
        """Write these statements in the open ``transaction``."""
        for sql, alike in groupby(statements, key=lambda statement: statement[0]):
            self._connection.executemany(sql, (parameters for _, parameters in alike))

    def close(self) -> None:
        """Close the file and drop uncommitted writes. Raises ``JournalError`` if the files are not in place."""
        try:
            self._check_files()
        finally:
            self._connection.close()
            self._files = {}

    def first_needed_step(self, checkpoints: int, on_disk: Collection[int]) -> int:
        """Return the first step with tokens that are still needed, by the newest ``checkpoints`` checkpoints or by any
        checkpoint ``on_disk``. Returns 0 if all tokens are needed."""
        recorded = {step for (step,) in self._rows("SELECT step FROM checkpoints")}
        newest_steps = sorted(recorded.union(on_disk))[-checkpoints:]
        return min([*newest_steps, *on_disk]) if len(newest_steps) == checkpoints else 0

    def prune(self, before_step: int) -> bool:
        """Drop the tokens of some groups trained or rejected before a step. Returns False when none is left."""
        with self.transaction():
            # The plus sign stops SQLite from searching the whole table in id order, from the run's first group on.
            (first_kept_group,) = self._row(
                f"""
                SELECT min(id) FROM (
                    SELECT min(+id) AS id FROM groups WHERE step >= ?
                    UNION ALL SELECT min(+id) FROM groups WHERE {OUTSTANDING}
                )
                """,
                before_step,
            )
            dropped = {
                group
                for table in ("segments", "image_places")
                for group in self._rows(
                    f"SELECT DISTINCT group_id FROM {table} WHERE group_id < ? ORDER BY group_id LIMIT ?",
                    first_kept_group or 0,
                    PRUNED_AT_ONCE,
                )
            }
            images = [
                row
                for group in dropped
                for row in self._rows("SELECT DISTINCT digest FROM image_places WHERE group_id = ?", *group)
            ]
            for table in ("segments", "experts", "image_places"):
                self._connection.executemany(f"DELETE FROM {table} WHERE group_id = ?", dropped)
            self._connection.executemany(
                "DELETE FROM images WHERE digest = ?1 AND NOT EXISTS (SELECT 1 FROM image_places WHERE digest = ?1)",
                images,
            )
            if dropped:  # the mark tells dropped tokens from tokens that are missing because of damage
                self._connection.execute(
                    "UPDATE meta SET value = max(CAST(value AS INTEGER), ?) WHERE key = 'pruned_to'",
                    (max(group_id for (group_id,) in dropped) + 1,),
                )
        return len(dropped) >= PRUNED_AT_ONCE

    # -- reading back, on the writer's connection

    def read(self, query: Callable[Concatenate[Connection, P], T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Run a query function of ``journal`` on this connection; it sees the last commit. Raises ``JournalError``."""
        with explained(self._path):
            return query(self._connection, *arguments, **keywords)

    def batch(self, step: int, earlier: bool = False) -> TrainingBatch:
        """Read a step's batch as it was taken. Raises ``LookupError`` like ``read_batch``, and ``JournalError``."""
        with sound(self._path):
            return self.read(read_batch, step, earlier)

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
        """Commit the writes of this block together or not at all. Raises ``JournalError`` if another process has begun
        to write, or if the files are not in place."""
        self._check_files()
        with explained(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                # Check inside the transaction: otherwise another process could begin to write between this check and
                # the commit (decision 0013).
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
        # Check again before answering: the files may have been deleted between the first check and the commit.
        self._check_files(may_shrink=True)

    # -- the files are in place

    def _look(self) -> dict[str, os.stat_result]:
        stats = {}
        for ending in FILES:
            with suppress(OSError):
                stats[ending] = os.stat(f"{self._path}{ending}")
        return stats

    def _check_files(self, may_shrink: bool = False) -> None:
        """Raise ``JournalError`` if a file was deleted, moved, replaced or truncated. SQLite itself shrinks its files
        only in a commit (``may_shrink``)."""
        files = self._look()
        for ending, was in self._files.items():
            name = f"{self._path.name}{ending}"
            current = files.get(ending)
            if current is None or not os.path.samestat(current, was):
                raise JournalError(
                    f"{name} was deleted, moved or replaced while the run wrote to it",
                    location=str(self._path),
                    hint=self._save("" in files and os.path.samestat(files[""], self._files[""])),
                )
            if current.st_size < was.st_size and ending != "-shm" and not may_shrink:
                raise JournalError(
                    f"{name} was cut from {was.st_size} to {current.st_size} bytes while the run wrote to it",
                    location=str(self._path),
                    hint=DAMAGED,
                )
        if self._files:  # a closed journal watches no files: another connection may own the files at its path
            self._files = files

    def _save(self, main_in_place: bool) -> str:
        """Save everything acknowledged, and close the open files. Returns a hint that says where it is.

        Deleted files exist until they are closed, so SQLite can still copy them. Saves nothing if the folder is gone.
        """
        target = self._path
        copy = target.with_name(f".{target.name}-{os.getpid()}")
        try:
            if main_in_place:  # move the rows of the other files into the main file
                _, rows, moved = self._connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
                if rows != moved:  # another connection keeps SQLite from moving all of them
                    raise OSError
            else:
                if target.exists():
                    target = target.with_name(f"{target.name}.saved")
                with closing(sqlite3.connect(copy)) as saved:
                    self._connection.backup(saved)
            self._connection.close()
            if not main_in_place:
                os.replace(copy, target)
        except (sqlite3.Error, OSError):
            copy.unlink(missing_ok=True)
            return (
                "put the files back, then `asyncrl resume`; a run's folder must stay in place until the run has ended"
            )
        moved_back = "" if target == self._path else f" after you have renamed the copy to {self._path.name}"
        return f"everything acknowledged is in {target}: `asyncrl resume` continues from it{moved_back}"


# -- changes without a driver: the caller holds the run's lock


def checkpoints_removed(run: Path, steps: Sequence[int]) -> None:
    """Record that these steps' checkpoints are removed from disk, unless the run has no journal."""
    journal = run / FILE
    if steps and journal.is_file():
        with explained(journal), closing(open_for_writing(journal)) as connection:
            connection.executemany(
                "UPDATE checkpoints SET removed_at = ? WHERE step = ?", [(time.time(), step) for step in steps]
            )


def prepare_resume(journal: Path, retrain_from: int | None, accept_data: bool) -> None:
    """Record a resume's changes.

    Drops the reports of all steps from ``retrain_from`` (counted from 0) on, and the evaluations of their weights: with
    other settings, or on another machine, the steps may give other values now. With ``accept_data`` the prompts
    admitted so far are never compared with the data again.
    """
    with explained(journal), closing(open_for_writing(journal)) as connection:
        if retrain_from is not None:
            connection.execute(
                "UPDATE batches SET trained_at = NULL, digest = NULL, metrics = NULL WHERE step >= ?", (retrain_from,)
            )
            connection.execute("DELETE FROM evaluations WHERE step > ?", (retrain_from,))
        if accept_data:
            connection.execute(
                "INSERT OR REPLACE INTO meta SELECT ?, coalesce(max(serial), 0) FROM groups", (ACCEPTED,)
            )
