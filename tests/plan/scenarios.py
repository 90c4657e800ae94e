"""Scenarios for the simulator's tests."""

from __future__ import annotations

from asyncrl_cli.plan.costs import Costs, EngineCost, LinearIteration, Overheads, PublishCost, TrainerCost
from asyncrl_cli.plan.lengths import Groups, LengthModel
from asyncrl_cli.plan.simulator import Scenario, WeightUpdate
from asyncrl_cli.records.groups import BufferSettings


def settings(
    groups_per_step: int = 8, max_staleness: int = 2, publish_every: int = 1, group_size: int = 4
) -> BufferSettings:
    """A buffer's settings; values that the simulation replaces are 0."""
    return BufferSettings(groups_per_step, publish_every, max_staleness, "wait", 0, group_size, False)


def lengths(mean: float = 60.0, sigma: float = 0.8, cut: int = 300, number: int = 256, group_size: int = 4) -> Groups:
    """Groups with a long tail of lengths."""
    return LengthModel(mean, sigma, cut, prompt=20).groups(number, group_size)


COSTS = Costs(
    EngineCost(LinearIteration(0.005, 1e-4)),
    TrainerCost(0.1, 1e-4),
    PublishCost(0.05, 0.1, 0.03),
    Overheads(0.01, 0.02, 0.01),
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
