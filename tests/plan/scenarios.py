"""Scenarios for the simulator's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

from asyncrl_cli.plan.costs import Costs, EngineCost, Overheads, PublishCost, TrainerCost
from asyncrl_cli.plan.lengths import GroupLengths, Groups, RolloutLength
from asyncrl_cli.plan.simulator import Scenario, WeightUpdate
from asyncrl_cli.records.groups import BufferSettings


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Log-normal response lengths, truncated at ``cut``."""

    mean: float  # of the truncated lengths
    sigma: float  # standard deviation of the logarithms before truncation
    cut: int  # the length at which responses are truncated
    prompt: int = 0  # tokens of every prompt
    correlation: float = 0.3  # of the logarithms within a group, 0 to 1

    def groups(self, number: int, group_size: int) -> tuple[GroupLengths, ...]:
        """Draw groups, the same at every call. Their mean is ``mean`` up to rounding, if the cut allows it."""
        draw = random.Random(0)
        shared, own = self.sigma * sqrt(self.correlation), self.sigma * sqrt(1 - self.correlation)
        drawn = []
        for _ in range(number):
            common = draw.gauss(0, shared)
            drawn.append([exp(common + draw.gauss(0, own)) for _ in range(group_size)])
        scale = _scale(self.mean, [length for group in drawn for length in group], self.cut)
        return tuple(
            GroupLengths(
                tuple(RolloutLength(self.prompt, max(1, min(self.cut, round(scale * length)))) for length in group)
            )
            for group in drawn
        )


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


def lengths(mean: float = 60.0, sigma: float = 0.8, cut: int = 300, number: int = 256, group_size: int = 4) -> Groups:
    """Groups with a long tail of lengths."""
    return LengthModel(mean, sigma, cut, prompt=20).groups(number, group_size)


COSTS = Costs(
    EngineCost(0.005, 1e-4), TrainerCost(0.1, 1e-4), PublishCost(0.05, 0.1, 0.03), Overheads(0.01, 0.02, 0.01)
)


def scenario(
    of: BufferSettings | None = None,
    groups: Groups | None = None,
    costs: Costs = COSTS,
    engines: int = 1,
    slots: int = 64,
    weight_update: WeightUpdate = "keep",
) -> Scenario:
    """A run of a small model, like the quickstart's."""
    of = of or settings()
    return Scenario(of, groups or lengths(group_size=of.group_size), costs, engines, slots, weight_update)
