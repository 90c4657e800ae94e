"""A run as one stream of typed events, read from the journal of a live run, a dead one or a copy.

The journal has a row for everything that happened, with the time at which it was recorded. A class of event names its
fields and the query that fills them, in the same order. docs/journal.md lists them.

Invariant: one process writes the journal and commits in the order of its notes, so a reader of the events of a kind up
to one time has missed none of that kind before it, unless the clock was set back.

Steps are counted from 1, as everywhere but in the journal. Times are unix seconds.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields
from heapq import merge
from typing import Any, ClassVar, Self

STALL = "stall"
"""The kind of failure in the journal that is not a fault: a part has been waiting for long."""


def metrics_of(text: str | None) -> dict[str, float]:
    """The column ``metrics``."""
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
    """Something that happened at the unix time ``at``."""

    name: ClassVar[str]
    query: ClassVar[str]
    """Selects the fields, in their order, of the rows recorded after ``:since``. It may leave out groups before
    ``:group`` and steps before ``:step``."""

    at: float

    @classmethod
    def read(cls, connection: sqlite3.Connection, since: float = 0.0, first: Open = BEGINNING) -> Iterator[Self]:
        """The events of this class after ``since`` and from ``first`` on, by time."""
        rows = connection.execute(f"{cls.query} ORDER BY 1", {"since": since, **asdict(first)})
        return (cls(*row) for row in rows)

    def facts(self) -> dict[str, Any]:
        """All fields but the time, as JSON has them."""
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
    """Tokens of one weight version (-1: given, not sampled) were recorded: of an unfinished rollout in the pieces in
    which they came, of a finished one split where the version changes."""

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
    """A rollout is generated and recorded; ``tokens`` are those sampled, of versions ``oldest`` to ``newest``."""

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
    """A rollout has its reward, or none and why; without both it is masked. ``metrics`` are the task's other
    measurements."""

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
    """A group ended: ``finished``, ``rejected`` (with the reason) or ``requeued``. One that is in a batch by now had
    been finished."""

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
    """An engine serves: it has proved the current weights. One that died and is started again joins again."""

    name = "join"
    query = "SELECT at, engine FROM engine_changes WHERE at > :since AND change = 'join'"

    engine: str


@dataclass(frozen=True, slots=True)
class Leave(Event):
    """An engine has left the run, and its requests continue on others; ``reason`` says why."""

    name = "leave"
    query = "SELECT at, engine, reason FROM engine_changes WHERE at > :since AND change = 'leave'"

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Batch(Event):
    """A batch was taken for training; ``late`` groups of it were past their deadline (``on_stale: train``)."""

    name = "batch"
    query = "SELECT taken_at, step + 1, version, late FROM batches WHERE taken_at > :since AND step >= :step"

    step: int
    version: int
    late: int


@dataclass(frozen=True, slots=True)
class Step(Event):
    """A step is trained and reported; ``metrics`` as in docs/metrics.md."""

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
    """Every serving engine has proved a weight version. ``gap`` and ``change`` are of the probe's log-probs (nats)."""

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
    """A checkpoint is complete; it took ``seconds``, and training stood still for ``stall_s``. It was removed at
    ``removed_at``, if it was. ``uploaded_at`` and ``upload_failure``: when `checkpoints.upload` had copied it, or why
    the copy failed."""

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
    """An evaluation is done; its tokens are of weight versions ``oldest`` to ``newest``."""

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
    """A part failed, whether or not the run continued."""

    name = "fault"
    query = f"SELECT at, kind, part, message FROM failures WHERE at > :since AND kind != '{STALL}'"

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


KINDS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        *(Start, Admit, Segment, Finish, Score, Group, Request, Batch, Step),
        *(Join, Leave, Publish, Checkpoint, Evaluation, Fault, Stall),
    )
}
"""All kinds of events, by name."""


def events(connection: sqlite3.Connection, kinds: Collection[str] = (), since: float = 0.0) -> Iterator[Event]:
    """The events recorded after ``since``, by time; ``kinds`` are names of ``KINDS``, none for all."""
    return merge(*(KINDS[name].read(connection, since) for name in kinds or KINDS), key=_time)


class Reader:
    """Continues where it stopped, with a new connection at each call; a call costs as much as there is new."""

    def __init__(self, kinds: Collection[str] = (), since: float = 0.0) -> None:
        self._since = dict.fromkeys(kinds or KINDS, since)
        self._open = BEGINNING

    def read(self, connection: sqlite3.Connection) -> Iterator[Event]:
        """The events since the last call. They have to be taken before the next one."""
        readers = [KINDS[name].read(connection, since, self._open) for name, since in self._since.items()]
        for event in merge(*readers, key=_time):
            self._since[event.name] = event.at
            yield event
        # Only now: the queries above still needed the old value.
        self._open = Open(
            *connection.execute(
                "SELECT coalesce((SELECT min(id) FROM groups WHERE state IN ('running', 'finished')), "
                "(SELECT max(id) + 1 FROM groups), 0), "
                "(SELECT coalesce(max(step), 0) FROM batches WHERE trained_at IS NOT NULL)"
            ).fetchone()
        )


def _time(event: Event) -> float:
    return event.at
