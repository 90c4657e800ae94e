"""Scenarios for the simulator's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp, sqrt

from asyncrl_cli.plan.costs import Costs, EngineCost, Overheads, PublishCost, TrainerCost
from asyncrl_cli.plan.lengths import GroupLengths, Groups, RolloutLength
from asyncrl_cli.plan.simulator import Scenario
from asyncrl_cli.records.groups import BufferSettings

CORRELATION = 0.3
"""Of the logarithms of response lengths within a group, 0 to 1."""


def _scale(mean: float, lengths: Sequence[float], cut: int) -> float:
    """Find, by bisection, the factor that gives the lengths this mean after truncation."""
    low, high = 0.0, 1e9
    for _ in range(100):
        middle = (low * high) ** 0.5 if low else high / 1e3
        if sum(min(cut, middle * length) for length in lengths) / len(lengths) < mean:
            low = middle
        else:
            high = middle
    return high


def settings(
    groups_per_step: int = 8, max_staleness: int = 2, publish_every: int = 1, group_size: int = 4
) -> BufferSettings:
    """A buffer's settings; values that the simulation replaces are 0."""
    return BufferSettings(groups_per_step, publish_every, max_staleness, "wait", 0, group_size, False)


def lengths(mean: float = 60.0, sigma: float = 0.8, cut: int = 300, group_size: int = 4) -> Groups:
    """256 groups of log-normal response lengths, truncated at ``cut``; the same at every call.

    ``mean``: of the truncated lengths, up to rounding, if the cut allows it. ``sigma``: standard deviation of the
    logarithms before truncation.
    """
    draw = random.Random(0)
    group_sigma, rollout_sigma = sigma * sqrt(CORRELATION), sigma * sqrt(1 - CORRELATION)
    drawn = []
    for _ in range(256):
        common = draw.gauss(0, group_sigma)
        drawn.append([exp(common + draw.gauss(0, rollout_sigma)) for _ in range(group_size)])
    scale = _scale(mean, [length for group in drawn for length in group], cut)
    return tuple(
        GroupLengths(tuple(RolloutLength(20, max(1, min(cut, round(scale * length)))) for length in group))
        for group in drawn
    )


COSTS = Costs(
    EngineCost(0.005, 1e-4), TrainerCost(0.1, 1e-4), PublishCost(0.05, 0.1, 0.03), Overheads(0.01, 0.02, 0.01)
)


def scenario(
    of: BufferSettings | None = None,
    groups: Groups | None = None,
    costs: Costs = COSTS,
    engines: int = 1,
    slots: int = 64,
) -> Scenario:
    """A run of a small model, like the quickstart's."""
    of = of or settings()
    return Scenario(of, groups or lengths(group_size=of.group_size), costs, engines, slots)
