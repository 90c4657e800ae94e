"""What the trainer did when, read from the journal: step after step, with the publish that followed each.

Invariant: the spans of one step do not overlap and come in the order waiting, training, publishing, so that they can be
drawn on one line and added up. Times that two processes noted may cross by moments; here they are put in order.

Steps are counted from 0 here, as in the journal. Times are unix seconds.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishSpan:
    """A published version, from the trainer's first tensor to the last engine's proof; ``stall_s`` as in the journal,
    the longest pause of an engine."""

    version: int
    begun_at: float
    ended_at: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One trained batch: taken, trained until ``trained_until``, reported at ``reported_at``; published if due."""

    step: int
    version: int
    taken_at: float
    trained_until: float
    reported_at: float
    publish: PublishSpan | None
    metrics: Mapping[str, float]

    @property
    def ended_at(self) -> float:
        """When the trainer was free for the next batch."""
        return self.publish.ended_at if self.publish else self.trained_until


def first_publish(connection: sqlite3.Connection) -> PublishSpan | None:
    """The publish that no step of this journal came before: that of the weights which the run started from."""
    row = connection.execute(
        "SELECT version, at, seconds, stall_s FROM publishes "
        "WHERE step <= (SELECT coalesce(min(step), 0) FROM batches) ORDER BY version LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    version, at, seconds, stall_s = row
    return PublishSpan(version, at - seconds, at, stall_s)


_RENAMED = {"response/cut": "response/truncated_ratio", "data/retired_prompts": "data/filtered_prompts"}
"""Today's names of metrics that older runs recorded under others."""


def step_spans(connection: sqlite3.Connection, publish_every: int) -> Iterator[StepSpan]:
    """The trained steps, one at a time, in order."""
    rows = connection.execute(
        "SELECT b.step, b.version, b.taken_at, b.trained_at, b.metrics, p.version, p.at, p.seconds, p.stall_s "
        "FROM batches b LEFT JOIN publishes p "
        "ON p.version = (b.step + 1) / :every AND (b.step + 1) % :every = 0 "
        "WHERE b.trained_at IS NOT NULL ORDER BY b.step",
        {"every": publish_every},
    )
    for step, version, taken_at, reported_at, text, published, at, seconds, stall_s in rows:
        metrics = {_RENAMED.get(name, name): value for name, value in json.loads(text or "{}").items()}
        trained_until = taken_at + metrics.get("time/train_s", max(0.0, reported_at - taken_at - (seconds or 0.0)))
        publish = None
        if published is not None:
            ended_at = max(at, trained_until)
            begun_at = min(max(at - seconds, trained_until), ended_at)
            publish = PublishSpan(published, begun_at, ended_at, stall_s)
        yield StepSpan(step, version, taken_at, trained_until, reported_at, publish, metrics)
