"""A run as one stream of events, read from a live run's journal, a dead run's or a copy. docs/journal.md lists them.

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
    "start": "SELECT at, kind AS process, host, pid, step AS steps_taken, version, note FROM starts",
    "admit": 'SELECT admitted_at, id AS "group", uid AS prompt, version FROM groups',
    # An unfinished rollout's tokens come in the pieces that its engine reported. A finished rollout's tokens are split
    # where the version changes.
    "segment": "SELECT at, group_id || '-' || rollout_index AS rollout, branch, start, length(tokens) / 4 AS tokens, "
    "version FROM segments",
    "finish": "SELECT recorded_at, group_id || '-' || rollout_index AS rollout, tokens, finish_reason, oldest, newest "
    "FROM rollouts WHERE finish_reason IS NOT NULL",
    "score": "SELECT scored_at, group_id || '-' || rollout_index AS rollout, reward, coalesce(failure, '') AS failure, "
    "metrics FROM rollouts WHERE scored_at IS NOT NULL",
    "group": "SELECT ended_at, id AS \"group\", CASE WHEN state = 'taken' THEN 'finished' ELSE state END AS became, "
    "reason FROM groups WHERE ended_at IS NOT NULL",
    "request": "SELECT ended_at, request, engine, begun_at, ending FROM engine_requests",
    "batch": "SELECT taken_at, step + 1 AS step, version, late FROM batches",
    "step": "SELECT trained_at, step + 1 AS step, version, digest, metrics FROM batches WHERE trained_at IS NOT NULL",
    "join": "SELECT at, engine FROM engine_changes WHERE change = 'join'",
    "leave": "SELECT at, engine, reason FROM engine_changes WHERE change = 'leave'",
    "publish": "SELECT at, version, step AS after_step, checksum, seconds, stall_s, gap, change FROM publishes",
    "checkpoint": "SELECT at, step AS after_step, folder, seconds, stall_s, removed_at, uploaded_at, upload_failure "
    "FROM checkpoints",
    "eval": "SELECT at, step AS after_step, kind, accuracy, mean_reward, mean_length, prompts, oldest, newest "
    "FROM evaluations",
    "fault": f"SELECT at, kind, part, message FROM failures WHERE kind NOT IN ('{STALL}', '{HEALTH}')",
    "stall": f"SELECT at, part, message FROM failures WHERE kind = '{STALL}'",
    "health": f"SELECT at, part AS rule, message FROM failures WHERE kind = '{HEALTH}'",
}
"""For each kind of event the query for its time and its other fields."""


class Event(NamedTuple):
    """An event at the unix time ``at``; ``facts`` are its fields as JSON values."""

    name: str
    at: float
    facts: dict[str, Any]


def metrics_of(text: str | None) -> dict[str, float]:
    """Decode the column ``metrics``."""
    metrics: dict[str, float] = json.loads(text or "{}")
    return metrics


def events(connection: sqlite3.Connection, kinds: Collection[str] = ()) -> Iterator[Event]:
    """Yield the events by time; ``kinds`` are names in ``QUERIES``, all if empty."""
    return merge(*(_events_named(connection, name) for name in dict.fromkeys(kinds or QUERIES)), key=attrgetter("at"))


def _events_named(connection: sqlite3.Connection, name: str) -> Iterator[Event]:
    rows = connection.execute(f"{QUERIES[name]} ORDER BY 1")
    columns = [column for column, *_ in rows.description[1:]]
    for event_time, *values in rows:
        facts = dict(zip(columns, values, strict=True))
        if "metrics" in facts:
            facts["metrics"] = metrics_of(facts["metrics"])
        yield Event(name, event_time, facts)
