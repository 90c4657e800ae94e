"""A run's history, read from its journal: starts, failures, steps, checkpoints, evaluations.

Steps of batches are counted from 0 here, as in the journal; those of checkpoints and evaluations say how many steps
were done.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.journal.queries import Standing, standing

SHARES = ("share/trainer_busy", "share/engines_busy", "share/engines_paused")
"""Metrics that say who was idle (docs/metrics.md)."""
NEWEST_FAILURES = 10
"""Failures that are told one by one."""


@dataclass(frozen=True, slots=True)
class Start:
    """A process began to write: ``train``, ``resume``, or ``restart`` of the buffer alone. ``step`` batches were taken
    by then, and ``version`` versions published."""

    at: float
    kind: str
    host: str
    pid: int
    step: int
    version: int
    note: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Something failed, whether or not the run went on."""

    at: float
    kind: str
    part: str
    message: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. ``seconds`` is what it took; ``removed_at`` is None while it is there."""

    step: int
    at: float
    folder: str
    seconds: float
    removed_at: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation on the held-out prompts; ``mean_length`` in tokens."""

    step: int
    kind: str
    at: float
    accuracy: float
    mean_reward: float
    mean_length: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Work:
    """What the trained steps come to, by their metrics.

    Args:
        steps: how many were trained.
        seconds: their windows together, which is the run's time without what lies between two starts.
        trained_tokens, generated_tokens: as docs/metrics.md defines them.
        shares: means of the ``SHARES``, weighted by the length of the windows.
    """

    steps: int
    seconds: float
    trained_tokens: int
    generated_tokens: int
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class History:
    """Everything, oldest first; of the failures the newest ones, and all counted by kind."""

    standing: Standing
    starts: tuple[Start, ...]
    failures: tuple[Failure, ...]
    failures_by_kind: Mapping[str, int]
    work: Work
    checkpoints: tuple[Checkpoint, ...]
    evaluations: tuple[Evaluation, ...]


def history(connection: sqlite3.Connection) -> History:
    """What happened so far."""

    def rows(sql: str) -> list[Any]:
        return connection.execute(sql).fetchall()

    failures = rows(f"SELECT at, kind, part, message FROM failures ORDER BY id DESC LIMIT {NEWEST_FAILURES}")
    return History(
        standing=standing(connection),
        starts=tuple(Start(*row) for row in rows("SELECT at, kind, host, pid, step, version, note FROM starts")),
        failures=tuple(Failure(*row) for row in reversed(failures)),
        failures_by_kind=dict(rows("SELECT kind, count(*) FROM failures GROUP BY kind ORDER BY count(*) DESC")),
        work=_work([json.loads(metrics) for (metrics,) in rows(_METRICS)]),
        checkpoints=tuple(
            Checkpoint(*row) for row in rows("SELECT step, at, folder, seconds, removed_at FROM checkpoints")
        ),
        evaluations=tuple(
            Evaluation(*row)
            for row in rows(
                "SELECT step, kind, at, accuracy, mean_reward, mean_length, prompts FROM evaluations "
                "ORDER BY step, kind"
            )
        ),
    )


_METRICS = "SELECT metrics FROM batches WHERE metrics IS NOT NULL ORDER BY step"


def _work(steps: list[dict[str, float]]) -> Work:
    sums: defaultdict[str, float] = defaultdict(float)
    for metrics in steps:
        seconds = metrics.get("time/step_s", 0.0)
        sums["seconds"] += seconds
        for name in ("tokens/trained", "tokens/generated"):
            sums[name] += metrics.get(name, 0.0)
        for name in SHARES:
            sums[name] += metrics.get(name, 0.0) * seconds
    total = sums["seconds"]
    return Work(
        steps=len(steps),
        seconds=total,
        trained_tokens=int(sums["tokens/trained"]),
        generated_tokens=int(sums["tokens/generated"]),
        shares={name: sums[name] / total for name in SHARES} if total else {},
    )
