"""A run's history, read from its journal: starts, failures, work, checkpoints and evaluations."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asyncrl_cli.journal.events import HEALTH, Checkpoint, Evaluation, Fault, Start, Step, metrics_of
from asyncrl_cli.journal.progress import Progress, progress

SHARES = ("share/trainer_busy", "share/engines_busy", "share/engines_paused")
"""Metrics about idle time (docs/metrics.md)."""
NEWEST_FAILURES = 10
"""Number of failures listed individually."""


@dataclass(frozen=True, slots=True)
class Work:
    """Totals over the trained steps, from their metrics.

    Args:
        steps: number of trained steps.
        seconds: sum of the steps' times, without the time between two starts of the run.
        trained_tokens, generated_tokens: defined in docs/metrics.md.
        shares: means of ``SHARES``, weighted by the steps' times.
    """

    steps: int
    seconds: float
    trained_tokens: int
    generated_tokens: int
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class History:
    """A run's events, oldest first. ``failures`` has the newest failures (including stalls), and
    ``failures_by_kind`` counts all."""

    progress: Progress
    starts: tuple[Start, ...]
    failures: tuple[Fault, ...]
    failures_by_kind: Mapping[str, int]
    work: Work
    checkpoints: tuple[Checkpoint, ...]
    evaluations: tuple[Evaluation, ...]


def history(connection: sqlite3.Connection) -> History:
    counts = connection.execute(
        "SELECT kind, count(*) FROM failures WHERE kind != ? GROUP BY kind ORDER BY count(*) DESC", (HEALTH,)
    )
    return History(
        progress=progress(connection),
        starts=tuple(Start.read(connection)),
        failures=failures(connection, NEWEST_FAILURES)[::-1],
        failures_by_kind=dict(counts.fetchall()),
        work=_work(connection),
        checkpoints=tuple(Checkpoint.read(connection)),
        evaluations=evaluations(connection),
    )


def evaluations(connection: sqlite3.Connection) -> tuple[Evaluation, ...]:
    """Return all evaluations, sorted by step and kind."""
    return tuple(sorted(Evaluation.read(connection), key=lambda one: (one.after_step, one.kind)))


def failures(connection: sqlite3.Connection, count: int, newest: bool = True) -> tuple[Fault, ...]:
    """Return the ``newest`` failures, newest first, or else the first failures; both include stalls."""
    order = "DESC" if newest else "ASC"
    rows = connection.execute(
        f"SELECT at, kind, part, message FROM failures WHERE kind != ? ORDER BY id {order} LIMIT ?", (HEALTH, count)
    )
    return tuple(Fault(*row) for row in rows)


def newest_health(connection: sqlite3.Connection, rule: str) -> str:
    """Return the newest message of a rule of health; the rule if there is none."""
    row = connection.execute(
        "SELECT message FROM failures WHERE kind = ? AND part = ? ORDER BY id DESC LIMIT 1", (HEALTH, rule)
    ).fetchone()
    return str(row[0]) if row else rule


def newest_steps(connection: sqlite3.Connection, count: int) -> list[Step]:
    """Return the newest trained steps, oldest first."""
    rows = connection.execute(
        f"{Step.query} ORDER BY step DESC LIMIT :count", {"since": 0.0, "step": 0, "count": count}
    )
    return [Step(*row) for row in rows.fetchall()[::-1]]


def newest_batch(connection: sqlite3.Connection) -> tuple[int, float, float | None] | None:
    """Return the newest batch's step (from 0), and the unix times when it was taken and trained; None without a
    batch."""
    found: tuple[int, float, float | None] | None = connection.execute(
        "SELECT step, taken_at, trained_at FROM batches ORDER BY step DESC LIMIT 1"
    ).fetchone()
    return found


def first_start(connection: sqlite3.Connection) -> float:
    """Return the run's beginning (unix time)."""
    return float(connection.execute("SELECT coalesce(min(at), 0) FROM starts").fetchone()[0])


def step_metrics(connection: sqlite3.Connection, step: int) -> dict[str, float]:
    """Return the metrics of a step (from 0); empty if they are not recorded."""
    found = connection.execute("SELECT metrics FROM batches WHERE step = ?", (step,)).fetchone()
    return metrics_of(found[0]) if found else {}


def metrics_rows(connection: sqlite3.Connection) -> Iterator[dict[str, float]]:
    """Yield the rows of metrics.jsonl (steps from 1) for all steps with recorded metrics."""
    for step, version, at, metrics in connection.execute(
        "SELECT step + 1, (step + 1) / (SELECT value ->> 'publish_every' FROM meta WHERE key = 'settings'), "
        "trained_at, metrics FROM batches WHERE metrics IS NOT NULL"
    ):
        yield {"step": step, "version": version, "time": at, **metrics_of(metrics)}


def _work(connection: sqlite3.Connection) -> Work:
    sums: defaultdict[str, float] = defaultdict(float)
    for (text,) in connection.execute("SELECT metrics FROM batches WHERE metrics IS NOT NULL ORDER BY step"):
        metrics = metrics_of(text)
        seconds = metrics.get("time/step_s", 0.0)
        sums["steps"] += 1
        sums["seconds"] += seconds
        for name in ("tokens/trained", "tokens/generated"):
            sums[name] += metrics.get(name, 0.0)
        for name in SHARES:
            sums[name] += metrics.get(name, 0.0) * seconds
    total = sums["seconds"]
    return Work(
        steps=int(sums["steps"]),
        seconds=total,
        trained_tokens=int(sums["tokens/trained"]),
        generated_tokens=int(sums["tokens/generated"]),
        shares={name: sums[name] / total for name in SHARES} if total else {},
    )
