"""A recorded run, simulated with its own lengths and costs (docs/planning.md). For `asyncrl staleness` and the report,
which have the spec of a run as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.inspect.resolved import engine_counts, setting, value_at
from asyncrl_cli.plan.comparison import Line, compare, misfit
from asyncrl_cli.plan.from_journal import Calibration
from asyncrl_cli.plan.prediction import STEPS, Devices, Prediction, predict, with_bound
from asyncrl_cli.plan.simulator import Outcome, Scenario, simulate


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A recorded run, simulated: its scenario, the outcome, and how far that is from what was measured. ``misfit``
    names the part that does not fit; no prediction holds then."""

    scenario: Scenario
    outcome: Outcome
    lines: tuple[Line, ...]
    misfit: str | None

    def under(self, max_staleness: int) -> Outcome:
        """The outcome with another staleness bound."""
        if max_staleness == self.scenario.settings.max_staleness:
            return self.outcome
        return simulate(with_bound(self.scenario, max_staleness), STEPS)


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


def reproduced(spec: Mapping[str, Any], measured: Calibration) -> Reproduced:
    """Simulate the run as it was."""
    recorded = recorded_scenario(spec, measured)
    own = simulate(recorded, STEPS)
    lines = compare(own, measured.observed)
    return Reproduced(recorded, own, lines, misfit(lines, own, measured.observed))


def recorded_prediction(spec: Mapping[str, Any], scenario: Scenario) -> Prediction:
    """The prediction for a recorded run, as `asyncrl plan` makes it for the same spec."""
    longest = max(rollout.response for group in scenario.groups for rollout in group.rollouts)
    devices = Devices.of(
        value_at(spec, "rollout.gpus_per_engine") or 0,
        value_at(spec, "trainer.gpus_per_rank") or 0,
        setting(spec, "trainer.ranks", 1),
    )
    return predict(scenario, setting(spec, "rollout.max_response_tokens", longest), devices)
