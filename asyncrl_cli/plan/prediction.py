"""Predicts a scenario: the time of a step, its limit, and the effect of other bounds.

This is the only source of advice on speed: `asyncrl plan` and `asyncrl report` print
``advice``. Every number comes from ``simulate``. The limit of a run is the part with the largest effect on the time of
a step when it is improved (decision 0047). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from asyncrl_cli.plan.costs import PublishCost
from asyncrl_cli.plan.lengths import Groups, describe
from asyncrl_cli.plan.simulator import Scenario, SimulationResult, simulate

STEPS = 30
"""Steps that a prediction simulates, after the buffer has filled."""
BOUNDS = (0, 1, 2, 3, 4, 6, 8)
"""Values of ``max_staleness`` to try, in addition to the scenario's value."""
NOTICEABLE = 0.05
"""Smaller savings are ignored: they are within the simulation's error."""
NEARLY = 0.8
"""The bound is named before another part if it saves at least this share of the other part's saving, because raising it
needs no devices."""

Limit = Literal["engines", "trainer", "bound", "tail", "publish", "rewards"]
"""A possible limit of the speed. ``tail``: some rollouts are much longer than others."""


class Improvement(NamedTuple):
    """An improvement of a part: as a noun, as the start of a sentence about the limit, and the remedy."""

    noun: str
    limit: str
    remedy: str


IMPROVED: Mapping[Limit, Improvement] = {
    "engines": Improvement(
        "twice as many engines",
        "The engines limit the speed: with twice as many",
        "Give generation more devices (`rollout.engines`), or less to do (`rollout.max_response_tokens`).",
    ),
    "trainer": Improvement(
        "a trainer twice as fast",
        "The trainer limits the speed: if it were twice as fast",
        "Give the trainer more devices (`trainer.ranks`), or larger micro-batches if memory allows it "
        "(`trainer.tokens_per_microbatch`).",
    ),
    "bound": Improvement(
        "a larger staleness bound",
        "The staleness bound limits the speed: with a larger one",
        "Raise `pipeline.max_staleness`, with `pipeline.mode: async`.",
    ),
    "tail": Improvement(
        "rollouts of equal length",
        "The longest rollouts limit the speed: if all were equally long, with the same total of tokens",
        "Shorten them (`rollout.max_response_tokens`), or let others run in the meantime (`pipeline.max_staleness`, "
        "`rollout.max_running_rollouts`).",
    ),
    "publish": Improvement(
        "publishing twice as fast",
        "Publishing weights limits the speed: if it were twice as fast",
        "Publish less often (`pipeline.publish_every`).",
    ),
    "rewards": Improvement(
        "rewards twice as fast",
        "Rewards limit the speed: if a group counted as finished twice as soon after its last token",
        "Make the reward faster, or score more at a time (`task.reward_workers`; for async rewards "
        "`task.reward_concurrency`).",
    ),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    outcome: SimulationResult
    sync: SimulationResult  # the same scenario with ``max_staleness`` 0, so trainer and engines work in turns
    lengths: Mapping[str, float]  # ``describe`` of its rollouts
    bound: int  # its ``max_staleness``
    bounds: Mapping[int, float]  # seconds of a step by ``max_staleness``
    savings: Mapping[Limit, float]  # share of a step's time that improving a part saves (``IMPROVED``)

    @property
    def ratio_to_sync(self) -> float:
        """Speed relative to ``sync``."""
        return self.sync.step_s / self.outcome.step_s

    @property
    def free(self) -> int:
        """The smallest bound that costs no noticeable time."""
        return free_bound(self.bounds)

    @property
    def limit(self) -> Limit | None:
        """The part that limits the speed, or None if no single part does."""
        largest_saving = max(self.savings.values())
        if largest_saving <= NOTICEABLE:
            return None
        if self.savings["bound"] > max(NOTICEABLE, NEARLY * largest_saving):
            return "bound"
        return max(self.savings, key=lambda name: self.savings[name])


def free_bound(bounds: Mapping[int, float]) -> int:
    """Return the smallest bound with steps that are not noticeably slower than with the fastest bound."""
    fastest_s = min(bounds.values())
    return next(bound for bound, step_s in sorted(bounds.items()) if (1 - NOTICEABLE) * step_s <= fastest_s)


def limit_text(prediction: Prediction) -> str:
    """Name the limit of the speed, and the remedy."""
    if (limit := prediction.limit) is None:
        return f"No single part limits the speed: improving one of them saves at most {NOTICEABLE:.0%} of the time."
    return f"{IMPROVED[limit].limit}, steps would take {less(prediction.savings[limit])} time. {IMPROVED[limit].remedy}"


def bound_text(prediction: Prediction) -> str:
    """Name the smallest sufficient ``max_staleness``."""
    free, current_bound = prediction.free, prediction.bound
    enough = f"max_staleness {free} is the smallest that costs no noticeable time (at most {NOTICEABLE:.0%})"
    if free > current_bound:
        saving = less(1 - prediction.bounds[free] / prediction.bounds[current_bound])
        return f"{enough}: steps would take {saving} time than with {current_bound}."
    return f"{enough}." if free == current_bound else f"{enough}; {current_bound} is set."


def savings_text(prediction: Prediction) -> str:
    """List the savings from improving the other parts."""
    limit, savings = prediction.limit, prediction.savings
    sorted_savings = sorted(((share, name) for name, share in savings.items() if name != limit), reverse=True)
    noticed = [f"{IMPROVED[name].noun} {share:.0%}" for share, name in sorted_savings if share > NOTICEABLE]
    if not noticed:
        return f"Improving any other part saves at most {NOTICEABLE:.0%}."
    return f"Other parts: {', '.join(noticed)} less time; each of the rest at most {NOTICEABLE:.0%}."


def advice(prediction: Prediction) -> tuple[str, ...]:
    """Name the limit of the speed and what helps, in sentences."""
    return limit_text(prediction), savings_text(prediction), bound_text(prediction)


def with_bound(scenario: Scenario, max_staleness: int) -> Scenario:
    """Return the scenario with another staleness bound.

    ``partial_rollouts`` is switched off, because it has no meaning at bound 0.
    """
    return replace(scenario, settings=replace(scenario.settings, max_staleness=max_staleness), partial_rollouts=False)


def predict(scenario: Scenario, max_response_tokens: int, steps: int = STEPS) -> Prediction:
    """Simulate a scenario and its neighbours. ``max_response_tokens``: the length at which responses are cut."""
    outcome = simulate(scenario, steps)
    current_bound = scenario.settings.max_staleness
    bounds = {
        bound: outcome.step_s if bound == current_bound else simulate(with_bound(scenario, bound), steps).step_s
        for bound in sorted({*BOUNDS, current_bound, max(2 * current_bound, BOUNDS[-1])})
    }
    savings: dict[Limit, float] = {
        name: 1 - simulate(improved, steps).step_s / outcome.step_s for name, improved in _improved(scenario).items()
    }
    savings["bound"] = 1 - min(step_s for bound, step_s in bounds.items() if bound >= current_bound) / outcome.step_s
    return Prediction(
        outcome=outcome,
        sync=outcome if current_bound == 0 else simulate(with_bound(scenario, 0), steps),
        lengths=describe(scenario.groups, max_response_tokens),
        bound=current_bound,
        bounds=bounds,
        savings=savings,
    )


def _improved(scenario: Scenario) -> dict[Limit, Scenario]:
    """The scenario with one part improved, for each part except the bound."""
    costs = scenario.costs
    publish, overheads = costs.publish, costs.overheads
    quick = PublishCost(publish.held_s / 2, publish.deliver_s / 2, publish.stall_s / 2)
    sooner = replace(overheads, settle_s=overheads.settle_s / 2)
    return {
        "engines": replace(scenario, engines=2 * scenario.engines),
        "trainer": replace(scenario, costs=replace(costs, trainer=costs.trainer.faster(2))),
        "tail": replace(scenario, groups=_even(scenario.groups)),
        "publish": replace(scenario, costs=replace(costs, publish=quick)),
        "rewards": replace(scenario, costs=replace(costs, overheads=sooner)),
    }


def _even(groups: Groups) -> Groups:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = round(fmean(rollout.response for rollout in rollouts))
    outside_s = fmean(rollout.outside_s for rollout in rollouts)
    return [
        replace(
            group, rollouts=tuple(replace(rollout, response=tokens, outside_s=outside_s) for rollout in group.rollouts)
        )
        for group in groups
    ]


def less(share: float) -> str:
    """Format a saving, such as `31% less`. A negative saving is `31% more`."""
    return f"{abs(share):.0%} {'less' if share >= 0 else 'more'}"
