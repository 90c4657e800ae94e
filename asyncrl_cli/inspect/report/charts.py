"""The report's charts, as plotly figures.

A curve's x values are in its ``meta``, one list per axis: the page's script shows the chosen axis, and sets the colours
that depend on light or dark mode. No meaning needs colour: metrics also differ by dashes.

Invariant: every series of a run has the same points, at most ``POINTS``.
"""

from __future__ import annotations

import math
import sqlite3
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from asyncrl_cli.core.intervals import wilson
from asyncrl_cli.inspect.report.answers import PART_NAMES, StepTime
from asyncrl_cli.inspect.report.held_out import EvaluationFile, several_samples
from asyncrl_cli.journal.history import StepSpan, evaluations, first_start
from asyncrl_cli.journal.staleness import StepStaleness, in_ranges

Value = TypeVar("Value")
Axis = Mapping[str, Sequence[float]]
"""A curve's x values: ``steps`` done (from 1), trained ``tokens``, and ``hours`` since the run's first start."""

COLOURS = ("#2a85c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, which colour-blind people can tell apart. The blue is lighter, for dark backgrounds."""
DASHES = ("solid", "dash", "dot", "dashdot")
PART_COLOURS = {
    "training": "#009e73",
    "publishing weights": "#56b4e9",
    "groups": "#0072b2",
    "saving checkpoints": "#cc79a7",
    "other waits": "#999999",
}
RAMP = ("#d3e4f3", "#9cc8e2", "#559ecb", "#2171b5", "#134b8a")
"""From low to high. Colour-blind people see the same order."""
POINTS = 500
"""Largest number of points of a curve. With more steps, a point is the mean of consecutive steps."""
PASS_AT = 4
"""Largest number of values of k in the chart of pass@k."""
SMOOTHED_FROM = 20
"""Smallest number of points with a running mean."""
STEP_RANGES = 80
"""Columns in a chart of shares."""
SHARE = "~%"
"""Format of shares on an axis, with as many digits as its ticks need: 0.5%, 1%, 1.5%."""


class Chart(NamedTuple):
    """A plotly ``Figure``. ``section`` is its part of the page if its x axis can be chosen."""

    title: str
    figure: Any
    section: str = ""


class Panel(NamedTuple):
    """A chart of metrics, with labels by the metrics' names. ``smooth``: draw a running mean over the values."""

    section: str
    title: str
    labels: Mapping[str, str]
    smooth: bool = True


LEARNING, UPDATES, SPEED = "Learning", "Optimization", "Staleness and speed"
STALENESS = "Staleness of groups (versions)"
LEARNING_RATE = "Learning rate"
PANELS = (
    Panel(LEARNING, "Reward", {"reward/mean": "mean", "reward/correct": "share correct"}),
    Panel(LEARNING, "Masked rollouts (reward None)", {"reward/masked_rollouts": ""}),
    Panel(LEARNING, "Response length (tokens)", {"response/tokens_mean": "mean", "response/tokens_max": "longest"}),
    Panel(LEARNING, "Truncated responses (share)", {"response/truncated_ratio": ""}),
    Panel(LEARNING, "Entropy (nats)", {"train/entropy": ""}),
    Panel(UPDATES, "Loss", {"train/loss": ""}),
    Panel(UPDATES, "Gradient norm", {"train/gradient_norm": ""}),
    Panel(UPDATES, LEARNING_RATE, {"train/learning_rate": ""}, smooth=False),
    Panel(
        UPDATES,
        "KL divergence (nats)",
        {
            "correction/kl_behaviour": "to the sampling policy",
            "train/kl_proximal": "to the step's start",
            "train/kl_reference": "to the reference",
        },
    ),
    Panel(UPDATES, "Importance weights", {"correction/importance_mean": "mean", "correction/importance_max": "max"}),
    Panel(UPDATES, "Clipped tokens (share)", {"train/clip_low_fraction": "below", "train/clip_high_fraction": "above"}),
    Panel(UPDATES, "Log-prob gap to the sampling policy (nats)", {"correction/logprob_gap_mean": ""}),
    Panel(SPEED, STALENESS, {"staleness/groups_max": "max", "staleness/groups_mean": "mean"}, smooth=False),
    Panel(SPEED, "Tokens per second", {"tokens/generated_per_s": "generated", "tokens/trained_per_s": "trained"}),
    Panel(SPEED, "Model FLOPs utilization (MFU)", {"mfu/update": "updates", "mfu/end_to_end": "end to end"}),
    Panel(SPEED, "Step time (s)", {"time/step_s": "step", "time/train_s": "training"}),
    Panel(SPEED, "Engines (share of time)", {"share/engines_busy": "busy", "share/engines_paused": "paused"}),
)
SERIES = tuple(metric for panel in PANELS for metric in panel.labels)


# -- a run's curves


class Points(NamedTuple):
    """A series with its own points, and their 95 % intervals if known."""

    axis: Axis
    values: Sequence[float | None]
    intervals: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Curves:
    """A run's measurements over time. In ``series`` None stands for a missing value. ``accuracy`` is by kind and number
    of prompts, because evaluations on different prompts cannot be compared. ``pass_at`` is by label: ``pass@4``."""

    axis: Axis
    series: Mapping[str, Sequence[float | None]]
    accuracy: Mapping[tuple[str, int], Points]
    pass_at: Mapping[str, Points]
    max_staleness: int = 0


def curves(
    connection: sqlite3.Connection, spans: Sequence[StepSpan], files: Sequence[EvaluationFile], max_staleness: int
) -> Curves:
    """Read the metrics ``SERIES`` of a run's steps, and all evaluations."""
    run_start = first_start(connection)
    span_steps = [span.step for span in spans]
    trained_tokens = [0.0, *accumulate(span.metrics.get("tokens/trained", 0.0) for span in spans)]

    def axis(steps: Sequence[float], times: Sequence[float]) -> Axis:
        tokens = [trained_tokens[bisect_left(span_steps, step)] for step in steps]
        return {"steps": steps, "tokens": tokens, "hours": [(unix_time - run_start) / 3600 for unix_time in times]}

    ranges = in_parts(spans, POINTS)
    ends = [step_range[-1] for step_range in ranges]
    series = {name: [mean(span.metrics.get(name) for span in step_range) for step_range in ranges] for name in SERIES}
    evaluated: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    all_evaluations = sorted(evaluations(connection), key=lambda evaluation: evaluation.kind)
    for evaluation in all_evaluations:
        point = (evaluation.after_step, evaluation.at, evaluation.accuracy)
        evaluated.setdefault((evaluation.kind, evaluation.prompts), []).append(point)
    accuracy = {}
    for (mode, prompts), points in evaluated.items():
        steps, times, values = zip(*points, strict=True)
        accuracy[mode, prompts] = Points(axis(steps, times), values, [wilson(value, prompts) for value in values])
    pass_at = {}
    if sampled := several_samples(files):
        unix_times = {evaluation.after_step: evaluation.at for evaluation in all_evaluations}
        sampled_axis = axis([f.step for f in sampled], [unix_times.get(f.step, run_start) for f in sampled])
        largest_k = min(len(file.pass_at) for file in sampled)
        for k in sorted({1, largest_k, *(2**power for power in range(1, PASS_AT - 1) if 2**power < largest_k)}):
            pass_at[f"pass@{k}"] = Points(sampled_axis, [file.pass_at[k - 1] for file in sampled])
    return Curves(
        axis=axis([span.step + 1.0 for span in ends], [span.reported_at for span in ends]),
        series={name: values for name, values in series.items() if any(value is not None for value in values)},
        accuracy=accuracy,
        pass_at=pass_at,
        max_staleness=max_staleness,
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the finite values, or None without any."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def smoothed(values: Sequence[float | None]) -> list[float | None] | None:
    """Return the running mean over about an eighth of all points, fewer at the ends.

    It is None where a value is None. Returns None for few points.
    """
    if len(values) < SMOOTHED_FROM:
        return None
    running_means = []
    for index, value in enumerate(values):
        reach = min(max(2, len(values) // 16), max(2, min(index, len(values) - 1 - index)))
        running_means.append(None if value is None else mean(values[max(0, index - reach) : index + reach + 1]))
    return running_means


def in_parts(values: Sequence[Value], limit: int) -> list[Sequence[Value]]:
    """Split values into at most ``limit`` parts of equal length; the last part may be shorter."""
    size = max(1, -(-len(values) // limit))
    return [values[start : start + size] for start in range(0, len(values), size)]


# -- charts over steps


def curve_charts(curves: Curves) -> list[Chart]:
    """Draw the held-out charts and the ``PANELS`` that have data."""
    charts = []
    for panel in PANELS:
        lines = {
            label: Points(curves.axis, curves.series[metric])
            for metric, label in panel.labels.items()
            if metric in curves.series
        }
        if lines:
            figure = _figure(lines, panel.smooth)
            charts.append(Chart(panel.title, figure, panel.section))
            if "share" in panel.title:
                figure.update_yaxes(tickformat=SHARE)
            elif panel.title == LEARNING_RATE:
                figure.update_yaxes(tickformat="~g", rangemode="tozero")
            elif panel.title == STALENESS:
                _add_bound(figure, curves.max_staleness)
    held_out = [
        Chart("Held-out accuracy", _accuracy(curves), LEARNING),
        Chart("Held-out pass@k (sampled)", _figure(curves.pass_at), LEARNING),
    ]
    charts[1:1] = [chart for chart in held_out if chart.figure.data]
    return charts


def _figure(lines: Mapping[str, Points], smooth: bool = False) -> Any:
    """Draw curves by their labels."""
    from plotly.graph_objects import Figure

    figure = Figure()
    for index, (label, points) in enumerate(lines.items()):
        trace = _trace(index, label, points)
        if smooth and (running_mean := smoothed(points.values)) is not None:
            figure.add_trace(trace)
            figure.data[-1].update(showlegend=False, hoverinfo="skip", hovertemplate=None, opacity=0.4, line_width=1)
            trace.y = rounded(running_mean)
        figure.add_trace(trace)
    return figure


def _trace(index: int, label: str, points: Points) -> Any:
    from plotly.graph_objects import Scatter

    return Scatter(
        mode="lines+markers" if len(points.values) == 1 else "lines",
        name=label,
        legendgroup=label,  # the legend's entry also switches the faint values below a running mean
        showlegend=bool(label),
        hovertemplate=f"%{{x}}: %{{y}}<extra>{label}</extra>",
        y=rounded(points.values),
        meta={name: rounded(values) for name, values in points.axis.items()},
        line={"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index % len(DASHES)], "width": 2},
    )


def _add_bound(figure: Any, bound: int) -> None:
    """Draw the bound. The largest staleness gets a broad line, because the mean may lie on it."""
    figure.update_traces(line={"shape": "hvh", "dash": "solid", "width": 1.6})
    figure.update_traces(selector={"name": "max"}, line_width=5, opacity=0.45)
    label = {"text": f"bound {bound}", "textposition": "end"}
    figure.add_hline(bound, line={"color": "#8b949e", "width": 1.5, "dash": "dot"}, label=label)
    figure.update_yaxes(range=[-0.1, bound * 1.15 + 0.3], dtick=max(1, bound // 4))


def _accuracy(curves: Curves) -> Any:
    """Evaluations with 95 % intervals. A line joins three or more evaluations on the same number of prompts."""
    from plotly.graph_objects import Figure

    figure = Figure(layout={"yaxis": {"range": [0, 1.04]}})
    kinds = list(dict.fromkeys(mode for mode, _ in curves.accuracy))
    for (mode, prompts), points in curves.accuracy.items():
        trace = _trace(kinds.index(mode), f"{mode}, {prompts:,} prompts", points)
        is_joined = len(points.values) > 2
        symbol = "circle" if is_joined else "circle-open-dot" if kinds.index(mode) else "circle-open"
        intervals = [(value or 0.0, *interval) for value, interval in zip(points.values, points.intervals, strict=True)]
        trace.update(
            mode="lines+markers" if is_joined else "markers",
            marker={"symbol": symbol, "size": 6 if is_joined else 10, "color": trace.line.color},
            error_y={
                "symmetric": False,
                "array": rounded([high - value for value, _, high in intervals]),
                "arrayminus": rounded([value - low for value, low, _ in intervals]),
                "thickness": 1,
                "width": 2,
            },
        )
        figure.add_trace(trace)
    return figure


# -- how the time was spent, and the staleness


def run_charts(times: Sequence[StepTime], staleness: tuple[StepStaleness, ...]) -> Iterator[Chart]:
    """Draw the trainer's time and the tokens' staleness."""
    if times:
        ranges = in_parts(times, STEP_RANGES)
        sums = [
            {activity: math.fsum(time.seconds[activity] for time in steps) for activity in PART_NAMES}
            for steps in ranges
        ]
        shares = {
            name.removeprefix("waiting for "): [spent[activity] / (sum(spent.values()) or 1.0) for spent in sums]
            for activity, name in PART_NAMES.items()
            if any(spent[activity] for spent in sums)
        }
        yield Chart("The trainer's time", _stacked([steps[-1].step + 1 for steps in ranges], shares, PART_COLOURS))
    if staleness:
        step_ranges = in_ranges(staleness, STEP_RANGES)
        ages = range(max(max(step.tokens, default=0) for step in step_ranges) + 1)
        by_age = {str(age): [step.tokens[age] / (step.tokens.total() or 1) for step in step_ranges] for age in ages}
        ends = [step.last_step for step in step_ranges]
        yield Chart("Tokens by their staleness in versions", _stacked(ends, by_age))


def _stacked(
    steps: Sequence[int], shares: Mapping[str, Sequence[float]], colours: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """Draw shares by name as bars over ranges of steps; ``steps`` are the ranges' last steps, from 1. Without
    ``colours``, the names have a ramp from low to high."""
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Bar, Figure

    edges = [2 * steps[0] - steps[1] if len(steps) > 1 else steps[0] - 1, *steps]
    widths = [end - start for start, end in pairwise(edges)]
    ramp = sample_colorscale(RAMP, [index / max(1, len(shares) - 1) for index in range(len(shares))])
    figure = Figure(layout={"showlegend": True, "barmode": "stack", "bargap": 0, "xaxis": {"title": {"text": "step"}}})
    figure.update_yaxes(tickformat=SHARE, range=[0, 1])
    for (name, values), colour in zip(shares.items(), ramp, strict=True):
        bar = Bar(
            name=name,
            x=list(steps),
            y=rounded(values),
            width=widths,
            offset=[-width for width in widths],
            marker={"color": colours.get(name, colour), "line": {"width": 0}},
            hovertemplate=f"{name} %{{y:.1%}} (to step %{{x}})<extra></extra>",
        )
        figure.add_trace(bar)
    return figure


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """Round numbers to five digits. NaN and infinity, which JSON does not have, become None."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.5g}") for value in values]
