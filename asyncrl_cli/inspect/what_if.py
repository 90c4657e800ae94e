"""Simulates a recorded run with its measured lengths and costs (docs/planning.md), for `asyncrl staleness` and the
report. They have a run's spec only as plain values."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.resolved import engine_counts, setting, value_at
from asyncrl_cli.plan.comparison import Line, compare, misfit
from asyncrl_cli.plan.from_journal import Calibration, calibrate
from asyncrl_cli.plan.prediction import STEPS, Devices, Prediction, predict, with_bound
from asyncrl_cli.plan.simulator import Outcome, Scenario, simulate


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A recorded run, simulated with its own settings."""

    spec: Mapping[str, Any]
    measured: Calibration
    scenario: Scenario
    outcome: Outcome
    lines: tuple[Line, ...]
    """The outcome next to the measurements."""
    misfit: str | None
    """The part that does not fit the measurements; then no prediction holds. None if all parts fit."""

    def under(self, max_staleness: int) -> Outcome:
        if max_staleness == self.scenario.settings.max_staleness:
            return self.outcome
        return simulate(with_bound(self.scenario, max_staleness), STEPS)

    def prediction(self) -> Prediction:
        """Predict the run, as `asyncrl plan` does for the same spec."""
        longest = max(rollout.response for group in self.scenario.groups for rollout in group.rollouts)
        devices = Devices.of(
            value_at(self.spec, "rollout.gpus_per_engine") or 0,
            value_at(self.spec, "trainer.gpus_per_rank") or 0,
            setting(self.spec, "trainer.ranks", 1),
        )
        return predict(self.scenario, setting(self.spec, "rollout.max_response_tokens", longest), devices)


def no_advice(findings: Sequence[HealthFinding]) -> str:
    """Return why a run with these findings gets no advice on its speed; empty if it learns."""
    for finding in findings:
        if finding.stops_learning and finding.last_step is None:
            since = f"the training has been unhealthy since step {finding.first_step} ({finding.rule})"
            return f"{since}, which matters more than its speed"
    return ""


def reproduced(spec: Mapping[str, Any], measured: Calibration) -> Reproduced:
    """Simulate a run with its own settings. If its spec has no limit of running rollouts, use their largest number."""
    engines, _ = engine_counts(spec)
    update = value_at(spec, "pipeline.weight_update")
    scenario = Scenario(
        settings=measured.settings,
        groups=measured.groups,
        costs=measured.costs,
        engines=engines,
        slots=setting(spec, "rollout.max_running_rollouts", -(-measured.concurrency // engines)),
        weight_update=update if update in ("keep", "recompute", "drain") else "keep",
        partial_rollouts=value_at(spec, "pipeline.partial_rollouts") is True,
    )
    outcome = simulate(scenario, STEPS)
    lines = compare(outcome, measured.observed)
    return Reproduced(
        spec,
        measured=measured,
        scenario=scenario,
        outcome=outcome,
        lines=lines,
        misfit=misfit(lines, outcome, measured.observed),
    )


def reproduced_from(connection: sqlite3.Connection, spec: Mapping[str, Any]) -> Reproduced:
    """Simulate the run in a journal. Raises ``ValueError`` for too few steps, or batches without groups."""
    on_one_host = not value_at(spec, "trainer.gpus_per_rank") and not value_at(spec, "rollout.gpus_per_engine")
    return reproduced(spec, calibrate(connection, on_one_host))
