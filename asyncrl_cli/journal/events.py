"""A run as one stream of typed events, read from a live run's journal, a dead run's or a copy.

The journal has a row for everything that happened, with the time of recording. An event class lists its fields and the
query that fills them, in the same order. docs/journal.md lists the events.

Invariant: one process writes the journal and commits in the order of its notes. So a reader that has read a kind of
event up to some time has missed no earlier event of that kind, unless the clock was set back.

Steps count from 1, as everywhere outside the journal. Times are unix seconds.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields
from heapq import merge
from typing import Any, ClassVar, Self

STALL = "stall"
HEALTH = "health"
"""Kinds of rows among the journal's failures that are no faults: a part has been waiting for long; a finding of
``inspect.health`` has begun or ended."""


def metrics_of(text: str | None) -> dict[str, float]:
    """Decode the column ``metrics``."""
    metrics: dict[str, float] = json.loads(text or "{}")
    return metrics


@dataclass(frozen=True, slots=True)
class Open:
    """The first group and the first step (from 0) that can still have new events."""

    group: int = 0
    step: int = 0


BEGINNING = Open()


@dataclass(frozen=True, slots=True)
class Event:
    """An event at the unix time ``at``."""

    name: ClassVar[str]
    query: ClassVar[str]
    """Selects the fields, in order, from the rows recorded after ``:since``. It may skip groups before ``:group`` and
    steps before ``:step``."""

    at: float

    @classmethod
    def read(cls, connection: sqlite3.Connection, since: float = 0.0, first: Open = BEGINNING) -> Iterator[Self]:
        """Yield the events of this class after ``since`` and from ``first`` on, by time."""
        rows = connection.execute(f"{cls.query} ORDER BY 1", {"since": since, **asdict(first)})
        return (cls(*row) for row in rows)

    def facts(self) -> dict[str, Any]:
        """All fields except the time, as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "at"}
        return {name: metrics_of(value) if name == "metrics" else value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Start(Event):
    """A process began to write the journal: ``train`` or ``resume``."""

    name = "start"
    query = "SELECT at, kind, host, pid, step, version, note FROM starts WHERE at > :since"

    process: str
    host: str
    pid: int
    steps_taken: int
    version: int
    note: str


@dataclass(frozen=True, slots=True)
class Admit(Event):
    """A group may be generated; ``version`` is the weight version that its staleness counts from."""

    name = "admit"
    query = "SELECT admitted_at, id, uid, version FROM groups WHERE admitted_at > :since AND id >= :group"

    group: int
    prompt: str
    version: int


@dataclass(frozen=True, slots=True)
class Segment(Event):
    """Tokens with one weight version (-1: given, not sampled) were recorded. An unfinished rollout's tokens come in the
    pieces that its engine reported; a finished rollout's tokens are split where the version changes."""

    name = "segment"
    query = (
        "SELECT at, group_id || '-' || rollout_index, branch, start, length(tokens) / 4, version FROM segments "
        "WHERE at > :since AND group_id >= :group"
    )

    rollout: str
    branch: int
    start: int
    tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class Finish(Event):
    """A rollout is generated and recorded; ``tokens`` counts its sampled tokens, with versions ``oldest`` to
    ``newest``."""

    name = "finish"
    query = (
        "SELECT recorded_at, group_id || '-' || rollout_index, tokens, finish_reason, oldest, newest FROM rollouts "
        "WHERE recorded_at > :since AND group_id >= :group AND finish_reason IS NOT NULL"
    )

    rollout: str
    tokens: int
    finish_reason: str
    oldest: int | None
    newest: int | None


@dataclass(frozen=True, slots=True)
class Score(Event):
    """A rollout has its reward, or the ``failure`` that prevented one; with neither, it is masked. ``metrics`` are the
    task's other measurements."""

    name = "score"
    query = (
        "SELECT scored_at, group_id || '-' || rollout_index, reward, coalesce(failure, ''), metrics FROM rollouts "
        "WHERE scored_at > :since AND group_id >= :group"
    )

    rollout: str
    reward: float | None
    failure: str
    metrics: str | None


@dataclass(frozen=True, slots=True)
class Group(Event):
    """A group ended: ``finished``, ``rejected`` (with the reason) or ``requeued``."""

    name = "group"
    query = (
        "SELECT ended_at, id, CASE WHEN state = 'taken' THEN 'finished' ELSE state END, reason FROM groups "
        "WHERE ended_at > :since AND id >= :group"
    )

    group: int
    became: str
    reason: str


@dataclass(frozen=True, slots=True)
class Request(Event):
    """A request has left an engine that had it since ``begun_at``."""

    name = "request"
    query = "SELECT ended_at, request, engine, begun_at, ending FROM engine_requests WHERE ended_at > :since"

    request: str
    engine: str
    begun_at: float
    ending: str


@dataclass(frozen=True, slots=True)
class Join(Event):
    """An engine serves: it has proved the current weights. It joins again after each restart."""

    name = "join"
    query = "SELECT at, engine FROM engine_changes WHERE at > :since AND change = 'join'"

    engine: str


@dataclass(frozen=True, slots=True)
class Leave(Event):
    """An engine has left the run, and its requests continue on other engines; ``reason`` says why."""

    name = "leave"
    query = "SELECT at, engine, reason FROM engine_changes WHERE at > :since AND change = 'leave'"

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Batch(Event):
    """A batch was taken for training; ``late`` counts its groups past their deadline (``on_stale: train``)."""

    name = "batch"
    query = "SELECT taken_at, step + 1, version, late FROM batches WHERE taken_at > :since AND step >= :step"

    step: int
    version: int
    late: int


@dataclass(frozen=True, slots=True)
class Step(Event):
    """A step is trained and reported; docs/metrics.md describes ``metrics``."""

    name = "step"
    query = (
        "SELECT trained_at, step + 1, version, digest, metrics FROM batches WHERE trained_at > :since AND step >= :step"
    )

    step: int
    version: int
    digest: str
    metrics: str | None


@dataclass(frozen=True, slots=True)
class Publish(Event):
    """Every serving engine has proved a weight version. ``gap`` and ``change`` measure the probe's log-probs (nats)."""

    name = "publish"
    query = "SELECT at, version, step, checksum, seconds, stall_s, gap, change FROM publishes WHERE at > :since"

    version: int
    after_step: int
    checksum: str
    seconds: float
    stall_s: float
    gap: float
    change: float


@dataclass(frozen=True, slots=True)
class Checkpoint(Event):
    """A checkpoint is complete. It took ``seconds``, and stopped training for ``stall_s``. ``removed_at`` is None while
    it exists. ``uploaded_at`` and ``upload_failure`` say when `checkpoints.upload` copied it, or why the copy
    failed."""

    name = "checkpoint"
    query = (
        "SELECT at, step, folder, seconds, stall_s, removed_at, uploaded_at, upload_failure FROM checkpoints "
        "WHERE at > :since"
    )

    after_step: int
    folder: str
    seconds: float
    stall_s: float
    removed_at: float | None
    uploaded_at: float | None
    upload_failure: str


@dataclass(frozen=True, slots=True)
class Evaluation(Event):
    """An evaluation is done; weight versions ``oldest`` to ``newest`` sampled its tokens."""

    name = "eval"
    query = (
        "SELECT at, step, kind, accuracy, mean_reward, mean_length, prompts, oldest, newest FROM evaluations "
        "WHERE at > :since"
    )

    after_step: int
    kind: str
    accuracy: float
    mean_reward: float
    mean_length: float
    prompts: int
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class Fault(Event):
    """A part failed; the run may have continued."""

    name = "fault"
    query = f"SELECT at, kind, part, message FROM failures WHERE at > :since AND kind NOT IN ('{STALL}', '{HEALTH}')"

    kind: str
    part: str
    message: str


@dataclass(frozen=True, slots=True)
class Stall(Event):
    """A part has been waiting for half of ``pipeline.stall_minutes``."""

    name = "stall"
    query = f"SELECT at, part, message FROM failures WHERE at > :since AND kind = '{STALL}'"

    part: str
    message: str


@dataclass(frozen=True, slots=True)
class Health(Event):
    """A finding of a ``rule`` (docs/watching.md) has begun or ended."""

    name = "health"
    query = f"SELECT at, part, message FROM failures WHERE at > :since AND kind = '{HEALTH}'"

    rule: str
    message: str


KINDS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        *(Start, Admit, Segment, Finish, Score, Group, Request, Batch, Step),
        *(Join, Leave, Publish, Checkpoint, Evaluation, Fault, Stall, Health),
    )
}
"""All event classes by name."""


def events(connection: sqlite3.Connection, kinds: Collection[str] = (), since: float = 0.0) -> Iterator[Event]:
    """Yield the events recorded after ``since``, by time; ``kinds`` are names in ``KINDS``, all if empty."""
    return merge(*(KINDS[name].read(connection, since) for name in kinds or KINDS), key=_time)


class Reader:
    """Continues where it stopped, with a new connection at each call. The cost of a call depends on the new events."""

    def __init__(self, kinds: Collection[str] = (), since: float = 0.0) -> None:
        self._since = dict.fromkeys(kinds or KINDS, since)
        self._open = BEGINNING

    def read(self, connection: sqlite3.Connection) -> Iterator[Event]:
        """Yield the events since the last call. Take all of them before the next call."""
        readers = [KINDS[name].read(connection, since, self._open) for name, since in self._since.items()]
        for event in merge(*readers, key=_time):
            self._since[event.name] = event.at
            yield event
        # Only now: the queries above had to include groups that have ended since the last call.
        self._open = Open(
            *connection.execute(
                "SELECT coalesce((SELECT min(id) FROM groups WHERE state IN ('running', 'finished')), "
                "(SELECT max(id) + 1 FROM groups), 0), "
                "(SELECT coalesce(max(step), 0) FROM batches WHERE trained_at IS NOT NULL)"
            ).fetchone()
        )


def _time(event: Event) -> float:
    return event.at
