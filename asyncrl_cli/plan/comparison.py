"""A simulation beside what a run measured: how far off it is, which part does not fit, and what each part explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from asyncrl_cli.plan.costs import Costs
from asyncrl_cli.plan.from_journal import Calibration, Observed
from asyncrl_cli.plan.prediction import STEPS
from asyncrl_cli.plan.simulator import Outcome, Scenario, simulate

STEP_WITHIN = 0.10
"""Of the step's time, that a simulation may be off."""
SHARES_WITHIN = 0.10
STALENESS_WITHIN = 0.2
"""Versions."""


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity; ``off`` is relative for the step, absolute for shares and staleness."""

    name: str
    predicted: float
    measured: float
    off: float
    within: float

    @property
    def fits(self) -> bool:
        return abs(self.off) <= self.within


def compare(outcome: Outcome, observed: Observed) -> tuple[Line, ...]:
    """What both know."""
    seconds = sum(observed.trainer.values())
    measured = {part: spent / seconds for part, spent in observed.trainer.items()}
    waits = outcome.share("groups", "missing", "other")
    lines = [
        Line("step s", outcome.step_s, observed.step_s, outcome.step_s / observed.step_s - 1, STEP_WITHIN),
        _share("trainer trains", outcome.share("training"), measured["training"]),
        _share("trainer publishes", outcome.share("publishing", "publish"), measured["publishing"]),
        _share("trainer waits", waits, measured["waiting"]),
    ]
    if observed.engines_idle is not None:
        lines.append(_share("engines idle", outcome.engines_idle, observed.engines_idle))
    stale = outcome.mean_staleness, observed.mean_staleness
    return (*lines, Line("mean staleness", *stale, stale[0] - stale[1], STALENESS_WITHIN))


def _share(name: str, predicted: float, measured: float) -> Line:
    return Line(name, predicted, measured, predicted - measured, SHARES_WITHIN)


def misfit(lines: tuple[Line, ...], outcome: Outcome, observed: Observed) -> str | None:
    """The part of the model that explains most of what is off; None where everything fits."""
    if all(line.fits for line in lines):
        return None
    seconds = {part: spent / observed.steps for part, spent in observed.trainer.items()}
    parts = {
        "trainer": _per_step(outcome, "training") - seconds["training"],
        "publish": _per_step(outcome, "publishing", "publish") - seconds["publishing"],
        "engines": _per_step(outcome, "groups", "missing", "other") - seconds["waiting"],
    }
    if any(not line.fits and line.name == "mean staleness" for line in lines) and lines[0].fits:
        return "lengths"
    return max(parts, key=lambda part: abs(parts[part]))


def _per_step(outcome: Outcome, *parts: str) -> float:
    return sum(outcome.trainer.get(part, 0.0) for part in parts) / outcome.steps


def error_parts(predicted: Scenario, measured: Calibration, steps: int = STEPS) -> Mapping[str, float]:
    """By how much the predicted step changes when one part of the prediction is replaced by what was measured: seconds.

    ``together`` replaces all. What is left between that and the run is what the simulator does not have.
    """
    base = simulate(predicted, steps).step_s
    own, then = predicted.costs, measured.costs
    swapped = {
        "lengths": replace(predicted, groups=measured.groups, costs=_with_share(own, then)),
        "engine": replace(predicted, costs=replace(own, engine=then.engine)),
        "trainer": replace(
            predicted, costs=replace(own, trainer=replace(then.trainer, trained_share=own.trainer.trained_share))
        ),
        "waits": replace(predicted, costs=replace(own, publish=then.publish, overheads=then.overheads)),
        "together": replace(predicted, groups=measured.groups, costs=then),
    }
    return {part: simulate(scenario, steps).step_s - base for part, scenario in swapped.items()}


def _with_share(own: Costs, then: Costs) -> Costs:
    """Which tokens are in the loss depends on the rollouts, and not on the trainer."""
    return replace(own, trainer=replace(own.trainer, trained_share=then.trainer.trained_share))
