"""The report's charts, as figures of plotly.js: dicts that become JSON.

A chart that stands over the course of a run carries its x values three times (``xs``), and the page's script shows the
one that is chosen. Colours that depend on light or dark are the script's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.buffer.staleness import StepLags, in_ranges
from asyncrl_cli.observe.report.bottleneck import PARTS, Part
from asyncrl_cli.observe.report.curves import Axis, Curves
from asyncrl_cli.observe.report.distributions import Histogram
from asyncrl_cli.observe.report.trainer_time import StepTime

RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""By Okabe and Ito, so that colour-blind people tell them apart."""
PART_COLOURS: Mapping[Part, str] = dict(
    zip(PARTS, ("#009e73", "#56b4e9", "#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#999999"), strict=True)
)
DASHES = ("solid", "dash", "dot", "dashdot")
STEP_RANGES = 80
"""Columns of the heat map and of the picture of time."""
LEGEND_LINES = 4
"""Lines that a legend has room for; others are named under the pointer."""
DIGITS = 5
"""Significant digits of a number in a chart."""

PANELS = {
    "Reward": ("reward/mean",),
    "Response length (tokens)": ("response/tokens_mean",),
    "Staleness of groups (versions)": ("staleness/groups_mean", "staleness/groups_max"),
    "Log-prob gap to the sampling policy (nats)": ("correction/logprob_gap_mean",),
    "Loss": ("train/loss",),
    "Entropy (nats)": ("train/entropy",),
    "Gradient norm": ("train/gradient_norm",),
    "Generated tokens per second": ("tokens/generated_per_s",),
    "Engines (share of time)": ("share/engines_busy", "share/engines_paused"),
}
"""Charts of curves, and the metrics in each."""
SERIES = tuple(name for names in PANELS.values() for name in names)


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure. ``xs``: by axis, the x values of each trace; None where x is something else."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    xs: dict[str, list[list[float]]] | None = None

    def document(self) -> dict[str, Any]:
        """What the page's script is given."""
        return {"data": self.data, "layout": self.layout, "xs": self.xs}


def curve_charts(runs: Mapping[str, Curves]) -> list[Chart]:
    """Held-out accuracy and the ``PANELS``, all runs in each; without those of which no run has anything."""
    several = len(runs) > 1
    charts = []
    for title, names in PANELS.items():
        lines = [
            _Line(_named(run if several else "", _suffix(name, names)), at, dash, curves.axis, curves.series[name])
            for at, (run, curves) in enumerate(runs.items())
            for dash, name in enumerate(names)
            if name in curves.series
        ]
        charts.append(_lines(title, lines))
    accuracy = [
        _Line(_named(run if several else "", kind), at, dash, axis, values, markers=True)
        for at, (run, curves) in enumerate(runs.items())
        for dash, (kind, (axis, values)) in enumerate(curves.evaluations.items())
    ]
    charts.insert(1, _lines("Held-out accuracy", accuracy))
    return [chart for chart in charts if chart.data]


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    run: int
    dash: int
    axis: Axis
    values: Sequence[float | None]
    markers: bool = False


def _lines(title: str, lines: Sequence[_Line]) -> Chart:
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers" if line.markers or len(line.values) == 1 else "lines",
            "name": line.name,
            "x": _short(line.axis.steps),
            "y": _short(line.values),
            "line": {
                "color": RUN_COLOURS[line.run % len(RUN_COLOURS)],
                "dash": DASHES[line.dash % len(DASHES)],
                "width": 1.6,
            },
        }
        for line in lines
    ]
    xs = {
        "steps": [_short(line.axis.steps) for line in lines],
        "tokens": [_short(line.axis.tokens) for line in lines],
        "hours": [_short(line.axis.hours) for line in lines],
    }
    return Chart(title, data, {"xaxis": {"title": {"text": "step"}}, "showlegend": 1 < len(lines) <= LEGEND_LINES}, xs)


def _named(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _suffix(name: str, names: Sequence[str]) -> str:
    return name.rpartition("_")[2] if len(names) > 1 else ""


def staleness_chart(steps: tuple[StepLags, ...]) -> Chart:
    """The share of tokens by their lag, over ranges of steps."""
    ranges = in_ranges(steps, STEP_RANGES)
    lags = range(max((max(step.tokens, default=0) for step in ranges), default=0) + 1)
    shares = [[step.tokens[lag] / (step.tokens.total() or 1) for step in ranges] for lag in lags]
    return _heat_map("Tokens by their lag in versions", [step.last + 1 for step in ranges], list(lags), shares, "lag")


def histogram_chart(title: str, found: Histogram) -> Chart:
    """Distributions side by side, one for each range of steps."""
    return _heat_map(title, found.steps, found.values, found.shares, "")


def _heat_map(title: str, x: Sequence[float], y: Sequence[float], z: Sequence[Sequence[float]], name: str) -> Chart:
    trace = {
        "type": "heatmap",
        "x": _short(x),
        "y": _short(y),
        "z": [_short(row) for row in z],
        "zmin": 0,
        "colorbar": {"tickformat": ".0%", "thickness": 10},
        "hovertemplate": "to step %{x}<br>%{y}: %{z:.1%}<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": name}}}
    return Chart(title, [trace], layout)


def time_chart(times: Sequence[StepTime]) -> Chart:
    """What the trainer did, as shares of its time in ranges of steps."""
    size = max(1, -(-len(times) // STEP_RANGES))
    ranges = [times[start : start + size] for start in range(0, len(times), size)]
    sums = [{part: math.fsum(time.seconds[part] for time in some) for part in PARTS} for some in ranges]
    data = [
        {
            "type": "bar",
            "name": part,
            "x": [some[-1].step + 1 for some in ranges],
            "y": _short([spent[part] / (sum(spent.values()) or 1.0) for spent in sums]),
            "marker": {"color": PART_COLOURS[part]},
            "hovertemplate": f"{part} %{{y:.0%}} (to step %{{x}})<extra></extra>",
        }
        for part in PARTS
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0,
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"tickformat": ".0%", "range": [0, 1]},
        "showlegend": True,
    }
    return Chart("The trainer's time", data, layout)


def scatter_chart(points: Sequence[tuple[int, float, int]]) -> Chart:
    """Length against reward, coloured by step."""
    tokens, rewards, steps = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [])
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": tokens,
        "y": _short(rewards),
        "marker": {"size": 5, "opacity": 0.6, "color": steps, "colorbar": {"title": {"text": "step"}, "thickness": 10}},
        "hovertemplate": "%{x} tokens, reward %{y} (step %{marker.color})<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": "tokens"}}, "yaxis": {"title": {"text": "reward"}}}
    return Chart(f"Length and reward of {len(points):,} rollouts", [trace], layout)


def _short(values: Sequence[float | None]) -> list[Any]:
    """Numbers with few digits; None for what JSON has no number for."""
    return [
        None if value is None or not math.isfinite(value) else value if isinstance(value, int) else _rounded(value)
        for value in values
    ]


def _rounded(value: float) -> float | int:
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short
