"""The journal's file as its one writer has it: commits, pruning, and reading back.

Invariant: only the process of the newest row of ``starts`` writes. Each transaction checks that this row is still the
one that the process has seen or written, so a buffer that was replaced cannot write any more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from asyncrl_cli.journal.rollout_rows import prompt_of, read_batch, read_rollouts, row_crc
from asyncrl_cli.journal.schema import JournalError, explained, open_for_reading, open_for_writing, sound
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.training import TrainingBatch

Statement = tuple[str, tuple[Any, ...]]

PRUNED_AT_ONCE = 64
"""Groups whose tokens one commit may drop, so that pruning never holds up an acknowledgement for long."""

# SQLite takes a partial index only for a query that repeats the index's own condition.
OUTSTANDING = "state IN ('running', 'finished')"
_DROPPED = "state IN ('rejected', 'requeued')"


class JournalFile:
    """The open file of one run's journal. One process writes, through one thread at a time."""

    def __init__(self, path: Path, to_write: bool = True) -> None:
        """Open or create it; or only read it, which changes nothing on disk. Raises ``JournalError``."""
        self._path = path
        self._connection = open_for_writing(path) if to_write else open_for_reading(path)
        self._connection.create_function("row_crc", -1, row_crc, deterministic=True)
        self._start = self._newest_start()

    def commit(self, statements: Sequence[Statement]) -> None:
        """Write these, whole or not at all; they are on disk when this returns. Raises ``JournalError``."""
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
        """The first step whose tokens the newest so many checkpoints need, or any ``on_disk``; 0 for all."""
        recorded = {step for (step,) in self._rows("SELECT step FROM checkpoints")}
        newest = sorted(recorded.union(on_disk))[-checkpoints:]
        return min([*newest, *on_disk]) if len(newest) == checkpoints else 0

    def prune(self, before_step: int) -> bool:
        """Drop the tokens of some groups trained before a step, or rejected before it; False when none is left."""
        with self.transaction():
            # The plus sign keeps SQLite from looking for the lowest id in the table, from the run's first group on.
            (needed,) = self._row(
                f"""
                SELECT min(id) FROM (
                    SELECT min(+id) AS id FROM groups WHERE step >= ?
                    UNION ALL SELECT min(+id) FROM groups WHERE {OUTSTANDING}
                )
                """,
                before_step,
            )
            doomed = self._rows(
                "SELECT DISTINCT group_id FROM segments WHERE group_id < ? ORDER BY group_id LIMIT ?",
                needed or 0,
                PRUNED_AT_ONCE,
            )
            self._connection.executemany("DELETE FROM segments WHERE group_id = ?", doomed)
            if doomed:  # without it, tokens that are missing by damage would pass for dropped ones
                self._connection.execute(
                    "UPDATE meta SET value = max(CAST(value AS INTEGER), ?) WHERE key = 'pruned_to'",
                    (max(group_id for (group_id,) in doomed) + 1,),
                )
        return len(doomed) == PRUNED_AT_ONCE

    # -- reading back, for the writer's own use

    def meta(self) -> dict[str, Any]:
        """What ``described`` said."""
        return {key: json.loads(value) for key, value in self._rows("SELECT key, value FROM meta")}

    def ledger_rows(self) -> dict[str, Any]:
        """What the ledger's state follows from, by the keys of ``Ledger.snapshot`` that history decides."""
        (step,) = self._row("SELECT coalesce(max(step) + 1, 0) FROM batches")
        (version,) = self._row("SELECT coalesce(max(version), 0) FROM publishes")
        (late,) = self._row("SELECT coalesce(sum(late), 0) FROM batches")
        dropped = self._rows(f"SELECT state, reason, count(*) FROM groups WHERE {_DROPPED} GROUP BY state, reason")
        outstanding: dict[str, list[list[int]]] = {"running": [], "finished": []}
        for state, *row in self._rows(f"SELECT state, id, version FROM groups WHERE {OUTSTANDING} ORDER BY id"):
            outstanding[state].append(row)
        return {
            "step": step,
            "version": version,
            "next_id": self.next_group(),
            "late": late,
            "requeued": sum(count for state, _, count in dropped if state == "requeued"),
            "rejections": {reason: count for state, reason, count in dropped if state == "rejected"},
            **outstanding,
        }

    def next_group(self) -> int:
        """The index of the next group."""
        (next_id,) = self._row("SELECT coalesce(max(id) + 1, 0) FROM groups")
        return int(next_id)

    def trained_steps(self) -> int:
        """The first step that has not been reported as trained."""
        (step,) = self._row("SELECT coalesce(max(step) + 1, 0) FROM batches WHERE trained_at IS NOT NULL")
        return int(step)

    def checksum(self, version: int) -> str | None:
        """The checksum of a published version's bytes."""
        found = self._rows("SELECT checksum FROM publishes WHERE version = ?", version)
        return str(found[0][0]) if found else None

    def loader(self) -> dict[str, int] | None:
        """Where the data loader stands after the newest admission that moved it."""
        found = self._rows("SELECT epoch, position FROM groups WHERE serial IS NOT NULL ORDER BY id DESC LIMIT 1")
        return {"epoch": found[0][0], "position": found[0][1]} if found else None

    def serial(self) -> int:
        """The serial of the newest prompt admitted; 0 before the first."""
        found = self._rows("SELECT serial FROM groups WHERE serial IS NOT NULL ORDER BY id DESC LIMIT 1")
        return int(found[0][0]) if found else 0

    def accuracies(self) -> dict[int, float]:
        """Greedy held-out accuracy by step."""
        return dict(self._rows("SELECT step, accuracy FROM evaluations WHERE kind = 'greedy'"))

    def evaluations(self) -> frozenset[tuple[int, str]]:
        """Step and kind of every evaluation."""
        return frozenset(self._rows("SELECT step, kind FROM evaluations"))

    def solved(self, correct: float) -> dict[str, int]:
        """By uid, in how many groups in a row up to the newest no rollout had a reward below ``correct``."""
        in_a_row: dict[str, int] = {}
        for uid, lowest in self._rows(
            """
            SELECT g.uid, min(r.reward) FROM groups g JOIN rollouts r ON r.group_id = g.id
            WHERE g.state IN ('finished', 'taken') OR (g.state = 'rejected' AND g.reason = 'uniform')
            GROUP BY g.id ORDER BY g.id
            """
        ):
            if lowest >= correct:
                in_a_row[uid] = in_a_row.get(uid, 0) + 1
            else:
                in_a_row.pop(uid, None)
        return in_a_row

    def untrained_prompts(self, step: int) -> list[Prompt]:
        """The prompts of groups that are admitted and not trained before ``step``, in admission order."""
        rows = self._rows(
            "SELECT uid, prompt, fields FROM groups WHERE id IN "
            f"(SELECT id FROM groups WHERE {OUTSTANDING} UNION ALL SELECT id FROM groups WHERE step >= ?) ORDER BY id",
            step,
        )
        return [prompt_of(*row) for row in rows]

    def rewards(self, group_id: int) -> dict[int, float]:
        """The rewards that a group's rollouts have, by index."""
        with explained(self._path):
            rollouts = read_rollouts(self._connection, group_id)
        return {index: row.reward for index, row in rollouts.items() if row.reward is not None}

    def batch(self, step: int) -> TrainingBatch:
        """The batch of a step, as it was taken. Raises ``LookupError`` like ``read_batch``, and ``JournalError``."""
        with explained(self._path), sound(self._path):
            return read_batch(self._connection, step)

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
        """A block that alone writes: whole or not at all. Raises ``JournalError`` when another process has begun."""
        with explained(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                if self._newest_start() != self._start:
                    raise JournalError(
                        "another process has begun to write this journal, so this one must not write any more",
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
