"""A run's metrics over its steps, thinned for a screen.

Invariant: every series of a run has the same points, and each point has a step, a number of trained tokens, and
the hours since the run's first start.
"""

from __future__ import annotations

import math
import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

from asyncrl_cli.core.intervals import wilson
from asyncrl_cli.inspect.report.samples import EvaluationFile, MachineSample
from asyncrl_cli.journal.events import Evaluation
from asyncrl_cli.journal.history import evaluations, first_start
from asyncrl_cli.journal.step_timeline import StepSpan

Value = TypeVar("Value")
POINTS = 500
"""Largest number of points of a curve. With more steps, a point is the mean of consecutive steps."""
SMOOTHED_FROM = 20
"""Smallest number of points with a running mean."""
PASS_AT = 4
"""Largest number of values of k in the chart of pass@k."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Positions of points on each x axis."""

    steps: tuple[float, ...]
    """Steps done, from 1."""
    tokens: tuple[float, ...]
    """Trained tokens."""
    hours: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Points:
    """A series with separate points."""

    axis: Axis
    values: tuple[float, ...]
    spans: tuple[tuple[float, float], ...] = ()
    """95 % intervals, if known."""


@dataclass(frozen=True, slots=True)
class Curves:
    """A run's measurements over time."""

    axis: Axis
    series: Mapping[str, tuple[float | None, ...]]
    """Metrics by name; None if a step has no value."""
    evaluations: Mapping[tuple[str, int], Points]
    """Accuracies by kind and number of prompts: evaluations on different prompts cannot be compared."""
    pass_at: Mapping[str, Points] = field(default_factory=dict)
    """By k, as ``pass@4``."""
    machine: Mapping[str, Points] = field(default_factory=dict)
    """By title."""
    max_staleness: int = 0


def mean(values: Iterable[float]) -> float | None:
    """Return the mean of the finite values, or None without any."""
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def smoothed(values: Sequence[float | None]) -> list[float | None] | None:
    """Return the running mean over about an eighth of all points, fewer at the ends.

    It is None where a value is None. Returns None for few points.
    """
    if len(values) < SMOOTHED_FROM:
        return None
    most = max(2, len(values) // 16)
    found: list[float | None] = []
    for at, value in enumerate(values):
        reach = min(most, max(2, min(at, len(values) - 1 - at)))
        near = [other for other in values[max(0, at - reach) : at + reach + 1] if other is not None]
        found.append(None if value is None else mean(near))
    return found


def in_parts(values: Sequence[Value], most: int) -> list[Sequence[Value]]:
    """Split values into at most ``most`` parts of equal length; the last part may be shorter."""
    size = max(1, -(-len(values) // most))
    return [values[start : start + size] for start in range(0, len(values), size)]


def curves(
    connection: sqlite3.Connection,
    spans: Sequence[StepSpan],
    names: Sequence[str],
    files: Sequence[EvaluationFile] = (),
    samples: Sequence[MachineSample] = (),
    max_staleness: int = 0,
    points: int = POINTS,
) -> Curves:
    """Read the metrics ``names``, the accuracies of all evaluations, and the machine's load."""
    evaluated = evaluations(connection)
    course = _Course(spans, first_start(connection))
    parts = in_parts(spans, points)
    series = {name: tuple(mean(span.metrics.get(name, math.nan) for span in part) for part in parts) for name in names}
    ends = [part[-1] for part in parts]
    return Curves(
        axis=course.axis([span.step + 1.0 for span in ends], [span.reported_at for span in ends]),
        series={name: values for name, values in series.items() if any(value is not None for value in values)},
        evaluations=_evaluations(evaluated, course),
        pass_at=_pass_at(evaluated, files, course),
        machine=_machine(samples, course, points),
        max_staleness=max_staleness,
    )


class _Course:
    """Places points on the axes of the trained steps."""

    def __init__(self, spans: Sequence[StepSpan], begun: float) -> None:
        self.begun = begun
        self.reported = [span.reported_at for span in spans]
        self._steps = [span.step for span in spans]
        self._tokens = [0.0, *accumulate(span.metrics.get("tokens/trained", 0.0) for span in spans)]

    def axis(self, steps: Sequence[float], times: Sequence[float]) -> Axis:
        """Return the positions of points, given as numbers of trained steps and Unix times."""
        return Axis(
            steps=tuple(steps),
            tokens=tuple(self._tokens[bisect_left(self._steps, step)] for step in steps),
            hours=tuple((at - self.begun) / 3600 for at in times),
        )


def _evaluations(evaluated: Sequence[Evaluation], course: _Course) -> dict[tuple[str, int], Points]:
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for one in sorted(evaluated, key=lambda one: one.kind):
        found.setdefault((one.kind, one.prompts), []).append((one.after_step, one.at, one.accuracy))
    return {
        (kind, prompts): Points(course.axis(steps, times), values, tuple(wilson(value, prompts) for value in values))
        for (kind, prompts), points in found.items()
        for steps, times, values in (tuple(zip(*points, strict=True)),)
    }


def _pass_at(evaluated: Sequence[Evaluation], files: Sequence[EvaluationFile], course: _Course) -> dict[str, Points]:
    sampled = [one for one in files if one.kind == "sampled" and len(one.pass_at) > 1]
    if not sampled:
        return {}
    times = {one.after_step: one.at for one in evaluated if one.kind == "sampled"}
    most = min(len(one.pass_at) for one in sampled)
    chosen = sorted({1, most, *(2**power for power in range(1, PASS_AT - 1) if 2**power < most)})
    axis = course.axis([one.step for one in sampled], [times.get(one.step, course.begun) for one in sampled])
    return {f"pass@{k}": Points(axis, tuple(one.pass_at[k - 1] for one in sampled)) for k in chosen}


def _machine(samples: Sequence[MachineSample], course: _Course, points: int) -> dict[str, Points]:
    ranges = in_parts(samples, points)
    titles = dict.fromkeys(title for sample in samples for title in sample.values)
    times = [some[-1].at for some in ranges]
    axis = course.axis([float(bisect_right(course.reported, at)) for at in times], times)
    found = {}
    for title in titles:
        values = [mean(sample.values[title] for sample in some if title in sample.values) for some in ranges]
        found[title] = Points(axis, tuple(math.nan if value is None else value for value in values))
    return found
