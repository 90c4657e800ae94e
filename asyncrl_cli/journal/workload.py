"""The work of a run's engines, read from the journal: lengths of rollouts, engine requests, pauses for new weights.

``since`` is a unix time (s): of a long run only what came later is read. Steps are counted from 0 here, as in the
journal.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from asyncrl_cli.journal.rollout_rows import REQUEST_COLUMNS
from asyncrl_cli.records.generation import EngineRequest

EVALUATION = "eval"
"""The ids of an evaluation's requests begin with this."""


class RolloutLength(NamedTuple):
    """A rollout of a group that has ended; tokens of its prompt, and those that it sampled."""

    group_id: int
    rollout_index: int
    state: str
    step: int | None
    prompt_tokens: int
    tokens: int
    admitted_at: float
    recorded_at: float


class GroupSpan(NamedTuple):
    """A group's life; ``ended_at`` is None while it runs."""

    group_id: int
    step: int | None
    admitted_at: float
    ended_at: float | None


def first_group(connection: sqlite3.Connection, step: int) -> int:
    """The lowest group of a batch; 0 when it has none."""
    row = connection.execute("SELECT min(id) FROM groups WHERE step = ?", (step,)).fetchone()
    return int(row[0] or 0)


def rollout_lengths(connection: sqlite3.Connection, first: int) -> Iterator[RolloutLength]:
    """The rollouts of groups from ``first`` on that are taken or rejected, in the order of admission."""
    rows = connection.execute(
        "SELECT g.id, r.rollout_index, g.state, g.step, length(g.prompt_ids) / 4, r.tokens, g.admitted_at, "
        "r.recorded_at FROM groups g JOIN rollouts r ON r.group_id = g.id "
        "WHERE g.id >= ? AND g.state IN ('taken', 'rejected') ORDER BY g.id, r.rollout_index",
        (first,),
    )
    return map(RolloutLength._make, rows)


def group_spans(connection: sqlite3.Connection, first: int) -> Iterator[GroupSpan]:
    """The lives of the groups from ``first`` on."""
    rows = connection.execute("SELECT id, step, admitted_at, ended_at FROM groups WHERE id >= ? ORDER BY id", (first,))
    return map(GroupSpan._make, rows)


def requests_since(connection: sqlite3.Connection, since: float) -> list[EngineRequest]:
    """The requests that ended after ``since``, by their begin."""
    rows = connection.execute(
        f"SELECT {REQUEST_COLUMNS} FROM engine_requests WHERE ended_at > ? ORDER BY begun_at", (since,)
    )
    return [EngineRequest(*row) for row in rows]


def evaluation_spans(connection: sqlite3.Connection) -> list[tuple[float, float]]:
    """Begin and end of every request of an evaluation."""
    return connection.execute(
        f"SELECT begun_at, ended_at FROM engine_requests WHERE request GLOB '{EVALUATION}*' ORDER BY begun_at"
    ).fetchall()


def pauses_since(connection: sqlite3.Connection, since: float) -> dict[str, list[tuple[float, float]]]:
    """By engine, begin and end of its pauses for new weights, by time."""
    pauses: dict[str, list[tuple[float, float]]] = {}
    for (text,) in connection.execute("SELECT pauses FROM publishes WHERE at > ? ORDER BY at", (since,)):
        for engine, (begin, end) in json.loads(text).items():
            if end > begin:
                pauses.setdefault(engine, []).append((begin, end))
    return pauses


def staleness_of(connection: sqlite3.Connection, versions: dict[int, int]) -> Counter[int]:
    """The groups of these steps by their staleness; ``versions``: the versions that the steps were trained at."""
    ages: Counter[int] = Counter()
    for step, version in versions.items():
        ages.update(
            version - admitted
            for (admitted,) in connection.execute("SELECT version FROM groups WHERE step = ?", (step,))
        )
    return ages
