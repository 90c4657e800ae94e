"""A run's progress, read from the journal. The ledger, a resume and all pages use it.

All functions take a connection from ``reading`` or ``snapshot``, or the writer's. Steps count from 0 here.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl_cli.journal.rollout_rows import read_group
from asyncrl_cli.records.groups import BufferSettings, LedgerState
from asyncrl_cli.records.prompt import OWN_UID_PREFIX, Prompt
from asyncrl_cli.records.training import CORRECT

# SQLite takes a partial index only for a query that repeats the index's own condition.
OUTSTANDING = "state IN ('running', 'finished')"
DROPPED = "state IN ('rejected', 'requeued')"
ACCEPTED = "accepted_data_to"
"""Key in ``meta``: prompts up to this serial are not compared, because a change of the data was accepted."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come.

    Args:
        settings: the buffer's bounds, as last recorded.
        first_step: step at which this journal begins; above 0 if an earlier journal was abandoned.
        step: number of batches taken.
        version: newest published weight version.
    """

    settings: BufferSettings
    first_step: int
    step: int
    version: int


def progress(connection: sqlite3.Connection) -> Progress:
    recorded = meta(connection)
    settings = BufferSettings(**recorded["settings"])
    first_step = int((recorded.get("base") or {}).get("step", 0))
    step, version = max(steps_taken(connection), first_step), newest_version(connection)
    return Progress(
        settings, first_step=first_step, step=step, version=max(version, first_step // settings.publish_every)
    )


def meta(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return the rows' metadata: bounds, group size, and the state at which the history begins."""
    return {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def base(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return the checkpoint's state with which the journal's history begins; empty if it begins at step 0."""
    base_state: dict[str, Any] = meta(connection).get("base") or {}
    return base_state


# -- steps and versions


def steps_taken(connection: sqlite3.Connection) -> int:
    """Return the step after the last batch."""
    return _integer(connection, "SELECT coalesce(max(step) + 1, 0) FROM batches")


def steps_trained(connection: sqlite3.Connection) -> int:
    """Return the step after the last step that was reported as trained."""
    return _integer(connection, "SELECT coalesce(max(step) + 1, 0) FROM batches WHERE trained_at IS NOT NULL")


def newest_version(connection: sqlite3.Connection) -> int:
    """Return the newest published weight version; 0 without one."""
    return _integer(connection, "SELECT coalesce(max(version), 0) FROM publishes")


def checksum(connection: sqlite3.Connection, version: int) -> str | None:
    """Return the checksum of a published version's bytes; None if the publish is not recorded."""
    row = connection.execute("SELECT checksum FROM publishes WHERE version = ?", (version,)).fetchone()
    return str(row[0]) if row else None


def checkpoints_to_upload(connection: sqlite3.Connection) -> set[int]:
    """Return the steps of all checkpoints that exist and were not uploaded."""
    query = "SELECT step FROM checkpoints WHERE removed_at IS NULL AND uploaded_at IS NULL"
    return {step for (step,) in connection.execute(query)}


# -- groups and their prompts


def ledger_state(connection: sqlite3.Connection) -> LedgerState:
    """Return the ledger's state that the rows describe."""
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
        late=_integer(connection, "SELECT coalesce(sum(late), 0) FROM batches"),
    )


def dropped_groups(connection: sqlite3.Connection) -> dict[str, dict[str, int]]:
    """Count ``rejected`` and ``requeued`` groups by reason."""
    dropped: dict[str, dict[str, int]] = {"rejected": {}, "requeued": {}}
    for state, reason, count in connection.execute(
        f"SELECT state, reason, count(*) FROM groups WHERE {DROPPED} GROUP BY state, reason"
    ):
        dropped[state][reason] = count
    return dropped


def next_group(connection: sqlite3.Connection) -> int:
    """Return the next group's index."""
    return _integer(connection, "SELECT coalesce(max(id) + 1, 0) FROM groups")


def newest_serial(connection: sqlite3.Connection) -> int:
    """Return the newest admitted prompt's serial; 0 without one."""
    row = connection.execute("SELECT serial FROM groups WHERE serial IS NOT NULL ORDER BY id DESC LIMIT 1").fetchone()
    return int(row[0]) if row else 0


def first_uids(connection: sqlite3.Connection, count: int) -> list[str]:
    """Return the uids of the first ``count`` admitted prompts, without programs' own prompts."""
    rows = connection.execute(
        "SELECT uid FROM groups WHERE serial IS NOT NULL AND uid NOT GLOB ? ORDER BY id LIMIT ?",
        (f"{OWN_UID_PREFIX}*", count),
    )
    return [uid for (uid,) in rows]


def loader_position(connection: sqlite3.Connection) -> dict[str, int] | None:
    """Return the data loader's position after the newest admission that moved it; None without one."""
    row = connection.execute(
        "SELECT epoch, position FROM groups WHERE serial IS NOT NULL ORDER BY id DESC LIMIT 1"
    ).fetchone()
    return {"epoch": row[0], "position": row[1]} if row else None


class AdmittedPrompt(NamedTuple):
    """An admitted prompt, and the data loader's position after it; ``prompt`` and ``fields`` are JSON."""

    epoch: int
    position: int
    uid: str
    prompt: str
    fields: str


def newest_prompts(connection: sqlite3.Connection, count: int) -> list[AdmittedPrompt]:
    """Return the newest prompts that came from the data loader, newest first. Excludes programs' own prompts, prompts
    from before a change of the data was accepted, and prompts that a checkpoint had kept."""
    recorded = meta(connection)
    passed_over = max(len((recorded.get("base") or {}).get("prompts", ())), int(recorded.get(ACCEPTED, 0)))
    rows = connection.execute(
        "SELECT epoch, position, uid, prompt, fields FROM groups WHERE serial > ? AND uid NOT GLOB ? "
        "ORDER BY id DESC LIMIT ?",
        (passed_over, f"{OWN_UID_PREFIX}*", count),
    )
    return [AdmittedPrompt(*row) for row in rows]


def untrained_prompts(connection: sqlite3.Connection, step: int) -> list[Prompt]:
    """Return the prompts of all groups that are admitted and not trained before ``step``, in admission order, without
    programs' own prompts: those programs do not wait any more."""
    rows = connection.execute(
        "SELECT id FROM groups WHERE id IN "
        f"(SELECT id FROM groups WHERE {OUTSTANDING} UNION ALL SELECT id FROM groups WHERE step >= ?) "
        "AND uid NOT GLOB ? ORDER BY id",
        (step, f"{OWN_UID_PREFIX}*"),
    ).fetchall()
    return [read_group(connection, group_id).prompt for (group_id,) in rows]


def solved_streaks(connection: sqlite3.Connection) -> dict[str, int]:
    """Return, by uid, the number of newest groups in a row with only correct rollouts. Reads the entire history."""
    in_a_row: dict[str, int] = {}
    for uid, lowest in connection.execute(
        """
        SELECT g.uid, min(r.reward) FROM groups g JOIN rollouts r ON r.group_id = g.id
        WHERE g.state IN ('finished', 'taken') OR (g.state = 'rejected' AND g.reason = 'uniform')
        GROUP BY g.id ORDER BY g.ended_at, g.id
        """
    ):
        if lowest >= CORRECT:
            in_a_row[uid] = in_a_row.get(uid, 0) + 1
        else:
            in_a_row.pop(uid, None)
    return in_a_row


def _integer(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])
