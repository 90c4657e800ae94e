"""A run as one stream of events, read from a live run's journal, a dead run's or a copy. docs/journal.md lists them.

Invariant: one process writes the journal and commits in the order of its notes. So a reader that has read a kind of
event up to some time has missed no earlier event of that kind, unless the clock was set back.

Steps count from 1, as everywhere outside the journal. Times are unix seconds.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator
from heapq import merge
from operator import attrgetter
from typing import Any, NamedTuple

STALL = "stall"
HEALTH = "health"
"""Kinds of rows among the journal's failures that are no faults: a part has been waiting for long; a finding of
``inspect.health`` has begun or ended."""

QUERIES = {
    "start": "SELECT at, kind AS process, host, pid, step AS steps_taken, version, note FROM starts WHERE at > :since",
    "admit": 'SELECT admitted_at, id AS "group", uid AS prompt, version FROM groups '
    "WHERE admitted_at > :since AND id >= :group",
    # An unfinished rollout's tokens come in the pieces that its engine reported. A finished rollout's tokens are split
    # where the version changes.
    "segment": "SELECT at, group_id || '-' || rollout_index AS rollout, branch, start, length(tokens) / 4 AS tokens, "
    "version FROM segments WHERE at > :since AND group_id >= :group",
    "finish": "SELECT recorded_at, group_id || '-' || rollout_index AS rollout, tokens, finish_reason, oldest, newest "
    "FROM rollouts WHERE recorded_at > :since AND group_id >= :group AND finish_reason IS NOT NULL",
    "score": "SELECT scored_at, group_id || '-' || rollout_index AS rollout, reward, coalesce(failure, '') AS failure, "
    "metrics FROM rollouts WHERE scored_at > :since AND group_id >= :group",
    "group": "SELECT ended_at, id AS \"group\", CASE WHEN state = 'taken' THEN 'finished' ELSE state END AS became, "
    "reason FROM groups WHERE ended_at > :since AND id >= :group",
    "request": "SELECT ended_at, request, engine, begun_at, ending FROM engine_requests WHERE ended_at > :since",
    "batch": "SELECT taken_at, step + 1 AS step, version, late FROM batches WHERE taken_at > :since AND step >= :step",
    "step": "SELECT trained_at, step + 1 AS step, version, digest, metrics FROM batches "
    "WHERE trained_at > :since AND step >= :step",
    "join": "SELECT at, engine FROM engine_changes WHERE at > :since AND change = 'join'",
    "leave": "SELECT at, engine, reason FROM engine_changes WHERE at > :since AND change = 'leave'",
    "publish": "SELECT at, version, step AS after_step, checksum, seconds, stall_s, gap, change FROM publishes "
    "WHERE at > :since",
    "checkpoint": "SELECT at, step AS after_step, folder, seconds, stall_s, removed_at, uploaded_at, upload_failure "
    "FROM checkpoints WHERE at > :since",
    "eval": "SELECT at, step AS after_step, kind, accuracy, mean_reward, mean_length, prompts, oldest, newest "
    "FROM evaluations WHERE at > :since",
    "fault": f"SELECT at, kind, part, message FROM failures WHERE at > :since AND kind NOT IN ('{STALL}', '{HEALTH}')",
    "stall": f"SELECT at, part, message FROM failures WHERE at > :since AND kind = '{STALL}'",
    "health": f"SELECT at, part AS rule, message FROM failures WHERE at > :since AND kind = '{HEALTH}'",
}
"""For each kind of event the query for its time and its other fields. It selects the rows recorded after ``:since``,
and may skip groups before ``:group`` and steps before ``:step``."""


class Event(NamedTuple):
    """An event at the unix time ``at``; ``facts`` are its fields as JSON values."""

    name: str
    at: float
    facts: dict[str, Any]


def metrics_of(text: str | None) -> dict[str, float]:
    """Decode the column ``metrics``."""
    metrics: dict[str, float] = json.loads(text or "{}")
    return metrics


def events(connection: sqlite3.Connection, kinds: Collection[str] = (), since: float = 0.0) -> Iterator[Event]:
    """Yield the events recorded after ``since``, by time; ``kinds`` are names in ``QUERIES``, all if empty."""
    return Reader(kinds, since).read(connection)


class Reader:
    """Continues where it stopped, with a new connection at each call. The cost of a call depends on the new events."""

    def __init__(self, kinds: Collection[str] = (), since: float = 0.0) -> None:
        self._since = dict.fromkeys(kinds or QUERIES, since)
        # The first group and the first step (from 0) that can still have new events.
        self._open = (0, 0)

    def read(self, connection: sqlite3.Connection) -> Iterator[Event]:
        """Yield the events since the last call. Take all of them before the next call."""
        streams = [_events_named(connection, name, since, self._open) for name, since in self._since.items()]
        for event in merge(*streams, key=attrgetter("at")):
            self._since[event.name] = event.at
            yield event
        # Only now: the queries above had to include groups that have ended since the last call.
        self._open = connection.execute(
            "SELECT coalesce((SELECT min(id) FROM groups WHERE state IN ('running', 'finished')), "
            "(SELECT max(id) + 1 FROM groups), 0), "
            "(SELECT coalesce(max(step), 0) FROM batches WHERE trained_at IS NOT NULL)"
        ).fetchone()


def _events_named(
    connection: sqlite3.Connection, name: str, since: float, first_open: tuple[int, int]
) -> Iterator[Event]:
    group_id, step = first_open
    rows = connection.execute(f"{QUERIES[name]} ORDER BY 1", {"since": since, "group": group_id, "step": step})
    columns = [column for column, *_ in rows.description[1:]]
    for event_time, *values in rows:
        facts = dict(zip(columns, values, strict=True))
        if "metrics" in facts:
            facts["metrics"] = metrics_of(facts["metrics"])
        yield Event(name, event_time, facts)
