"""The prediction for a scenario: the time of a step, what limits it, and what other settings and lengths would change.

Every number comes from ``simulate``; there are no other rules here. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl_cli.plan.lengths import describe, scaled
from asyncrl_cli.plan.simulator import Outcome, Scenario, simulate

STEPS = 40
"""Steps that a prediction simulates, after the buffer has filled."""
BOUNDS = (0, 1, 2, 3, 4, 6, 8)
"""The values of ``max_staleness`` that are tried, besides the scenario's own."""
FREE = 1.02
"""A bound costs no time when its steps are at most so many times as long as those of the fastest bound."""
SPANS = (0.7, 0.9, 1.1, 1.3)
"""The factors on the lengths that are tried."""
WORTH_IT = 0.03
"""A change is named when it shortens the step by more than this share."""

SPARE = 0.7
"""Engines have room for more sequences when they run less than this share of what they could."""
TRAINER_WAITS = 0.15
"""The trainer limits the run when it waits for less than this share of its time."""

Part = Literal["trainer", "engines", "tail", "publish"]
"""What limits the speed of a run: the trainer, which works nearly always; the engines, which do; the longest rollouts
of groups that are due (``tail``); or the time until engines have new weights."""


@dataclass(frozen=True, slots=True)
class Change:
    """Another setting, and the step it would give."""

    setting: str
    step_s: float
    gain: float  # share by which the step is shorter


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted for a scenario.

    Attributes:
        outcome: what its simulation gives.
        sync: the same with ``max_staleness`` 0, where trainer and engines work in turns.
        lengths: ``describe`` of its rollouts.
        spans: seconds of a step by the factor on lengths.
        bounds: seconds of a step by ``max_staleness``.
        free: the smallest bound that costs no time.
        binds: what limits the speed.
        changes: other settings that help, the best first.
    """

    outcome: Outcome
    sync: Outcome
    lengths: Mapping[str, float]
    spans: Mapping[float, float]
    bounds: Mapping[int, float]
    free: int
    binds: Part
    changes: tuple[Change, ...]

    @property
    def ratio_to_sync(self) -> float:
        """How many times as fast as ``sync``."""
        return self.sync.step_s / self.outcome.step_s


def with_bound(scenario: Scenario, max_staleness: int) -> Scenario:
    """The same with another staleness bound, and without ``partial_rollouts``, which has no meaning at bound 0."""
    return replace(scenario, settings=replace(scenario.settings, max_staleness=max_staleness), partial_rollouts=False)


def predict(scenario: Scenario, longest: int, alone: bool, steps: int = STEPS) -> Prediction:
    """Simulate a scenario and its neighbours.

    Args:
        longest: tokens at which responses are cut.
        alone: whether trainer and engines have devices of their own, so that more engines do not slow the trainer.
    """
    outcome = simulate(scenario, steps)
    own = scenario.settings.max_staleness
    bounds = {
        bound: outcome.step_s if bound == own else simulate(with_bound(scenario, bound), steps).step_s
        for bound in sorted({*BOUNDS, own})
    }
    least = min(bounds.values())
    return Prediction(
        outcome=outcome,
        sync=outcome if own == 0 else simulate(with_bound(scenario, 0), steps),
        lengths=describe(scenario.groups, longest),
        spans={
            factor: simulate(replace(scenario, groups=scaled(scenario.groups, factor, longest)), steps).step_s
            for factor in SPANS
        },
        bounds=bounds,
        free=next(bound for bound, step_s in bounds.items() if step_s <= FREE * least),
        binds=binding(outcome, scenario.slots),
        changes=tuple(sorted(_changes(scenario, outcome, bounds, longest, alone, steps), key=lambda one: one.step_s)),
    )


def binding(outcome: Outcome, slots: int) -> Part:
    """The part that limits the speed. A trainer that waits for rollouts waits for the longest ones alone, and not for
    the engines, if these have room for more: then the ledger admits no further group until the longest are done."""
    waits = outcome.share("groups", "missing")
    tail = outcome.running < SPARE * slots
    parts: dict[Part, float] = {
        "publish": outcome.share("publishing", "publish"),
        "tail": waits if tail else 0.0,
        "engines": 0.0 if tail else waits,
    }
    if waits + parts["publish"] < TRAINER_WAITS:
        return "trainer"
    return max(parts, key=lambda part: parts[part])


def _changes(
    scenario: Scenario, outcome: Outcome, bounds: Mapping[int, float], longest: int, alone: bool, steps: int
) -> Iterator[Change]:
    settings, costs = scenario.settings, scenario.costs
    others: dict[str, Scenario] = {}
    wider = [bound for bound in bounds if bound > settings.max_staleness]
    if wider:
        best = next((bound for bound in wider if bounds[bound] <= FREE * min(bounds.values())), wider[-1])
        others[f"pipeline.max_staleness={best}"] = with_bound(scenario, best)
    if alone:
        others[f"rollout.engines={2 * scenario.engines}"] = replace(scenario, engines=2 * scenario.engines)
        faster = replace(costs.trainer, per_token_s=costs.trainer.per_token_s / 2)
        others["twice trainer.ranks"] = replace(scenario, costs=replace(costs, trainer=faster))
    others[f"rollout.max_running_rollouts={2 * scenario.slots}"] = replace(scenario, slots=2 * scenario.slots)
    others[f"pipeline.publish_every={2 * settings.publish_every}"] = replace(
        scenario, settings=replace(settings, publish_every=2 * settings.publish_every)
    )
    others[f"rollout.max_response_tokens={longest // 2}"] = replace(
        scenario, groups=scaled(scenario.groups, 1.0, max(1, longest // 2))
    )
    for setting, other in others.items():
        step_s = simulate(other, steps).step_s
        if step_s < (1 - WORTH_IT) * outcome.step_s:
            yield Change(setting, step_s, 1 - step_s / outcome.step_s)
