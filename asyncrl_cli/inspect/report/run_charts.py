"""The charts of one run alone: how its time was spent, and how what it trained on was distributed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from zlib import crc32

from asyncrl_cli.inspect.report.charts import Chart, Key, short
from asyncrl_cli.inspect.report.curves import in_parts
from asyncrl_cli.inspect.report.evidence import NAMES, PARTS, StepTime, TrainerPart
from asyncrl_cli.journal.rollouts import GROUP_NAMES, Histogram, Shares
from asyncrl_cli.journal.staleness import StepStaleness, in_ranges

PART_COLOURS: Mapping[TrainerPart, str] = dict(
    zip(PARTS, ("#009e73", "#56b4e9", "#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#999999"), strict=True)
)
RAMP = ("#d3e4f3", "#9cc8e2", "#559ecb", "#2171b5", "#134b8a")
"""From low to high, in order also for colour-blind people."""
_GROUPS = dict(zip(GROUP_NAMES, ("#e69f00", "#0072b2", "#b8c4ce"), strict=True))
"""Groups with nothing right, with something to learn, and with nothing wrong."""
STEP_SCALE = [[0, "#56b4e9"], [0.5, "#9a6fb0"], [1, "#d55e00"]]
"""From early to late steps, seen on light and on dark ground."""
STEP_RANGES = 80
"""Columns of a chart of shares."""
MOST_AGES = 8
"""Values of staleness that are drawn as stacked shares; more become a heat map."""
JITTER = 0.3
"""The height over which equal rewards are scattered, as a share of the distance between two values."""


def time_chart(times: Sequence[StepTime]) -> Chart:
    """What the trainer did, as shares of its time in ranges of steps."""
    ranges = in_parts(times, STEP_RANGES)
    sums = [{part: math.fsum(time.seconds[part] for time in some) for part in PARTS} for some in ranges]
    shown = [part for part in PARTS if any(spent[part] for spent in sums)]
    shares = {
        NAMES[part].removeprefix("waiting for "): [spent[part] / (sum(spent.values()) or 1.0) for spent in sums]
        for part in shown
    }
    colours = [PART_COLOURS[part] for part in shown]
    return _stacked("The trainer's time", [some[-1].step + 1 for some in ranges], shares, colours)


def staleness_chart(steps: tuple[StepStaleness, ...]) -> Chart:
    """The share of tokens by their staleness, over ranges of steps."""
    ranges = in_ranges(steps, STEP_RANGES)
    ages = range(max((max(step.tokens, default=0) for step in ranges), default=0) + 1)
    title, x = "Tokens by their staleness in versions", [step.last + 1 for step in ranges]
    shares = [[step.tokens[age] / (step.tokens.total() or 1) for step in ranges] for age in ages]
    if len(ages) > MOST_AGES:
        return _heat_map(title, x, list(ages), shares, "staleness")
    return _stacked(title, x, {str(age): share for age, share in zip(ages, shares, strict=True)}, ramp(len(ages)))


def shares_chart(title: str, found: Shares) -> Chart:
    """Shares of rollouts or groups, over ranges of steps."""
    colours = (
        [_GROUPS[name] for name in found.shares] if found.shares.keys() <= _GROUPS.keys() else ramp(len(found.shares))
    )
    return _stacked(title, found.steps, found.shares, colours)


def histogram_chart(title: str, found: Histogram) -> Chart:
    """Distributions side by side, one for each range of steps."""
    return _heat_map(title, found.steps, found.values, found.shares, "")


def scatter_chart(points: Sequence[tuple[int, float, int]], rewards: Sequence[float] | None) -> Chart:
    """Length against reward, coloured by step. ``rewards``: all values that occur, if these are few; else None. With
    few values points would cover each other, so they are scattered around their value."""
    tokens, heights, steps = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [])
    title = f"Length and reward of {len(points):,} rollouts"
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
    return Chart(title, [trace], {"xaxis": {"title": {"text": "tokens"}}, "yaxis": axis})


def ramp(count: int) -> list[str]:
    """So many colours, from low to high."""
    if count <= 1:
        return [RAMP[1]] * count
    positions = [at * (len(RAMP) - 1) / (count - 1) for at in range(count)]
    return [_mixed(RAMP[int(at)], RAMP[min(int(at) + 1, len(RAMP) - 1)], at % 1) for at in positions]


def _mixed(one: str, other: str, share: float) -> str:
    parts = ((int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in parts)


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
        "barmode": "stack",
        "bargap": 0,
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"tickformat": ".0%", "range": [0, 1]},
    }
    key = tuple(Key(name, colour, "area") for name, colour in zip(shares, colours, strict=True))
    return Chart(title, data, layout, key=key)


def _heat_map(title: str, x: Sequence[float], y: Sequence[float], z: Sequence[Sequence[float]], name: str) -> Chart:
    trace = {
        "type": "heatmap",
        "x": short(x),
        "y": short(y),
        "z": [short(row) for row in z],
        "zmin": 0,
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "to step %{x}<br>%{y}: %{z:.1%}<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": name}}}
    return Chart(title, [trace], layout)
