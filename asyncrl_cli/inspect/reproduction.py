"""Simulates a recorded run with its measured lengths and costs (docs/planning.md), for `asyncrl plan` and the report.
They have a run's spec only as plain values."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.resolved import engine_counts, setting, value_at
from asyncrl_cli.plan.comparison import Line, compare
from asyncrl_cli.plan.from_journal import Calibration, calibrate
from asyncrl_cli.plan.prediction import STEPS, Prediction, predict
from asyncrl_cli.plan.simulator import Scenario, simulate


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A recorded run, simulated with its own settings."""

    scenario: Scenario
    lines: tuple[Line, ...]
    """The outcome next to the measurements."""

    @property
    def fits(self) -> bool:
        """True if all measurements are reproduced. Otherwise no prediction holds."""
        return all(line.fits for line in self.lines)


def no_advice(findings: Sequence[HealthFinding]) -> str:
    """Return why a run with these findings gets no advice on its speed; empty if it learns."""
    for finding in findings:
        if finding.stops_learning and finding.last_step is None:
            since = f"the training has been unhealthy since step {finding.first_step} ({finding.rule})"
            return f"{since}, which matters more than its speed"
    return ""


def reproduced(spec: Mapping[str, Any], calibration: Calibration) -> Reproduced:
    """Simulate a run with its own settings. If its spec has no limit of running rollouts, use their largest number."""
    engines, _ = engine_counts(spec)
    update = value_at(spec, "pipeline.weight_update")
    scenario = Scenario(
        settings=calibration.settings,
        groups=calibration.groups,
        costs=calibration.costs,
        engines=engines,
        slots=setting(spec, "rollout.max_running_rollouts", -(-calibration.concurrency // engines)),
        weight_update=update if update in ("keep", "recompute", "drain") else "keep",
        partial_rollouts=value_at(spec, "pipeline.partial_rollouts") is True,
    )
    return Reproduced(scenario, compare(simulate(scenario, STEPS), calibration.observed))


def prediction(connection: sqlite3.Connection, spec: Mapping[str, Any]) -> Prediction | str:
    """Predict a recorded run, as `asyncrl plan` does for the same spec. Returns the reason if that is impossible."""
    gpus_per_engine, gpus_per_rank = (
        value_at(spec, key) or 0 for key in ("rollout.gpus_per_engine", "trainer.gpus_per_rank")
    )
    try:
        simulated = reproduced(spec, calibrate(connection, not gpus_per_engine and not gpus_per_rank))
    except ValueError as error:
        return str(error)
    if not simulated.fits:
        return "the simulator does not reproduce the recorded steps within 10 %"
    longest_response = max(rollout.response for group in simulated.scenario.groups for rollout in group.rollouts)
    return predict(simulated.scenario, setting(spec, "rollout.max_response_tokens", longest_response))
