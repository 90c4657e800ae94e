"""When a run's groups were generated and its batches trained, read from the journal. Times are unix seconds."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from asyncrl_cli.journal.queries import standing
from asyncrl_cli.records.groups import BufferSettings


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """One group of the record; ``ended_at`` is None while it runs."""

    admitted_at: float
    ended_at: float | None
    rejected: bool


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """One trained batch of the record. ``publish_s`` and ``save_s`` are what the publish and the checkpoint after it
    took, 0 when there was none; ``published_at`` is when the publish was over."""

    taken_at: float
    trained_at: float
    published_at: float | None = None
    publish_s: float = 0.0
    save_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Recording:
    """What a journal knows of a run's times: groups in admission order, trained batches in order.

    ``settings.total_steps`` counts the steps from the record's first one on. ``starts`` are the times at which
    processes began to write. ``moments``, sorted, are times at which something went
    on; they matter only where there are several starts.
    """

    settings: BufferSettings
    groups: Sequence[GroupTimes]
    batches: Sequence[BatchTimes]
    starts: Sequence[float] = ()
    moments: Sequence[float] = ()


def recording(connection: sqlite3.Connection) -> Recording:
    """The times that the what-if simulation goes by (unix seconds)."""
    where = standing(connection)
    every = where.settings.publish_every
    published = {
        version * every - 1: (at, seconds)
        for version, at, seconds in connection.execute("SELECT version, at, seconds FROM publishes")
    }
    saved = {step - 1: seconds for step, seconds in connection.execute("SELECT step, seconds FROM checkpoints")}
    starts = [at for (at,) in connection.execute("SELECT at FROM starts ORDER BY id")]
    groups = [
        GroupTimes(admitted_at, ended_at, state == "rejected")
        for state, admitted_at, ended_at in connection.execute(
            "SELECT state, admitted_at, ended_at FROM groups ORDER BY id"
        )
    ]
    batches = [
        BatchTimes(taken_at, trained_at, *published.get(step, (None, 0.0)), saved.get(step, 0.0))
        for step, taken_at, trained_at in connection.execute(
            "SELECT step, taken_at, trained_at FROM batches WHERE trained_at IS NOT NULL ORDER BY step"
        )
    ]
    return Recording(
        settings=replace(where.settings, total_steps=where.settings.total_steps - where.first_step),
        groups=tuple(groups),
        batches=tuple(batches),
        starts=tuple(starts),
        moments=_moments(connection, groups, batches) if len(starts) > 1 else (),
    )


def _moments(connection: sqlite3.Connection, groups: list[GroupTimes], batches: list[BatchTimes]) -> tuple[float, ...]:
    """When something is known to have gone on, sorted; the gaps round a start are the time that the run was down."""
    recorded = (at for (at,) in connection.execute("SELECT recorded_at FROM rollouts"))
    of_groups = (group.ended_at for group in groups if group.ended_at is not None)
    of_batches = chain.from_iterable((batch.taken_at, batch.trained_at) for batch in batches)
    return tuple(sorted(chain(recorded, of_groups, of_batches)))
