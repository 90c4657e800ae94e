"""The report's charts over the course of runs, as figures of plotly.js: dicts that become JSON.

Each curve carries its x values three times (``xs``), and the page's script shows the ones that are chosen. Colours that
depend on light or dark are the script's. Nothing depends on colour alone: several metrics of a run differ by their
dashes, several runs by their markers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl_cli.inspect.report.curves import Axis, Curves, smoothed

COLOURS = ("#2a85c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""By Okabe and Ito, so that colour-blind people tell them apart; the blue is lighter, to be seen on dark ground."""
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x")
DASHES = ("solid", "dash", "dot", "dashdot")
FAINT = "#8b949e"
MARKERS = 8
"""Markers along a run's curve, where runs are compared."""
DIGITS = 5
"""Significant digits of a number in a chart."""


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend. ``shape`` is a line's dash, ``broad``, ``area``, or a point: ``marker``, ``dotted``."""

    label: str
    colour: str
    shape: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure. ``xs``: by axis, the x values of each trace; None where x is something else. ``section`` is the part
    of the page that it belongs to."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    xs: dict[str, list[list[float]]] | None = None
    key: tuple[Key, ...] = ()
    section: str = ""

    def document(self) -> dict[str, Any]:
        """What the page's script is given."""
        return {"data": self.data, "layout": self.layout, "xs": self.xs}


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of metrics, by the labels they have in it. A ``smooth`` one has a running mean over the values."""

    section: str
    title: str
    series: Mapping[str, str]
    smooth: bool = True


LEARNING, OPTIMIZATION, SPEED = "Learning", "Optimization", "Staleness and speed"
STALENESS = "Staleness of groups (versions)"
LEARNING_RATE = "Learning rate"
PANELS = (
    Panel(LEARNING, "Reward", {"reward/mean": "mean", "reward/correct": "share correct"}),
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
    Panel(
        OPTIMIZATION,
        "Log-prob gap to the sampling policy (nats)",
        {"correction/logprob_gap_mean": "mean"},
    ),
    Panel(SPEED, STALENESS, {"staleness/groups_max": "max", "staleness/groups_mean": "mean"}, smooth=False),
    Panel(SPEED, "Generated tokens per second", {"tokens/generated_per_s": "tokens/s"}),
    Panel(SPEED, "Step time (s)", {"time/step_s": "step", "time/train_s": "training"}),
    Panel(SPEED, "Engines (share of time)", {"share/engines_busy": "busy", "share/engines_paused": "paused"}),
)
SERIES = tuple(name for panel in PANELS for name in panel.series)


@dataclass(frozen=True, slots=True)
class CurveCharts:
    """Charts of all runs together; and panels in which nothing ever changed, with the value."""

    charts: tuple[Chart, ...]
    constant: Mapping[str, float] = field(default_factory=dict)


def curve_charts(runs: Mapping[str, Curves]) -> CurveCharts:
    """Charts of held-out accuracy, of the ``PANELS`` and of the machine, with all runs in each. Charts for which no run
    has data are omitted. ``runs`` are by their labels."""
    charts, constant = [], {}
    for panel in PANELS:
        lines = _lines_of(panel, runs)
        values = {value for line in lines for value in line.values if value is not None}
        if len(values) == 1 and panel.title != STALENESS:
            constant[panel.title] = values.pop()
        elif lines:
            charts.append(_chart(panel.section, panel.title, lines, len(runs) > 1, panel.smooth))
            if panel.title == STALENESS:
                charts[-1] = _with_bounds(charts[-1], {curves.max_staleness for curves in runs.values()})
    charts[1:1] = [chart for chart in (_accuracy(runs), _pass_at(runs)) if chart.data]
    for title in dict.fromkeys(title for curves in runs.values() for title in curves.machine):
        lines = [
            _Line(label, "", at, 0, curves.machine[title].axis, curves.machine[title].values)
            for at, (label, curves) in enumerate(runs.items())
            if title in curves.machine
        ]
        charts.append(_chart(SPEED, title, lines, len(runs) > 1, smooth=False))
    return CurveCharts(tuple(charts), constant)


@dataclass(frozen=True, slots=True)
class _Line:
    run: str
    label: str
    run_at: int
    at: int
    axis: Axis
    values: Sequence[float | None]


def _lines_of(panel: Panel, runs: Mapping[str, Curves]) -> list[_Line]:
    """A line for each run and metric. Metrics that are 0, or equal to an earlier one, in all runs are omitted, unless
    no other is left."""
    known = [name for name in panel.series if any(name in curves.series for curves in runs.values())]

    def idle(name: str) -> bool:
        return all(not any(curves.series.get(name, ())) for curves in runs.values())

    def twin(name: str) -> bool:
        earlier = known[: known.index(name)]
        return any(all(c.series.get(name) == c.series.get(other) for c in runs.values()) for other in earlier)

    shown = [name for name in known if not idle(name) and not twin(name)] or known[:1]
    labels = {name: panel.series[name] for name in shown}
    if len(panel.series) == 1 or list(labels.values()) == ["mean"]:
        labels = dict.fromkeys(shown, "")  # the title says it
    return [
        _Line(run, labels[name], run_at, at, curves.axis, curves.series[name])
        for run_at, (run, curves) in enumerate(runs.items())
        for at, name in enumerate(shown)
        if name in curves.series
    ]


def _chart(section: str, title: str, lines: Sequence[_Line], several: bool, smooth: bool) -> Chart:
    data: list[dict[str, Any]] = []
    axes: list[Axis] = []
    key: dict[str, Key] = {}
    for line in lines:
        colour = COLOURS[(line.run_at if several else line.at) % len(COLOURS)]
        dash = DASHES[line.at % len(DASHES)]
        mean = smoothed(line.values) if smooth else None
        name = ", ".join(part for part in (line.run if several else "", line.label) if part) or title
        if mean is not None:
            data.append(_trace(name, line.values, colour, "solid", 1.0) | {"opacity": 0.4, "hoverinfo": "skip"})
            axes.append(line.axis)
        trace = _trace(name, line.values if mean is None else mean, colour, dash, 2.0)
        if several:
            marker = {"symbol": SYMBOLS[line.run_at % len(SYMBOLS)], "size": 7, "maxdisplayed": MARKERS}
            trace |= {"mode": "lines+markers", "marker": marker}
        data.append(trace)
        axes.append(line.axis)
        if line.label:
            key[line.label] = Key(line.label, FAINT if several else colour, dash)
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": _axis_of(title)}
    return Chart(title, data, layout, _xs(axes), tuple(key.values()), section)


def _axis_of(title: str) -> dict[str, Any]:
    if title == LEARNING_RATE:
        return {"tickformat": "~e", "rangemode": "tozero"}
    return {"tickformat": ".0%"} if "share" in title else {}


def _trace(name: str, values: Sequence[float | None], colour: str, dash: str, width: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(values) == 1 else "lines",
        "name": name,
        "y": short(values),
        "line": {"color": colour, "dash": dash, "width": width},
    }


def _xs(axes: Sequence[Axis]) -> dict[str, list[list[float]]]:
    return {
        "steps": [short(axis.steps) for axis in axes],
        "tokens": [short(axis.tokens) for axis in axes],
        "hours": [short(axis.hours) for axis in axes],
    }


def _with_bounds(chart: Chart, bounds: set[int]) -> Chart:
    """The staleness with its bound; the largest one is drawn broad, so that the mean on it does not hide it."""
    for trace in chart.data:
        broad = trace["name"].endswith("max")
        trace["line"] |= {"shape": "hvh", "dash": "solid"} | ({"width": 5.0} if broad else {"width": 1.6})
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
        }
        for bound in sorted(bounds)
    ]
    chart.layout["annotations"] = [
        {
            "xref": "paper",
            "x": 1,
            "xanchor": "right",
            "y": bound,
            "yanchor": "bottom",
            "text": f"bound {bound}",
            "showarrow": False,
        }
        for bound in sorted(bounds)
    ]
    chart.layout["yaxis"] = {"range": [-0.1, max(bounds) * 1.15 + 0.3], "dtick": max(1, max(bounds) // 4)}
    key = tuple(Key(one.label, one.colour, "broad" if one.label == "max" else "solid") for one in chart.key)
    return replace(chart, key=key)


def _accuracy(runs: Mapping[str, Curves]) -> Chart:
    """Evaluations with their 95 % intervals. A line joins those on as many prompts, where there are three at least."""
    data: list[dict[str, Any]] = []
    axes: list[Axis] = []
    key: dict[str, Key] = {}
    several = len(runs) > 1
    for run_at, (run, curves) in enumerate(runs.items()):
        kinds = list(dict.fromkeys(kind for kind, _ in curves.evaluations))
        for (kind, prompts), points in curves.evaluations.items():
            at = kinds.index(kind)
            colour = COLOURS[(run_at if several else at) % len(COLOURS)]
            joined = len(points.values) > 2
            measured = list(zip(points.values, points.spans, strict=True))
            label = f"{kind}, {prompts:,} prompts"
            dash = DASHES[at % len(DASHES)]
            trace = _trace(f"{run}, {label}" if several else label, points.values, colour, dash, 2.0)
            symbol = SYMBOLS[run_at % len(SYMBOLS)] + ("" if joined else "-open-dot" if at else "-open")
            trace |= {
                "mode": "lines+markers" if joined else "markers",
                "marker": {"symbol": symbol, "size": 6 if joined else 10, "color": colour},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": short([high - value for value, (_, high) in measured]),
                    "arrayminus": short([value - low for value, (low, _) in measured]),
                    "thickness": 1,
                    "width": 2,
                },
            }
            data.append(trace)
            axes.append(points.axis)
            key[label] = Key(label, FAINT if several else colour, dash if joined else "dotted" if at else "marker")
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"range": [0, 1.04]}}
    return Chart("Held-out accuracy", data, layout, _xs(axes), tuple(key.values()), LEARNING)


def _pass_at(runs: Mapping[str, Curves]) -> Chart:
    lines = [
        _Line(run, name, run_at, at, points.axis, points.values)
        for run_at, (run, curves) in enumerate(runs.items())
        for at, (name, points) in enumerate(curves.pass_at.items())
    ]
    return _chart(LEARNING, "Held-out pass@k (sampled)", lines, len(runs) > 1, smooth=False)


def short(values: Sequence[float | None]) -> list[Any]:
    """Numbers with few digits; None for NaN and infinity, which JSON does not have."""
    return [
        None if value is None or not math.isfinite(value) else value if isinstance(value, int) else _rounded(value)
        for value in values
    ]


def _rounded(value: float) -> float | int:
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def sections(charts: Sequence[Chart]) -> Iterator[tuple[str, list[Chart]]]:
    """Charts by the section they belong to, in their order."""
    for section in dict.fromkeys(chart.section for chart in charts):
        yield section, [chart for chart in charts if chart.section == section]
