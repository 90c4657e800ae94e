"""The journal's writer: stores every event of a run as rows, committed in groups.

An event is noted in memory (``admitted``, ``recorded``, ...), and the next ``commit`` writes it. One method's notes are
committed together or not at all. One process writes, through one thread at a time.

Invariant: the segments of a sequence (a rollout, or a branch of one) follow one another from token 0 on. ``grown`` and
``recorded`` ensure that.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from asyncrl_cli.journal.file import JournalFile, Statement
from asyncrl_cli.journal.history import checkpoints
from asyncrl_cli.journal.ledger import Batch, GroupEntry
from asyncrl_cli.journal.rollout_rows import (
    PROMPT,
    REQUEST_COLUMNS,
    columns_of,
    experts_columns,
    key_crc,
    open_groups,
    prompt_columns,
    row_crc,
)
from asyncrl_cli.journal.schema import JournalError
from asyncrl_cli.records.experts import Experts
from asyncrl_cli.records.generation import CONTEXT, EngineRequest, Rollout, Segment, group_and_index, sequence_of
from asyncrl_cli.records.groups import BufferSettings, Candidate, Group, Outcome, PublishRecord, StepRecord
from asyncrl_cli.records.images import PlacedImage
from asyncrl_cli.records.rewards import RewardFailure, Scored
from asyncrl_cli.records.token_prefix import TokenPrefix

_TABLE = re.compile(r"(?:INTO|UPDATE|FROM) (\w+)")
_SEGMENT = """
    INSERT OR REPLACE INTO segments
        (group_id, rollout_index, branch, start, version, tokens, logprobs, crc, at, key_crc)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_ROLLOUT = """
    INSERT INTO rollouts
        (group_id, rollout_index, tokens, finish_reason, reward, failure, metrics, masked, turns, oldest, newest,
         scored_at, recorded_at, crc)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET tokens = excluded.tokens, finish_reason = excluded.finish_reason,
        reward = excluded.reward, failure = excluded.failure, metrics = excluded.metrics,
        masked = excluded.masked, turns = excluded.turns, scored_at = excluded.scored_at,
        oldest = excluded.oldest, newest = excluded.newest, recorded_at = excluded.recorded_at, crc = excluded.crc
"""
# A rollout may fail before it is recorded: then this makes its row. Otherwise the row keeps its other columns. Only
# SQLite knows these, so it also computes the checksum.
_SCORE = """
    INSERT INTO rollouts
        (group_id, rollout_index, tokens, reward, failure, metrics, masked, turns, scored_at, recorded_at, crc)
    VALUES (?, ?, 0, ?, ?, ?, ?, ?, ?8, ?8, ?)
    ON CONFLICT DO UPDATE SET reward = excluded.reward, failure = excluded.failure, metrics = excluded.metrics,
        masked = excluded.masked, turns = excluded.turns, scored_at = excluded.scored_at,
        crc = row_crc(group_id, rollout_index, tokens, finish_reason, excluded.reward, excluded.failure,
            excluded.metrics, excluded.masked, excluded.turns, oldest, newest)
"""

Verdict = tuple[float | None, str | None, str | None, int, str | None]
"""The columns ``reward``, ``failure``, ``metrics``, ``masked`` and ``turns``."""
UNJUDGED: Verdict = (None, None, None, 0, None)


class Journal(JournalFile):
    """The open journal of one run."""

    def __init__(self, path: Path, to_write: bool = True) -> None:
        super().__init__(path, to_write)
        self._noted: list[Statement] = []
        # The recorded tokens of unfinished rollouts, by group, index and branch.
        self._prefixes: dict[int, dict[int, dict[int, TokenPrefix]]] = {}

    # -- events

    def described(self, meta: Mapping[str, Any]) -> None:
        """Note metadata that describes the rows; it replaces earlier values."""
        for key, value in meta.items():
            self._insert("meta", replace=True, key=key, value=json.dumps(value))

    def started(self, start_kind: str, step: int, version: int, note: str, settings: BufferSettings) -> None:
        """Note that this process begins to write, as ``start_kind`` (``train`` or ``resume``)."""
        self._insert(
            "starts",
            at=time.time(),
            kind=start_kind,
            host=os.uname().nodename,
            pid=os.getpid(),
            step=step,
            version=version,
            note=_storable(note),
            settings=json.dumps(asdict(settings)),
        )

    def admitted(self, entry: GroupEntry, candidate: Candidate) -> None:
        """Note a new running group and its prompt, which must have passed ``check_prompt``."""
        columns: dict[str, Any] = {
            "id": entry.group_id,
            **prompt_columns(candidate),
            "version": entry.version,
            "serial": candidate.serial,
            "epoch": candidate.loader["epoch"],
            "position": candidate.loader["position"],
        }
        self._insert("groups", **columns, state="running", admitted_at=time.time(), crc=row_crc(*columns.values()))
        images = candidate.images or [PlacedImage(image, -1, 0) for image in candidate.prompt.images]
        self._note_images(entry.group_id, index=PROMPT, branch=0, images=images)

    def check_prompt(self, candidate: Candidate) -> None:
        """Raise ``JournalError`` for a prompt that cannot be stored."""
        try:
            fault = _fault_in(prompt_columns(candidate).values())
        except (TypeError, ValueError, OverflowError) as error:  # of JSON, and of token ids
            fault = f"a value that JSON or int32 cannot express: {error}"
        if fault:
            raise _refusal(f"prompt {candidate.prompt.uid!r:.80}", fault, self._path)

    def requeued(self, old_id: int, entry: GroupEntry) -> None:
        """Note that a group is abandoned, and that its prompt runs again under a new index."""
        time_s = time.time()
        self._prefixes.pop(old_id, None)
        self._note("UPDATE groups SET state = 'requeued', ended_at = ? WHERE id = ?", time_s, old_id)
        self._note(
            "INSERT INTO groups (id, uid, prompt, fields, prompt_ids, version, state, admitted_at, crc) "
            "SELECT ?1, uid, prompt, fields, prompt_ids, ?2, 'running', ?3, "
            "row_crc(?1, uid, prompt, fields, prompt_ids, ?2, NULL, NULL, NULL) FROM groups WHERE id = ?4",
            entry.group_id,
            entry.version,
            time_s,
            old_id,
        )
        self._note(
            "INSERT INTO image_places SELECT ?1, rollout_index, branch, number, start, length, digest, "
            "row_crc(?1, rollout_index, branch, number, start, length, digest) FROM image_places "
            "WHERE group_id = ?2 AND rollout_index = ?3",
            entry.group_id,
            old_id,
            PROMPT,
        )

    def grown(self, segments: Iterable[Segment]) -> None:
        """Note new tokens of unfinished rollouts.

        Repeated tokens and tokens after a gap change nothing; other tokens at a recorded position replace all tokens
        from there on (``TokenPrefix``).
        """
        time_s = time.time()
        for segment in segments:
            group_id, index, branch = sequence_of(segment.rollout_id)
            sequences = self._prefixes.setdefault(group_id, {}).setdefault(index, {})
            prefix = sequences.setdefault(branch, TokenPrefix())
            recorded_end = prefix.end
            new_segment = prefix.add(segment)
            if new_segment is None:
                continue
            changed = [new_segment]
            if new_segment.start < recorded_end:
                changed = prefix.segments[-2:]  # the new segment, and the one before it, which it may have shortened
                for table in ("segments", "experts"):
                    self._note(
                        f"DELETE FROM {table} WHERE group_id = ? AND rollout_index = ? AND branch = ? AND start >= ?",
                        group_id,
                        index,
                        branch,
                        changed[0].start,
                    )
            for row in changed:
                self._note_segment(group_id, index=index, branch=branch, columns=columns_of(row), time_s=time_s)
                self._note_experts(group_id, index=index, branch=branch, start=row.start, experts=row.experts)
            sampled = [row for tokens in sequences.values() for row in tokens.segments if row.version != CONTEXT]
            lowest = min((row.version for row in sampled), default=None)
            highest = max((row.version for row in sampled), default=None)
            count = sum(len(row.ids) for row in sampled)
            self._note_rollout((group_id, index, count, None, *UNJUDGED, lowest, highest), None, time_s)

    def handed_out(self, rollout_id: str) -> None:
        """Note that a rollout belongs to a program outside of the run from now on: a row without tokens."""
        group_id, index = group_and_index(rollout_id)
        self._note_rollout((group_id, index, 0, None, *UNJUDGED, None, None), None, time.time())

    def recorded(self, rollout: Rollout, outcome: Outcome | None = None) -> None:
        """Note a finished rollout with all its sequences, and with its outcome if it is known."""
        time_s = time.time()
        group_id, index = group_and_index(rollout.rollout_id)
        versions = rollout.sampled_versions
        span = (int(versions.min()), int(versions.max())) if len(versions) else (None, None)
        verdict = _verdict(outcome.score) if outcome else UNJUDGED
        columns = (group_id, index, len(versions), rollout.finish_reason, *verdict, *span)
        # Before the segments: if the row is refused, nothing may be noted.
        self._note_rollout(columns, time_s if outcome else None, time_s)
        # Segments recorded in part may begin at other tokens, and would stay between the complete ones.
        if self._prefixes.get(group_id, {}).pop(index, None):
            for table in ("segments", "experts"):
                self._note(f"DELETE FROM {table} WHERE group_id = ? AND rollout_index = ?", group_id, index)
        for sequence in rollout.sequences:
            branch = sequence_of(sequence.rollout_id)[-1]
            response_images = [image for image in sequence.images if image.offset >= len(sequence.prompt_ids)]
            self._note_images(group_id, index=index, branch=branch, images=response_images)
            self._note_experts(group_id, index=index, branch=branch, start=PROMPT, experts=sequence.prompt_experts)
            for segment in sequence.segments(sequence.rollout_id):
                self._note_segment(group_id, index=index, branch=branch, columns=columns_of(segment), time_s=time_s)
                self._note_experts(group_id, index=index, branch=branch, start=segment.start, experts=segment.experts)

    def scored(self, outcome: Outcome) -> None:
        """Note a rollout's reward or failure."""
        group_id, index = group_and_index(outcome.rollout_id)
        verdict = _verdict(outcome.score)
        self._note(
            _SCORE, group_id, index, *verdict, time.time(), row_crc(group_id, index, 0, None, *verdict, None, None)
        )

    def requested(self, request: EngineRequest) -> None:
        """Note a request that has left its engine."""
        values = astuple(request)
        marks = ", ".join("?" * len(values))
        self._note(f"INSERT OR IGNORE INTO engine_requests ({REQUEST_COLUMNS}) VALUES ({marks})", *values)

    def group_ended(self, group_id: int, state: str, reason: str = "") -> None:
        """Note that a group is ``finished`` or ``rejected``."""
        self._prefixes.pop(group_id, None)
        self._note(
            "UPDATE groups SET state = ?, reason = ?, ended_at = ? WHERE id = ?", state, reason, time.time(), group_id
        )

    def batch_taken(self, batch: Batch, late_groups: int) -> None:
        """Note that a batch is taken for training."""
        self._insert("batches", step=batch.step, version=batch.version, late=late_groups, taken_at=time.time())
        for group_id in batch.group_ids:
            self._note("UPDATE groups SET state = 'taken', step = ? WHERE id = ?", batch.step, group_id)

    def trained(self, record: StepRecord) -> None:
        """Note that a step is trained. A step that is trained again keeps its first report."""
        self._note(
            "UPDATE batches SET trained_at = ?, digest = ?, metrics = ? WHERE step = ? AND trained_at IS NULL",
            time.time(),
            record.digest,
            json.dumps(dict(record.metrics)),
            record.step,
        )

    def published(self, record: PublishRecord) -> None:
        """Note that every engine serves a version."""
        columns = asdict(record) | {"pauses": json.dumps(dict(record.pauses))}
        self._insert("publishes", replace=True, at=time.time(), **columns)

    def checkpointed(
        self, step: int, folder: str, seconds: float, stall_s: float = 0.0, saved_at: float | None = None
    ) -> None:
        """Note that a checkpoint is complete on disk, now or since the unix time ``saved_at``."""
        saved_at = time.time() if saved_at is None else saved_at
        self._insert(
            "checkpoints", replace=True, step=step, at=saved_at, folder=folder, seconds=seconds, stall_s=stall_s
        )

    def checkpoints_found(self, on_disk: Mapping[int, tuple[str, float]]) -> None:
        """Note the checkpoints found on disk at the start, as folder and unix time of saving by step.

        A kill may have come between a checkpoint and its row, and users may have removed or restored folders.
        """
        recorded_steps = {row.after_step for row in self.read(checkpoints) if row.removed_at is None}
        for step, (folder, saved_at) in on_disk.items():
            if step not in recorded_steps:
                # Nobody knows how long the save took.
                self.checkpointed(step, folder=folder, seconds=0.0, saved_at=saved_at)
        for step in recorded_steps - on_disk.keys():
            self.checkpoint_removed(step)

    def checkpoint_removed(self, step: int) -> None:
        self._note("UPDATE checkpoints SET removed_at = ? WHERE step = ?", time.time(), step)

    def uploaded(self, step: int, failure: str) -> None:
        """Note that a checkpoint was uploaded, or the ``failure`` that prevented it."""
        at = None if failure else time.time()
        self._note("UPDATE checkpoints SET uploaded_at = ?, upload_failure = ? WHERE step = ?", at, failure, step)

    def evaluated(self, result: Mapping[str, Any]) -> None:
        """Note an evaluation (the fields of ``monitors.base.EvaluationResult``)."""
        names = ("step", "kind", "accuracy", "mean_reward", "mean_length", "prompts", "oldest", "newest")
        self._insert("evaluations", replace=True, at=time.time(), **{name: result[name] for name in names})

    def failed(self, failure_kind: str, part_name: str, message: str) -> None:
        """Note a failure, whether or not the run continues."""
        self._insert(
            "failures", at=time.time(), kind=failure_kind, part=_storable(part_name), message=_storable(message)
        )

    def engine_changed(self, engine: str, change: str, reason: str) -> None:
        """Note that an engine began to serve (``join``) or left (``leave``)."""
        self._insert("engine_changes", at=time.time(), engine=engine, change=change, reason=_storable(reason))

    # -- committing

    @property
    def notes(self) -> int:
        """Number of statements that wait for a commit."""
        return len(self._noted)

    def noted(self) -> list[Statement]:
        """Return the statements that wait for a commit, and clear the list."""
        noted, self._noted = self._noted, []
        return noted

    def open_groups(self) -> tuple[Group, ...]:
        """Return the running groups in admission order. Call it before the first event: ``grown`` continues their
        tokens, and must know which are recorded."""
        groups = self.read(open_groups)
        for group in groups:
            self._prefixes[group.group_id] = {
                index: {branch: TokenPrefix(segments) for branch, segments in sequences.items()}
                for index, sequences in group.prefixes.items()
            }
        return groups

    def _note_segment(self, group_id: int, index: int, branch: int, columns: tuple[Any, ...], time_s: float) -> None:
        start, version, *_, crc = columns
        keyed = key_crc(group_id, index=index, branch=branch, start=start, version=version, crc=crc)
        # Not checked: integers and bytes can always be stored, and most rows of a run are segments.
        self._noted.append((_SEGMENT, (group_id, index, branch, *columns, time_s, keyed)))

    def _note_experts(self, group_id: int, index: int, branch: int, start: int, experts: Experts | None) -> None:
        if experts is not None:
            columns = experts_columns(group_id, index=index, branch=branch, start=start, experts=experts)
            self._noted.append(("INSERT OR REPLACE INTO experts VALUES (?, ?, ?, ?, ?, ?)", columns))

    def _note_images(self, group_id: int, index: int, branch: int, images: Iterable[PlacedImage]) -> None:
        for position, placed_image in enumerate(images):
            image = placed_image.image
            self._note("INSERT OR IGNORE INTO images VALUES (?, ?)", image.digest, image.data)
            columns = (group_id, index, branch, position, placed_image.offset, placed_image.length, image.digest)
            self._note(
                "INSERT OR REPLACE INTO image_places VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *columns, row_crc(*columns)
            )

    def _note_rollout(self, columns: tuple[Any, ...], scored_at: float | None, recorded_at: float) -> None:
        self._note(_ROLLOUT, *columns, scored_at, recorded_at, row_crc(*columns))

    def _insert(self, table: str, replace: bool = False, **columns: Any) -> None:
        """Note a row. A second row with the same key fails the commit, unless it may ``replace`` the first."""
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        marks = ", ".join("?" * len(columns))
        self._note(f"{verb} INTO {table} ({', '.join(columns)}) VALUES ({marks})", *columns.values())

    def _note(self, sql: str, *parameters: Any) -> None:
        if fault := _fault_in(parameters):
            table = _TABLE.search(sql)
            row = ", ".join(f"{value!r:.40}" for value in parameters if not isinstance(value, bytes))
            raise _refusal(f"the row ({row}) of {table[1] if table else 'the journal'}", fault, self._path)
        self._noted.append((sql, parameters))


def _verdict(score: Scored | RewardFailure) -> Verdict:
    if isinstance(score, RewardFailure):
        return None, _storable(str(score)) or None, None, 0, None
    metrics = json.dumps(dict(score.metrics)) if score.metrics else None
    if score.reward is None:
        return None, None, metrics, 1, None
    turns = json.dumps(score.turns) if score.turns else None
    return float(score.reward) + 0.0, None, metrics, 0, turns  # SQLite has no -0.0


# -- values that SQLite cannot store: calls share commits, so one bad value would fail the commit for all of them

_LIMIT = 2**63
"""SQLite's integers have 64 bits."""


def _fault_in(values: Iterable[object]) -> str:
    """Why a row with these values cannot be stored; empty if it can."""
    return next(filter(None, map(_fault_of, values)), "")


def _refusal(record: str, fault: str, path: Path) -> JournalError:
    return JournalError(
        f"{record} cannot be stored: it contains {fault}",
        location=str(path),
        hint="correct the source of the value, then `asyncrl resume`: everything acknowledged is in the journal",
    )


def _storable(text: str) -> str:
    """Escape the characters of a message that cannot be stored."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _fault_of(value: object) -> str:
    match value:
        case None | bytes():
            return ""
        case int():
            return "" if -_LIMIT <= value < _LIMIT else "a number with more than 64 bits"
        case float():
            return "NaN" if math.isnan(value) else ""
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                return f"text that is not valid Unicode: {value!r:.80}"
            return ""
    return f"a {type(value).__name__}"
