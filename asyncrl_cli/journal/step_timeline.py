"""The trainer's work over time, read from the journal: each step with the publish that followed it.

Invariant: one step's spans do not overlap and come in the order waiting, training, publishing. So they can be drawn on
one line and added up. If two processes' clocks put times slightly out of order, they are moved into order here.

Steps count from 0 here. Times are unix seconds.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl_cli.journal.events import metrics_of
from asyncrl_cli.journal.rollout_rows import REQUEST_COLUMNS
from asyncrl_cli.records.generation import EngineRequest

EVALUATION = "eval"
"""Prefix of the request ids of evaluations."""
HELD = "time/publish_s"
"""A step's metric: seconds for which the publish after the step kept the trainer busy."""


@dataclass(frozen=True, slots=True)
class PublishSpan:
    """A published version, from the trainer's first tensor to the last engine's proof; ``stall_s`` is the longest
    pause of an engine."""

    version: int
    begun_at: float
    ended_at: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One trained batch, and the publish after it if one was due."""

    step: int
    version: int
    taken_at: float
    trained_until: float
    reported_at: float
    publish: PublishSpan | None
    metrics: Mapping[str, float]

    @property
    def ended_at(self) -> float:
        """Time when the trainer was free for the next batch; engines may have loaded the version later."""
        return self.trained_until + self.metrics.get(HELD, 0.0)


def first_publish(connection: sqlite3.Connection) -> PublishSpan | None:
    """Return the publish of the run's initial weights, before this journal's first step."""
    row = connection.execute(
        "SELECT version, at, seconds, stall_s FROM publishes "
        "WHERE step <= (SELECT coalesce(min(step), 0) FROM batches) ORDER BY version LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    version, at, seconds, stall_s = row
    return PublishSpan(version, begun_at=at - seconds, ended_at=at, stall_s=stall_s)


def step_spans(connection: sqlite3.Connection, publish_every: int) -> Iterator[StepSpan]:
    """Yield the trained steps in order."""
    rows = connection.execute(
        "SELECT b.step, b.version, b.taken_at, b.trained_at, b.metrics, p.version, p.at, p.seconds, p.stall_s "
        "FROM batches b LEFT JOIN publishes p "
        "ON p.version = (b.step + 1) / :every AND (b.step + 1) % :every = 0 "
        "WHERE b.trained_at IS NOT NULL ORDER BY b.step",
        {"every": publish_every},
    )
    for step, version, taken_at, reported_at, text, published, at, seconds, stall_s in rows:
        metrics = metrics_of(text)
        trained_until = taken_at + metrics.get("time/train_s", max(0.0, reported_at - taken_at - (seconds or 0.0)))
        publish = None
        if published is not None:
            ended_at = max(at, trained_until)
            begun_at = min(max(at - seconds, trained_until), ended_at)
            publish = PublishSpan(published, begun_at=begun_at, ended_at=ended_at, stall_s=stall_s)
        yield StepSpan(
            step,
            version=version,
            taken_at=taken_at,
            trained_until=trained_until,
            reported_at=reported_at,
            publish=publish,
            metrics=metrics,
        )


# -- groups


def last_groups(connection: sqlite3.Connection) -> dict[int, tuple[float | None, float | None]]:
    """Return, by step, the times when its batch's last group was scored, and when that group had its last tokens."""
    return {
        step: (scored_at, generated_at)
        for step, scored_at, generated_at in connection.execute(
            """
            SELECT last.step, last.ended_at, (SELECT max(recorded_at) FROM rollouts r WHERE r.group_id = last.id)
            FROM (SELECT step, id, max(ended_at) AS ended_at FROM groups WHERE step IS NOT NULL GROUP BY step) last
            """
        )
    }


def finished_groups(connection: sqlite3.Connection) -> Iterator[tuple[float, int | None]]:
    """Yield when each group finished, in order of time, and the step that took it."""
    return connection.execute(
        "SELECT ended_at, step FROM groups WHERE state IN ('finished', 'taken') AND ended_at IS NOT NULL "
        "ORDER BY ended_at"
    )


class GroupSpan(NamedTuple):
    """A group's life; ``ended_at`` is None while it runs."""

    group_id: int
    step: int | None
    admitted_at: float
    ended_at: float | None


def group_spans(connection: sqlite3.Connection, first: int) -> Iterator[GroupSpan]:
    """Yield the lives of all groups from ``first`` on."""
    rows = connection.execute("SELECT id, step, admitted_at, ended_at FROM groups WHERE id >= ? ORDER BY id", (first,))
    return map(GroupSpan._make, rows)


def first_group(connection: sqlite3.Connection, step: int) -> int:
    """Return a batch's lowest group; 0 without one."""
    row = connection.execute("SELECT min(id) FROM groups WHERE step = ?", (step,)).fetchone()
    return int(row[0] or 0)


def staleness_of(connection: sqlite3.Connection, versions: dict[int, int]) -> Counter[int]:
    """Count the groups of steps by staleness; ``versions`` maps each step to the version that it was trained at."""
    ages: Counter[int] = Counter()
    for step, version in versions.items():
        ages.update(
            version - admitted
            for (admitted,) in connection.execute("SELECT version FROM groups WHERE step = ?", (step,))
        )
    return ages


class RolloutTimes(NamedTuple):
    """A recorded rollout and its group's state; ``oldest`` and ``newest`` are its tokens' versions."""

    group_id: int
    rollout_index: int
    uid: str
    state: str
    step: int | None
    prompt_tokens: int
    admitted_at: float
    recorded_at: float
    tokens: int
    reward: float | None
    finish_reason: str | None
    oldest: int | None
    newest: int | None


def rollout_times(connection: sqlite3.Connection, first: int = 0) -> Iterator[RolloutTimes]:
    """Yield the rollouts of all groups from ``first`` on, in admission order."""
    rows = connection.execute(
        "SELECT g.id, r.rollout_index, g.uid, g.state, g.step, length(g.prompt_ids) / 4, g.admitted_at, r.recorded_at, "
        "r.tokens, r.reward, r.finish_reason, r.oldest, r.newest "
        "FROM groups g JOIN rollouts r ON r.group_id = g.id WHERE g.id >= ? ORDER BY g.id, r.rollout_index",
        (first,),
    )
    return map(RolloutTimes._make, rows)


# -- engines


def engine_requests(connection: sqlite3.Connection, since: float = 0.0) -> Iterator[EngineRequest]:
    """Yield the requests that ended after the unix time ``since``, in the order they began."""
    rows = connection.execute(
        f"SELECT {REQUEST_COLUMNS} FROM engine_requests WHERE ended_at > ? ORDER BY begun_at", (since,)
    )
    return (EngineRequest(*row) for row in rows)


def evaluation_spans(connection: sqlite3.Connection) -> list[tuple[float, float]]:
    """Return begin and end of every request in an evaluation."""
    return connection.execute(
        f"SELECT begun_at, ended_at FROM engine_requests WHERE request GLOB '{EVALUATION}*' ORDER BY begun_at"
    ).fetchall()


def pauses_since(connection: sqlite3.Connection, since: float) -> dict[str, list[tuple[float, float]]]:
    """Return, by engine, begin and end of its pauses for new weights, in order of time."""
    pauses: dict[str, list[tuple[float, float]]] = {}
    for (text,) in connection.execute("SELECT pauses FROM publishes WHERE at > ? ORDER BY at", (since,)):
        for engine, (begin, end) in json.loads(text).items():
            if end > begin:
                pauses.setdefault(engine, []).append((begin, end))
    return pauses
