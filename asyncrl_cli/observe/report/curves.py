"""A run's metrics over its steps, thinned to what a screen can show.

Invariant: every series of a run has the same points, and each point stands at a step, at so many trained tokens, and at
so many hours since the run's first start.
"""

from __future__ import annotations

import math
import sqlite3
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from asyncrl_cli.buffer.spans import StepSpan

POINTS = 500
"""Points of a curve. With more steps, each stands for the mean of several in a row."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Where points stand: after a step (from 1), in trained tokens, in hours."""

    steps: tuple[float, ...]
    tokens: tuple[float, ...]
    hours: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """Series by the name of their metric, with None where a step has no value; and evaluations by kind, each with
    points of its own."""

    axis: Axis
    series: Mapping[str, tuple[float | None, ...]]
    evaluations: Mapping[str, tuple[Axis, tuple[float, ...]]]


def mean(values: Iterable[float]) -> float | None:
    """The mean of those that are numbers; None without one."""
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def curves(
    connection: sqlite3.Connection, spans: Sequence[StepSpan], names: Sequence[str], points: int = POINTS
) -> Curves:
    """The metrics of these ``names``, and the accuracies of all evaluations."""
    (begun,) = connection.execute("SELECT coalesce(min(at), 0) FROM starts").fetchone()
    tokens = list(accumulate(span.metrics.get("tokens/trained", 0.0) for span in spans))
    size = max(1, -(-len(spans) // points))
    ranges = [range(start, min(start + size, len(spans))) for start in range(0, len(spans), size)]
    axis = Axis(
        steps=tuple(spans[part[-1]].step + 1.0 for part in ranges),
        tokens=tuple(tokens[part[-1]] for part in ranges),
        hours=tuple((spans[part[-1]].reported_at - begun) / 3600 for part in ranges),
    )
    series = {
        name: tuple(mean(spans[at].metrics.get(name, math.nan) for at in part) for part in ranges) for name in names
    }
    return Curves(
        axis,
        {name: values for name, values in series.items() if any(value is not None for value in values)},
        _evaluations(connection, [span.step for span in spans], tokens, begun),
    )


def _evaluations(
    connection: sqlite3.Connection, steps: Sequence[int], tokens: Sequence[float], begun: float
) -> dict[str, tuple[Axis, tuple[float, ...]]]:
    of_kind: dict[str, list[tuple[float, float, float, float]]] = {}
    for kind, step, at, accuracy in connection.execute(
        "SELECT kind, step, at, accuracy FROM evaluations ORDER BY kind, step"
    ):
        done = bisect_left(steps, step)  # trained steps before the evaluation
        trained = tokens[done - 1] if done else 0.0
        of_kind.setdefault(kind, []).append((step, trained, (at - begun) / 3600, accuracy))
    return {
        kind: (Axis(*columns[:3]), columns[3])
        for kind, points in of_kind.items()
        if (columns := tuple(zip(*points, strict=True)))
    }
