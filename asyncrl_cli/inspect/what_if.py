"""A run under another staleness bound: its own lengths and costs, simulated (docs/planning.md). For the page of
`asyncrl staleness` and the advice of the report, which have the spec of a run as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.inspect.resolved import engine_counts, setting, value_at
from asyncrl_cli.plan.comparison import Line, compare, misfit
from asyncrl_cli.plan.from_journal import Calibration
from asyncrl_cli.plan.prediction import with_bound
from asyncrl_cli.plan.simulator import Outcome, Scenario, simulate

STEPS = 40
"""Steps that are simulated, after the buffer has filled."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Simulated outcomes by bound, the recorded one first, and how far that is from what was measured. ``misfit`` names
    the part that does not fit; the others mean nothing then."""

    outcomes: Mapping[int, Outcome]
    lines: tuple[Line, ...]
    misfit: str | None


def shares_host(spec: Mapping[str, Any]) -> bool:
    """Whether trainer and engines may run on the same processors."""
    return not value_at(spec, "trainer.gpus_per_rank") and not value_at(spec, "rollout.gpus_per_engine")


def recorded_scenario(spec: Mapping[str, Any], measured: Calibration) -> Scenario:
    """The run itself. Without a limit of rollouts in its spec, engines run as many as ran at once."""
    engines, _ = engine_counts(spec)
    update = value_at(spec, "pipeline.weight_update")
    return Scenario(
        settings=measured.settings,
        groups=measured.groups,
        costs=measured.costs,
        engines=engines,
        slots=setting(spec, "rollout.max_running_rollouts", -(-measured.concurrency // engines)),
        weight_update=update if update in ("keep", "recompute", "drain") else "keep",
        partial_rollouts=value_at(spec, "pipeline.partial_rollouts") is True,
    )


def what_if(spec: Mapping[str, Any], measured: Calibration, bounds: Iterable[int]) -> WhatIf:
    """Simulate the run under its own bound and under others."""
    recorded = recorded_scenario(spec, measured)
    own = simulate(recorded, STEPS)
    lines = compare(own, measured.observed)
    others = {bound: simulate(with_bound(recorded, bound), STEPS) for bound in bounds}
    outcomes = {measured.settings.max_staleness: own} | others
    return WhatIf(outcomes, lines, misfit(lines, own, measured.observed))
