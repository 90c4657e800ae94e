"""The journal's writer: every event of a run as rows, committed in groups.

An event is noted in memory (``admitted``, ``recorded``, ...) and written by the next ``commit``. What a method
notes belongs together: a commit writes it whole or not at all. One process writes, through one thread at a time.

Invariant: the segments of a sequence (a rollout, or a branch of one) follow one another from token 0 on. ``grown`` and
``recorded`` see to that.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl_cli.buffer.ledger import Batch, GroupEntry
from asyncrl_cli.buffer.records import Admission, Candidate, OpenGroup, Outcome, PublishRecord, StepRecord
from asyncrl_cli.buffer.rollout_rows import TOKENS, columns_of, prompt_of, read_batch, rollout_of, sequences_of
from asyncrl_cli.buffer.schema import explained, open_for_writing, sound
from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.rollout.records import (
    GIVEN,
    Rollout,
    Segment,
    Spell,
    place_of,
    segments_of,
    sequence_of,
)
from asyncrl_cli.train.records import TrainingBatch

Statement = tuple[str, tuple[Any, ...]]

PRUNED_AT_ONCE = 64
"""Groups whose tokens one commit may drop, so that pruning never holds up an acknowledgement for long."""

# SQLite takes a partial index only for a query that repeats the index's own condition.
_OUTSTANDING = "state IN ('running', 'finished')"
_DROPPED = "state IN ('rejected', 'requeued')"

_SEGMENT = """
    INSERT OR REPLACE INTO segments (group_id, place, branch, start, version, tokens, logprobs, crc, at)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_ROLLOUT = """
    INSERT INTO rollouts
        (group_id, place, tokens, finish_reason, reward, failure, metrics, judged_at, oldest, newest, recorded_at)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET tokens = excluded.tokens, finish_reason = excluded.finish_reason,
        reward = excluded.reward, failure = excluded.failure, metrics = excluded.metrics,
        judged_at = excluded.judged_at,
        oldest = excluded.oldest, newest = excluded.newest, recorded_at = excluded.recorded_at
"""


class _Piece(NamedTuple):
    """A recorded segment of an unfinished rollout, as far as it takes to know it again."""

    start: int
    end: int
    version: int
    crc: int


class Journal:
    """The open journal of one run."""

    def __init__(self, path: Path) -> None:
        """Open or create it. Raises ``JournalError``."""
        self._path = path
        self._connection = open_for_writing(path)
        self._noted: list[Statement] = []
        # Rollouts of which segments, but not the whole, are recorded: by group, place, branch and first token.
        self._in_part: dict[int, dict[int, dict[int, dict[int, _Piece]]]] = {}

    # -- events

    def described(self, meta: Mapping[str, Any]) -> None:
        """What the rows mean; replaces what was said before."""
        for key, value in meta.items():
            self._note("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))

    def started(self, kind: str, step: int, version: int, note: str) -> None:
        """This process begins to write: ``train``, ``resume``, or ``restart`` of the buffer alone."""
        self._note(
            "INSERT INTO starts (at, kind, host, pid, step, version, note) VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(time.time(), kind, os.uname().nodename, os.getpid(), step, version, note),
        )

    def admitted(self, entry: GroupEntry, candidate: Candidate) -> None:
        """A group runs, with its prompt."""
        prompt = candidate.prompt
        self._note(
            "INSERT INTO groups (id, uid, prompt, fields, prompt_ids, version, state, serial, epoch, position, "
            "admitted_at) VALUES (?, ?, ?, ?, ?, ?, 'running', ?, ?, ?, ?)",
            *(entry.group_id, prompt.uid, json.dumps(prompt.content), json.dumps(dict(prompt.fields))),
            *(np.asarray(candidate.prompt_ids, TOKENS).tobytes(), entry.version),
            *(candidate.serial, candidate.loader["epoch"], candidate.loader["position"], time.time()),
        )

    def requeued(self, old_id: int, entry: GroupEntry) -> None:
        """A group is given up, and its prompt runs again under a new index."""
        now = time.time()
        self._in_part.pop(old_id, None)
        self._note("UPDATE groups SET state = 'requeued', ended_at = ? WHERE id = ?", now, old_id)
        self._note(
            "INSERT INTO groups (id, uid, prompt, fields, prompt_ids, version, state, admitted_at) "
            "SELECT ?, uid, prompt, fields, prompt_ids, ?, 'running', ? FROM groups WHERE id = ?",
            *(entry.group_id, entry.version, now, old_id),
        )

    def grown(self, segments: Iterable[Segment]) -> None:
        """New tokens of unfinished rollouts.

        A segment that is told twice changes nothing. Other tokens where some are recorded mean that the sequence
        was generated again from there, so that what followed in it is void. A segment that does not follow what is
        recorded is passed over: its rollout will come whole.
        """
        now = time.time()
        for segment in segments:
            group_id, place, branch = sequence_of(segment.rollout_id)
            sequences = self._in_part.setdefault(group_id, {}).setdefault(place, {})
            pieces = sequences.setdefault(branch, {})
            columns = columns_of(segment)
            piece = _Piece(segment.start, segment.end, segment.version, columns[-1])
            end = max((known.end for known in pieces.values()), default=0)
            if segment.end == segment.start or segment.start not in (end, *pieces):
                continue
            if pieces.get(segment.start) == piece:
                continue
            for void in [start for start in pieces if start >= segment.start]:
                del pieces[void]
                self._note(
                    "DELETE FROM segments WHERE group_id = ? AND place = ? AND branch = ? AND start = ?",
                    *(group_id, place, branch, void),
                )
            pieces[segment.start] = piece
            self._note(_SEGMENT, group_id, place, branch, *columns, now)
            sampled = [known for of_one in sequences.values() for known in of_one.values() if known.version != GIVEN]
            oldest = min((known.version for known in sampled), default=None)
            newest = max((known.version for known in sampled), default=None)
            count = sum(known.end - known.start for known in sampled)
            self._note(_ROLLOUT, group_id, place, count, None, None, None, None, None, oldest, newest, now)

    def recorded(self, rollout: Rollout, outcome: Outcome | None = None) -> None:
        """A finished rollout with all its sequences, whole; with its outcome, where that is known."""
        now = time.time()
        group_id, place = place_of(rollout.rollout_id)
        if self._in_part.get(group_id, {}).pop(place, None):  # cut elsewhere than the whole is
            self._note("DELETE FROM segments WHERE group_id = ? AND place = ?", group_id, place)
        for sequence in rollout.sequences:
            branch = sequence_of(sequence.rollout_id)[-1]
            for segment in segments_of(sequence):
                self._note(_SEGMENT, group_id, place, branch, *columns_of(segment), now)
        versions = rollout.sampled_versions
        span = (int(versions.min()), int(versions.max())) if len(versions) else (None, None)
        verdict = (*_verdict(outcome), now) if outcome else (None, None, None, None)
        self._note(_ROLLOUT, group_id, place, len(versions), rollout.finish_reason, *verdict, *span, now)

    def judged(self, outcome: Outcome) -> None:
        """A rollout has its reward, or failed."""
        group_id, place = place_of(outcome.rollout_id)
        self._note(
            "INSERT INTO rollouts (group_id, place, tokens, reward, failure, metrics, judged_at, recorded_at) "
            "VALUES (?, ?, 0, ?, ?, ?, ?6, ?6) ON CONFLICT DO UPDATE SET reward = excluded.reward, "
            "failure = excluded.failure, metrics = excluded.metrics, judged_at = excluded.judged_at",
            *(group_id, place, *_verdict(outcome), time.time()),
        )

    def stayed(self, spells: Iterable[Spell]) -> None:
        """Requests have left their engines. A spell that is told twice changes nothing."""
        for spell in spells:
            self._note(
                "INSERT OR IGNORE INTO spells (request, begun_at, ended_at, engine, ending) VALUES (?, ?, ?, ?, ?)",
                *(spell.request_id, spell.begun_at, spell.ended_at, spell.engine, spell.ending),
            )

    def ended(self, group_id: int, state: str, reason: str = "") -> None:
        """A group is ``finished`` or ``rejected``."""
        self._in_part.pop(group_id, None)
        self._note(
            "UPDATE groups SET state = ?, reason = ?, ended_at = ? WHERE id = ?", state, reason, time.time(), group_id
        )

    def taken(self, batch: Batch, late: int) -> None:
        """A batch leaves for training."""
        self._note(
            "INSERT INTO batches (step, version, late, taken_at) VALUES (?, ?, ?, ?)",
            *(batch.step, batch.version, late, time.time()),
        )
        for group_id in batch.group_ids:
            self._note("UPDATE groups SET state = 'taken', step = ? WHERE id = ?", batch.step, group_id)

    def trained(self, record: StepRecord) -> None:
        """A step is trained; a step that is trained again keeps what it said first."""
        self._note(
            "UPDATE batches SET trained_at = ?, digest = ?, metrics = ? WHERE step = ? AND trained_at IS NULL",
            *(time.time(), record.digest, json.dumps(dict(record.metrics)), record.step),
        )

    def published(self, record: PublishRecord) -> None:
        """Every engine serves a version."""
        self._note(
            "INSERT OR REPLACE INTO publishes VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(record.version, record.step, time.time(), record.checksum),
            *(record.seconds, record.stall_s, record.gap, record.change),
        )

    def checkpointed(self, step: int, folder: str, seconds: float) -> None:
        """A complete checkpoint lies on disk."""
        self._note("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, NULL)", step, time.time(), folder, seconds)

    def checkpoint_removed(self, step: int) -> None:
        """A checkpoint is no more."""
        self._note("UPDATE checkpoints SET removed_at = ? WHERE step = ?", time.time(), step)

    def evaluated(self, result: Mapping[str, Any]) -> None:
        """An evaluation (the fields of ``observe.records.EvaluationResult``)."""
        names = ("step", "kind", "accuracy", "mean_reward", "mean_length", "prompts", "oldest", "newest")
        self._note(
            f"INSERT OR REPLACE INTO evaluations ({', '.join(names)}, at) VALUES ({'?, ' * len(names)}?)",
            *(*(result[name] for name in names), time.time()),
        )

    def failed(self, kind: str, part: str, message: str) -> None:
        """Something failed, whether or not the run went on."""
        self._note(
            "INSERT INTO failures (at, kind, part, message) VALUES (?, ?, ?, ?)", time.time(), kind, part, message
        )

    # -- committing

    @property
    def notes(self) -> int:
        """How much waits for a commit."""
        return len(self._noted)

    def noted(self) -> list[Statement]:
        """What waits for a commit, handed over."""
        noted, self._noted = self._noted, []
        return noted

    def commit(self, statements: Sequence[Statement]) -> None:
        """Write these, whole or not at all; they are on disk when this returns. Raises ``JournalError``."""
        with self._transaction():
            for sql, alike in groupby(statements, key=lambda statement: statement[0]):
                self._connection.executemany(sql, (parameters for _, parameters in alike))

    def close(self) -> None:
        """Close the file; what is noted and not committed is lost."""
        self._connection.close()

    def needed_from(self, checkpoints: int) -> int:
        """The first step whose tokens the newest so many checkpoints need, or any that is kept; 0 for all."""
        newest = self._rows("SELECT step FROM checkpoints ORDER BY step DESC LIMIT ?", checkpoints)
        kept = self._rows("SELECT step FROM checkpoints WHERE removed_at IS NULL")
        return int(min(step for (step,) in [*newest, *kept])) if len(newest) == checkpoints else 0

    def prune(self, before_step: int) -> bool:
        """Drop the tokens of some groups trained before a step, or rejected before it; False when none is left."""
        with self._transaction():
            # The plus sign keeps SQLite from looking for the lowest id in the table, from the run's first group on.
            (needed,) = self._row(
                f"""
                SELECT min(id) FROM (
                    SELECT min(+id) AS id FROM groups WHERE step >= ?
                    UNION ALL SELECT min(+id) FROM groups WHERE {_OUTSTANDING}
                )
                """,
                before_step,
            )
            doomed = self._rows(
                "SELECT DISTINCT group_id FROM segments WHERE group_id < ? LIMIT ?", needed or 0, PRUNED_AT_ONCE
            )
            self._connection.executemany("DELETE FROM segments WHERE group_id = ?", doomed)
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
        for state, *row in self._rows(f"SELECT state, id, version FROM groups WHERE {_OUTSTANDING} ORDER BY id"):
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

    def outstanding_prompts(self) -> list[Prompt]:
        """The prompts of groups that are admitted and not taken, in admission order."""
        rows = self._rows(f"SELECT uid, prompt, fields FROM groups WHERE {_OUTSTANDING} ORDER BY id")
        return [prompt_of(*row) for row in rows]

    def open_groups(self) -> tuple[OpenGroup, ...]:
        """The running groups, in admission order."""
        opened = []
        for group_id, version, uid, content, fields, prompt_ids in self._rows(
            f"SELECT id, version, uid, prompt, fields, prompt_ids FROM groups WHERE {_OUTSTANDING} "
            "AND state = 'running' ORDER BY id"
        ):
            ids = tuple(np.frombuffer(prompt_ids, TOKENS).tolist())
            scored: set[int] = set()
            unscored: dict[int, Rollout] = {}
            prefixes: dict[int, dict[int, tuple[Segment, ...]]] = {}
            for place, finish_reason, reward in self._rows(
                "SELECT place, finish_reason, reward FROM rollouts WHERE group_id = ?", group_id
            ):
                if reward is not None:
                    scored.add(place)
                    continue
                sequences = self._sequences(group_id, place)
                if finish_reason is not None:
                    unscored[place] = rollout_of(group_id, place, ids, sequences, finish_reason)
                    continue
                prefixes[place] = sequences
                self._in_part.setdefault(group_id, {})[place] = {
                    branch: {
                        part.start: _Piece(part.start, part.end, part.version, columns_of(part)[-1]) for part in parts
                    }
                    for branch, parts in sequences.items()
                }
            admission = Admission(group_id, version, prompt_of(uid, content, fields), ids)
            opened.append(OpenGroup(admission, frozenset(scored), unscored, prefixes))
        return tuple(opened)

    def rewards(self, group_id: int) -> dict[int, float]:
        """The rewards that a group's rollouts have, by place."""
        return dict(
            self._rows("SELECT place, reward FROM rollouts WHERE group_id = ? AND reward IS NOT NULL", group_id)
        )

    def batch(self, step: int) -> TrainingBatch:
        """The batch of a step, as it was taken. Raises ``LookupError`` like ``read_batch``, and ``JournalError``."""
        with explained(self._path), sound(self._path):
            return read_batch(self._connection, step)

    def _sequences(self, group_id: int, place: int) -> dict[int, tuple[Segment, ...]]:
        """What is recorded of a rollout, by branch."""
        with explained(self._path):
            return sequences_of(self._connection, group_id, place)

    def _note(self, sql: str, *parameters: Any) -> None:
        self._noted.append((sql, parameters))

    def _rows(self, sql: str, *parameters: Any) -> list[Any]:
        with explained(self._path):
            return self._connection.execute(sql, parameters).fetchall()

    def _row(self, sql: str, *parameters: Any) -> Any:
        return self._rows(sql, *parameters)[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with explained(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def _verdict(outcome: Outcome) -> tuple[float | None, str | None, str | None]:
    """The columns ``reward``, ``failure`` and ``metrics``."""
    metrics = json.dumps(dict(outcome.metrics)) if outcome.metrics else None
    return outcome.reward, outcome.failure or None, metrics
