"""The report's charts, as plotly.js figures: dicts that become JSON.

A curve's x values are in its ``meta``, one list per axis. The page's script shows the chosen axis, and sets the colours
that depend on light or dark mode. No meaning needs colour: metrics also differ by dashes, and runs by markers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any
from zlib import crc32

from asyncrl_cli.inspect.report.curves import Axis, Curves, in_parts, smoothed
from asyncrl_cli.inspect.report.evidence import NAMES, PARTS, StepTime, TrainerPart
from asyncrl_cli.journal.rollouts import GROUP_NAMES, Histogram, Shares
from asyncrl_cli.journal.staleness import StepStaleness, in_ranges

COLOURS = ("#2a85c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, which colour-blind people can tell apart. The blue is lighter, for dark backgrounds."""
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x")
DASHES = ("solid", "dash", "dot", "dashdot")
FAINT = "#8b949e"
PART_COLOURS: Mapping[TrainerPart, str] = dict(
    zip(PARTS, ("#009e73", "#56b4e9", "#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#999999"), strict=True)
)
GROUP_COLOURS = dict(zip(GROUP_NAMES, ("#e69f00", "#0072b2", "#b8c4ce"), strict=True))
"""Groups with only wrong, mixed, and only right rollouts."""
RAMP = ("#d3e4f3", "#9cc8e2", "#559ecb", "#2171b5", "#134b8a")
"""From low to high. Colour-blind people see the same order."""
STEP_SCALE = [[0, "#56b4e9"], [0.5, "#9a6fb0"], [1, "#d55e00"]]
"""From early to late steps, visible on light and dark backgrounds."""
MARKERS = 8
"""Largest number of markers on a run's curve in a comparison of runs."""
DIGITS = 5
"""Significant digits of numbers in a chart."""
SHARE = "~%"
"""Format of shares on an axis, with as many digits as its ticks need: 0.5%, 1%, 1.5%."""
STEP_RANGES = 80
"""Columns in a chart of shares."""
MOST_AGES = 8
"""Largest number of staleness values in a chart of stacked shares; more values become a heat map."""
JITTER = 0.3
"""Half the height over which equal rewards are scattered, as a share of the distance between two values."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure. ``section`` is its part of the page if it shows all runs."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    section: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of metrics."""

    section: str
    title: str
    series: Mapping[str, str]
    """Labels by the metrics' names."""
    smooth: bool = True
    """Draw a running mean over the values."""


LEARNING, OPTIMIZATION, SPEED = "Learning", "Optimization", "Staleness and speed"
STALENESS = "Staleness of groups (versions)"
LEARNING_RATE = "Learning rate"
PANELS = (
    Panel(LEARNING, "Reward", {"reward/mean": "mean", "reward/correct": "share correct"}),
    Panel(LEARNING, "Masked rollouts (reward None)", {"reward/masked_rollouts": "masked"}),
    Panel(LEARNING, "Response length (tokens)", {"response/tokens_mean": "mean", "response/tokens_max": "longest"}),
    Panel(LEARNING, "Truncated responses (share)", {"response/truncated_ratio": "truncated"}),
    Panel(LEARNING, "Entropy (nats)", {"train/entropy": "entropy"}),
    Panel(OPTIMIZATION, "Loss", {"train/loss": "loss"}),
    Panel(OPTIMIZATION, "Gradient norm", {"train/gradient_norm": "norm"}),
    Panel(OPTIMIZATION, LEARNING_RATE, {"train/learning_rate": "rate"}, smooth=False),
    Panel(
        OPTIMIZATION,
        "KL divergence (nats)",
        {
            "correction/kl_behaviour": "to the sampling policy",
            "train/kl_proximal": "to the step's start",
            "train/kl_reference": "to the reference",
        },
    ),
    Panel(
        OPTIMIZATION,
        "Importance weights",
        {"correction/importance_mean": "mean", "correction/importance_max": "largest"},
    ),
    Panel(
        OPTIMIZATION,
        "Clipped tokens (share)",
        {"train/clip_low_fraction": "below", "train/clip_high_fraction": "above"},
    ),
    Panel(OPTIMIZATION, "Log-prob gap to the sampling policy (nats)", {"correction/logprob_gap_mean": "mean"}),
    Panel(SPEED, STALENESS, {"staleness/groups_max": "max", "staleness/groups_mean": "mean"}, smooth=False),
    Panel(SPEED, "Tokens per second", {"tokens/generated_per_s": "generated", "tokens/trained_per_s": "trained"}),
    Panel(SPEED, "Trained tokens per second and GPU", {"tokens/trained_per_gpu_s": "trained"}),
    Panel(SPEED, "Model FLOPs utilization (MFU)", {"mfu/update": "updates", "mfu/end_to_end": "end to end"}),
    Panel(SPEED, "Step time (s)", {"time/step_s": "step", "time/train_s": "training"}),
    Panel(SPEED, "Engines (share of time)", {"share/engines_busy": "busy", "share/engines_paused": "paused"}),
)
SERIES = tuple(name for panel in PANELS for name in panel.series)


@dataclass(frozen=True, slots=True)
class CurveCharts:
    """Charts of all runs together, and panels with one constant value."""

    charts: tuple[Chart, ...]
    constant: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Line:
    """A curve of one run. ``run_at`` is the run's index in the chart, ``at`` the curve's index in the run."""

    run: str
    label: str
    run_at: int
    at: int
    axis: Axis
    values: Sequence[float | None]


def curve_charts(runs: Mapping[str, Curves]) -> CurveCharts:
    """Draw held-out accuracy, the ``PANELS`` and the machine, with all runs in each chart.

    A chart is omitted if no run has data for it. ``runs``: curves by the runs' labels.
    """
    several = len(runs) > 1
    charts, constant = [], {}
    for panel in PANELS:
        lines = _lines_of(panel, runs)
        values = {value for line in lines for value in line.values if value is not None}
        if len(values) == 1 and panel.title != STALENESS:
            constant[panel.title] = values.pop()
        elif lines:
            charts.append(_chart(panel.section, panel.title, lines, several=several, smooth=panel.smooth))
            if panel.title == STALENESS:
                _add_bounds(charts[-1], {curves.max_staleness for curves in runs.values()})
    passed = [
        _Line(run, label=name, run_at=run_at, at=at, axis=points.axis, values=points.values)
        for run_at, (run, curves) in enumerate(runs.items())
        for at, (name, points) in enumerate(curves.pass_at.items())
    ]
    held_out = [_accuracy(runs), _chart(LEARNING, "Held-out pass@k (sampled)", passed, several=several)]
    charts[1:1] = [chart for chart in held_out if chart.data]
    for title in dict.fromkeys(title for curves in runs.values() for title in curves.machine):
        lines = [
            _Line(
                label, label="", run_at=at, at=0, axis=curves.machine[title].axis, values=curves.machine[title].values
            )
            for at, (label, curves) in enumerate(runs.items())
            if title in curves.machine
        ]
        charts.append(_chart(SPEED, title, lines, several=several))
    return CurveCharts(tuple(charts), constant)


def _lines_of(panel: Panel, runs: Mapping[str, Curves]) -> list[_Line]:
    """A line for each run and metric. Leaves out metrics that are 0 or equal to an earlier metric in all runs, unless
    none is left."""
    known = [name for name in panel.series if any(name in curves.series for curves in runs.values())]

    def idle(name: str) -> bool:
        return all(not any(curves.series.get(name, ())) for curves in runs.values())

    def twin(name: str) -> bool:
        earlier = known[: known.index(name)]
        return any(all(c.series.get(name) == c.series.get(other) for c in runs.values()) for other in earlier)

    shown = [name for name in known if not idle(name) and not twin(name)] or known[:1]
    labels = {name: panel.series[name] for name in shown}
    if len(panel.series) == 1 or list(labels.values()) == ["mean"]:
        labels = dict.fromkeys(shown, "")  # the title is enough
    return [
        _Line(run, label=labels[name], run_at=run_at, at=at, axis=curves.axis, values=curves.series[name])
        for run_at, (run, curves) in enumerate(runs.items())
        for at, name in enumerate(shown)
        if name in curves.series
    ]


def _chart(section: str, title: str, lines: Sequence[_Line], *, several: bool, smooth: bool = False) -> Chart:
    data: list[dict[str, Any]] = []
    labels: set[str] = set()
    for line in lines:
        mean = smoothed(line.values) if smooth else None
        trace = _trace(line, several=several)
        if mean is not None:
            faint = {"showlegend": False, "hoverinfo": "skip", "hovertemplate": None, "opacity": 0.4}
            data.append(trace | faint | {"line": {"color": trace["line"]["color"], "width": 1.0}})
            trace["y"] = short(mean)
        if several:
            symbol = SYMBOLS[line.run_at % len(SYMBOLS)]
            trace |= {"mode": "lines+markers", "marker": {"symbol": symbol, "size": 7, "maxdisplayed": MARKERS}}
        trace["showlegend"] = bool({line.label} - labels - {""})
        labels.add(line.label)
        data.append(trace)
    axis = {"tickformat": SHARE} if "share" in title else {}
    if title == LEARNING_RATE:
        axis = {"tickformat": "~g", "rangemode": "tozero"}
    return Chart(title, data=data, layout={"yaxis": axis}, section=section)


def _trace(line: _Line, *, several: bool) -> dict[str, Any]:
    """A curve. The legend shows each label once, and switches this label's curves in all runs."""
    name = ", ".join(filter(None, [line.run if several else "", line.label]))
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(line.values) == 1 else "lines",
        "name": line.label,
        "legendgroup": line.label,
        "hovertemplate": f"%{{x}}: %{{y}}<extra>{name}</extra>",
        "y": short(line.values),
        "meta": {axis: short(values) for axis, values in asdict(line.axis).items()},
        "line": {
            "color": COLOURS[(line.run_at if several else line.at) % len(COLOURS)],
            "dash": DASHES[line.at % len(DASHES)],
            "width": 2.0,
        },
    }


def _add_bounds(chart: Chart, bounds: set[int]) -> None:
    """Draw the bound. The largest staleness gets a broad line, because the mean may lie on it."""
    for trace in chart.data:
        broad = trace["name"] == "max"
        trace["line"] |= {"shape": "hvh", "dash": "solid", "width": 5.0 if broad else 1.6}
        trace["opacity"] = 0.45 if broad else 1.0
    chart.layout["shapes"] = [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": bound,
            "y1": bound,
            "line": {"color": FAINT, "width": 1.5, "dash": "dot"},
            "label": {"text": f"bound {bound}", "textposition": "end"},
        }
        for bound in sorted(bounds)
    ]
    chart.layout["yaxis"] = {"range": [-0.1, max(bounds) * 1.15 + 0.3], "dtick": max(1, max(bounds) // 4)}


def _accuracy(runs: Mapping[str, Curves]) -> Chart:
    """Evaluations with 95 % intervals. A line joins three or more evaluations on the same number of prompts."""
    data: list[dict[str, Any]] = []
    labels: set[str] = set()
    for run_at, (run, curves) in enumerate(runs.items()):
        kinds = list(dict.fromkeys(kind for kind, _ in curves.evaluations))
        for (kind, prompts), points in curves.evaluations.items():
            line = _Line(
                run,
                label=f"{kind}, {prompts:,} prompts",
                run_at=run_at,
                at=kinds.index(kind),
                axis=points.axis,
                values=points.values,
            )
            trace = _trace(line, several=len(runs) > 1)
            joined = len(points.values) > 2
            symbol = SYMBOLS[run_at % len(SYMBOLS)] + ("" if joined else "-open-dot" if line.at else "-open")
            measured = list(zip(points.values, points.spans, strict=True))
            trace |= {
                "mode": "lines+markers" if joined else "markers",
                "showlegend": line.label not in labels,
                "marker": {"symbol": symbol, "size": 6 if joined else 10, "color": trace["line"]["color"]},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": short([high - value for value, (_, high) in measured]),
                    "arrayminus": short([value - low for value, (low, _) in measured]),
                    "thickness": 1,
                    "width": 2,
                },
            }
            labels.add(line.label)
            data.append(trace)
    return Chart("Held-out accuracy", data=data, layout={"yaxis": {"range": [0, 1.04]}}, section=LEARNING)


# -- a single run: how its time was spent, and the distributions of its training data


def time_chart(times: Sequence[StepTime]) -> Chart:
    """Draw the trainer's time by activity, as shares in ranges of steps."""
    ranges = in_parts(times, STEP_RANGES)
    sums = [{part: math.fsum(time.seconds[part] for time in some) for part in PARTS} for some in ranges]
    shown = [part for part in PARTS if any(spent[part] for spent in sums)]
    shares = {
        NAMES[part].removeprefix("waiting for "): [spent[part] / (sum(spent.values()) or 1.0) for spent in sums]
        for part in shown
    }
    colours = [PART_COLOURS[part] for part in shown]
    return _stacked("The trainer's time", x=[some[-1].step + 1 for some in ranges], shares=shares, colours=colours)


def staleness_chart(steps: tuple[StepStaleness, ...]) -> Chart:
    """Draw the shares of tokens by staleness, over ranges of steps."""
    ranges = in_ranges(steps, STEP_RANGES)
    ages = range(max((max(step.tokens, default=0) for step in ranges), default=0) + 1)
    title, x = "Tokens by their staleness in versions", [step.last + 1 for step in ranges]
    shares = [[step.tokens[age] / (step.tokens.total() or 1) for step in ranges] for age in ages]
    if len(ages) > MOST_AGES:
        return _heat_map(title, x=x, y=list(ages), z=shares, name="staleness")
    return _stacked(
        title, x=x, shares={str(age): share for age, share in zip(ages, shares, strict=True)}, colours=ramp(len(ages))
    )


def shares_chart(title: str, found: Shares) -> Chart:
    of_groups = found.shares.keys() <= GROUP_COLOURS.keys()
    colours = [GROUP_COLOURS[name] for name in found.shares] if of_groups else ramp(len(found.shares))
    return _stacked(title, x=found.steps, shares=found.shares, colours=colours)


def histogram_chart(title: str, found: Histogram) -> Chart:
    return _heat_map(title, x=found.steps, y=found.values, z=found.shares)


def scatter_chart(points: Sequence[tuple[int, float, int]], rewards: Sequence[float] | None) -> Chart:
    """Draw length against reward, coloured by step.

    ``rewards``: all values that occur if they are few, otherwise None. With few values the points would cover each
    other, so they are scattered around their value.
    """
    tokens, heights, steps = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [])
    axis: dict[str, Any] = {"title": {"text": "reward"}}
    shown: Sequence[float] = heights
    if rewards is not None:
        apart = min((high - low for low, high in pairwise(rewards)), default=1.0)
        shown = [
            reward + JITTER * apart * (crc32(repr((at, count)).encode()) / 2**32 - 0.5) * 2
            for at, (reward, count) in enumerate(zip(heights, tokens, strict=True))
        ]
        axis |= {"tickvals": list(rewards), "zeroline": False}
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": tokens,
        "y": short(shown),
        "customdata": short(heights),
        "marker": {
            "size": 5,
            "opacity": 0.6,
            "color": steps,
            "colorscale": STEP_SCALE,
            "colorbar": {"title": {"text": "step"}, "thickness": 10, "outlinewidth": 0},
        },
        "hovertemplate": "%{x} tokens, reward %{customdata} (step %{marker.color})<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": "tokens"}}, "yaxis": axis}
    return Chart(f"Length and reward of {len(points):,} rollouts", [trace], layout)


def ramp(count: int) -> list[str]:
    """Return ``count`` colours, from low to high."""
    if count <= 1:
        return [RAMP[1]] * count
    colours = []
    for at in range(count):
        below, share = divmod(at * (len(RAMP) - 1) / (count - 1), 1)
        low, high = (bytes.fromhex(RAMP[min(int(below) + one, len(RAMP) - 1)][1:]) for one in (0, 1))
        mixed = bytes(round(dark + (light - dark) * share) for dark, light in zip(low, high, strict=True))
        colours.append(f"#{mixed.hex()}")
    return colours


def _stacked(title: str, x: Sequence[int], shares: Mapping[str, Sequence[float]], colours: Sequence[str]) -> Chart:
    widths = [at - before for before, at in pairwise([2 * x[0] - x[1] if len(x) > 1 else x[0] - 1, *x])] if x else []
    data = [
        {
            "type": "bar",
            "width": widths,
            "offset": [-width for width in widths],
            "name": name,
            "x": list(x),
            "y": short(share),
            "marker": {"color": colour, "line": {"width": 0}},
            "hovertemplate": f"{name} %{{y:.1%}} (to step %{{x}})<extra></extra>",
        }
        for (name, share), colour in zip(shares.items(), colours, strict=True)
    ]
    layout = {
        "showlegend": True,
        "barmode": "stack",
        "bargap": 0,
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"tickformat": SHARE, "range": [0, 1]},
    }
    return Chart(title, data, layout)


def _heat_map(
    title: str, x: Sequence[float], y: Sequence[float], z: Sequence[Sequence[float]], name: str = ""
) -> Chart:
    trace = {
        "type": "heatmap",
        "x": short(x),
        "y": short(y),
        "z": [short(row) for row in z],
        "zmin": 0,
        "colorbar": {"tickformat": SHARE, "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "to step %{x}<br>%{y}: %{z:.1%}<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": name}}}
    return Chart(title, [trace], layout)


def short(values: Sequence[float | None]) -> list[Any]:
    """Round numbers to ``DIGITS``. NaN and infinity, which JSON does not have, become None."""
    found: list[Any] = []
    for value in values:
        if value is None or not math.isfinite(value):
            found.append(None)
        else:
            rounded = value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")
            found.append(int(rounded) if float(rounded).is_integer() else rounded)
    return found
