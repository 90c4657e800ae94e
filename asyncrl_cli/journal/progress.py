"""The progress of a run, read from the journal, on which the ledger, a resume and all pages are based.

All functions take a connection of ``reading`` or ``snapshot``, or the writer's own. Steps are counted from 0,
as in the journal.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl_cli.journal.rollout_rows import read_group
from asyncrl_cli.records.groups import BufferSettings, LedgerState
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.training import CORRECT

# SQLite takes a partial index only for a query that repeats the index's own condition.
OUTSTANDING = "state IN ('running', 'finished')"
DROPPED = "state IN ('rejected', 'requeued')"
ACCEPTED = "accepted_data_to"
"""In ``meta``: the serial up to which prompts are not compared, as a change of the data was accepted."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The numbers that describe the progress of a run.

    Args:
        settings: the bounds the buffer works by, as last recorded.
        first_step: where this journal's history begins; above 0 when an earlier journal was abandoned.
        step: batches taken so far.
        version: weight versions published so far.
    """

    settings: BufferSettings
    first_step: int
    step: int
    version: int


def progress(connection: sqlite3.Connection) -> Progress:
    """How far the run has come."""
    known = meta(connection)
    settings = BufferSettings(**known["settings"])
    first = int((known.get("base") or {}).get("step", 0))
    step, version = max(steps_taken(connection), first), newest_version(connection)
    return Progress(settings, first_step=first, step=step, version=max(version, first // settings.publish_every))


def meta(connection: sqlite3.Connection) -> dict[str, Any]:
    """The metadata of the rows: bounds, group size, and the step at which the history begins."""
    return {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def base(connection: sqlite3.Connection) -> dict[str, Any]:
    """The state from the checkpoint with which the journal's history begins; empty if it begins with step 0."""
    found: dict[str, Any] = meta(connection).get("base") or {}
    return found


# -- steps and versions


def steps_taken(connection: sqlite3.Connection) -> int:
    """The step after the last batch."""
    return _number(connection, "SELECT coalesce(max(step) + 1, 0) FROM batches")


def steps_trained(connection: sqlite3.Connection) -> int:
    """The step after the last that was reported as trained."""
    return _number(connection, "SELECT coalesce(max(step) + 1, 0) FROM batches WHERE trained_at IS NOT NULL")


def newest_version(connection: sqlite3.Connection) -> int:
    """The newest published weight version; 0 without one."""
    return _number(connection, "SELECT coalesce(max(version), 0) FROM publishes")


def checksum(connection: sqlite3.Connection, version: int) -> str | None:
    """The checksum of a published version's bytes; None when its publish is not recorded."""
    found = connection.execute("SELECT checksum FROM publishes WHERE version = ?", (version,)).fetchone()
    return str(found[0]) if found else None


def accuracies(connection: sqlite3.Connection) -> dict[int, float]:
    """Greedy held-out accuracy by number of steps done."""
    return dict(connection.execute("SELECT step, accuracy FROM evaluations WHERE kind = 'greedy'"))


def evaluations_done(connection: sqlite3.Connection) -> frozenset[tuple[int, str]]:
    """Number of steps done and kind of every evaluation."""
    return frozenset(connection.execute("SELECT step, kind FROM evaluations"))


def kept_checkpoints(connection: sqlite3.Connection) -> set[int]:
    """Steps of the checkpoints that were recorded and not removed."""
    return {step for (step,) in connection.execute("SELECT step FROM checkpoints WHERE removed_at IS NULL")}


def checkpoints_to_upload(connection: sqlite3.Connection) -> set[int]:
    """Steps with a checkpoint that is there and was not uploaded."""
    query = "SELECT step FROM checkpoints WHERE removed_at IS NULL AND uploaded_at IS NULL"
    return {step for (step,) in connection.execute(query)}


# -- groups and their prompts


def ledger_state(connection: sqlite3.Connection) -> LedgerState:
    """The ledger's state that the rows describe."""
    outstanding: dict[str, list[tuple[int, int]]] = {"running": [], "finished": []}
    for state, group_id, version in connection.execute(
        f"SELECT state, id, version FROM groups WHERE {OUTSTANDING} ORDER BY id"
    ):
        outstanding[state].append((group_id, version))
    dropped = dropped_groups(connection)
    return LedgerState(
        step=steps_taken(connection),
        version=newest_version(connection),
        next_id=next_group(connection),
        running=tuple(outstanding["running"]),
        finished=tuple(outstanding["finished"]),
        rejections=dropped["rejected"],
        requeued=sum(dropped["requeued"].values()),
        late=_number(connection, "SELECT coalesce(sum(late), 0) FROM batches"),
    )


def dropped_groups(connection: sqlite3.Connection) -> dict[str, dict[str, int]]:
    """Groups that were ``rejected`` and ``requeued``, by reason."""
    dropped: dict[str, dict[str, int]] = {"rejected": {}, "requeued": {}}
    for state, reason, count in connection.execute(
        f"SELECT state, reason, count(*) FROM groups WHERE {DROPPED} GROUP BY state, reason"
    ):
        dropped[state][reason] = count
    return dropped


def next_group(connection: sqlite3.Connection) -> int:
    """The index of the next group."""
    return _number(connection, "SELECT coalesce(max(id) + 1, 0) FROM groups")


def newest_serial(connection: sqlite3.Connection) -> int:
    """The serial of the newest prompt admitted; 0 before the first."""
    found = connection.execute("SELECT serial FROM groups WHERE serial IS NOT NULL ORDER BY id DESC LIMIT 1").fetchone()
    return int(found[0]) if found else 0


def loader_position(connection: sqlite3.Connection) -> dict[str, int] | None:
    """Where the data loader is after the newest admission that moved it; None before the first."""
    found = connection.execute(
        "SELECT epoch, position FROM groups WHERE serial IS NOT NULL ORDER BY id DESC LIMIT 1"
    ).fetchone()
    return {"epoch": found[0], "position": found[1]} if found else None


class AdmittedPrompt(NamedTuple):
    """A prompt as it was admitted, and where the data loader was after it; ``prompt`` and ``fields`` are JSON."""

    epoch: int
    position: int
    uid: str
    prompt: str
    fields: str


def newest_prompts(connection: sqlite3.Connection, count: int) -> list[AdmittedPrompt]:
    """The newest prompts that came from the data loader, newest first; those before other data was accepted, and those
    that a checkpoint had kept, are excluded."""
    known = meta(connection)
    passed_over = max(len((known.get("base") or {}).get("prompts", ())), int(known.get(ACCEPTED, 0)))
    rows = connection.execute(
        "SELECT epoch, position, uid, prompt, fields FROM groups WHERE serial > ? ORDER BY id DESC LIMIT ?",
        (passed_over, count),
    )
    return [AdmittedPrompt(*row) for row in rows]


def untrained_prompts(connection: sqlite3.Connection, step: int) -> list[Prompt]:
    """The prompts of groups that are admitted and not trained before ``step``, in admission order."""
    rows = connection.execute(
        "SELECT id FROM groups WHERE id IN "
        f"(SELECT id FROM groups WHERE {OUTSTANDING} UNION ALL SELECT id FROM groups WHERE step >= ?) ORDER BY id",
        (step,),
    ).fetchall()
    return [read_group(connection, group_id).prompt for (group_id,) in rows]


def solved_streaks(connection: sqlite3.Connection) -> dict[str, int]:
    """By uid, in how many groups in a row up to the newest all rollouts were correct. Reads the entire
    history."""
    in_a_row: dict[str, int] = {}
    for uid, lowest in connection.execute(
        """
        SELECT g.uid, min(r.reward) FROM groups g JOIN rollouts r ON r.group_id = g.id
        WHERE g.state IN ('finished', 'taken') OR (g.state = 'rejected' AND g.reason = 'uniform')
        GROUP BY g.id ORDER BY g.id
        """
    ):
        if lowest >= CORRECT:
            in_a_row[uid] = in_a_row.get(uid, 0) + 1
        else:
            in_a_row.pop(uid, None)
    return in_a_row


def _number(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])
