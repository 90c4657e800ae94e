"""Compares a simulation with a run's measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl_cli.journal.staleness import mean_age
from asyncrl_cli.plan.from_journal import Observed
from asyncrl_cli.plan.simulator import SimulationResult

Unit = Literal["s", "share", "versions"]
WITHIN: dict[Unit, float] = {"s": 0.10, "share": 0.10, "versions": 0.2}
"""The largest accepted error of a simulation. It is relative for seconds, and absolute for other units."""


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity, simulated and measured, and its error ``off``."""

    name: str
    unit: Unit
    predicted: float
    measured: float
    off: float
    within: float

    @property
    def fits(self) -> bool:
        return abs(self.off) <= self.within


def compare(outcome: SimulationResult, observed: Observed) -> tuple[Line, ...]:
    """Compare the quantities that both have."""
    seconds = sum(observed.trainer.values())
    measured_shares = {activity: spent / seconds for activity, spent in observed.trainer.items()}
    rows: list[tuple[str, Unit, float, float | None]] = [
        ("step", "s", outcome.step_s, observed.step_s),
        ("trainer trains", "share", outcome.share("training"), measured_shares["training"]),
        ("trainer publishes", "share", outcome.share("publishing", "publish"), measured_shares["publishing"]),
        ("trainer waits", "share", outcome.share("groups", "missing", "other"), measured_shares["waiting"]),
        ("engines idle", "share", outcome.engines_idle, observed.engines_idle),
        ("mean staleness", "versions", mean_age(outcome.staleness), mean_age(observed.staleness)),
    ]
    return tuple(
        Line(
            name,
            unit=unit,
            predicted=simulated,
            measured=real,
            off=simulated / real - 1 if unit == "s" else simulated - real,
            within=WITHIN[unit],
        )
        for name, unit, simulated, real in rows
        if real is not None
    )
