"""Predicts a scenario: the time of a step, its limit, and the effect of other settings.

This is the only source of advice on speed: `asyncrl plan` and `asyncrl report` print
``advice``. Every number comes from ``simulate``. The limit of a run is the part with the largest effect on the time of
a step when it is improved (decision 0047). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from asyncrl_cli.plan.costs import PublishCost
from asyncrl_cli.plan.lengths import Groups, describe, truncated
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
        "Raise `pipeline.max_staleness`.",
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


def separate_ranks(gpus_per_engine: float, gpus_per_rank: float, ranks: int) -> int | None:
    """Return the number of trainer ranks, or None if trainer and engines share processors or GPUs."""
    is_shared = (not gpus_per_engine and not gpus_per_rank) or 0 < gpus_per_engine < 1
    return None if is_shared else ranks


@dataclass(frozen=True, slots=True)
class Change:
    """Another setting: the seconds per step, and the share of time that it saves."""

    setting: str
    step_s: float
    gain: float

    def __str__(self) -> str:
        return f"{self.setting}: {self.step_s:.3g} s, {less(self.gain)}"


@dataclass(frozen=True, slots=True)
class Prediction:
    outcome: SimulationResult
    sync: SimulationResult  # the same scenario with ``max_staleness`` 0, so trainer and engines work in turns
    lengths: Mapping[str, float]  # ``describe`` of its rollouts
    bound: int  # its ``max_staleness``
    bounds: Mapping[int, float]  # seconds of a step by ``max_staleness``
    savings: Mapping[Limit, float]  # share of a step's time that improving a part saves (``IMPROVED``)
    changes: tuple[Change, ...]  # other settings that save noticeable time, the best first

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


def changes_text(prediction: Prediction) -> str:
    """List the settings that help."""
    if not prediction.changes:
        return f"None of the other settings that were tried saves more than {NOTICEABLE:.0%}."
    return f"Settings that help: {'; '.join(map(str, prediction.changes))}."


def advice(prediction: Prediction) -> tuple[str, ...]:
    """Name the limit of the speed and the changes that help, in sentences."""
    return limit_text(prediction), savings_text(prediction), bound_text(prediction), changes_text(prediction)


def with_bound(scenario: Scenario, max_staleness: int) -> Scenario:
    """Return the scenario with another staleness bound.

    ``partial_rollouts`` is switched off, because it has no meaning at bound 0.
    """
    return replace(scenario, settings=replace(scenario.settings, max_staleness=max_staleness), partial_rollouts=False)


def predict(
    scenario: Scenario, max_response_tokens: int, ranks: int | None, steps: int = STEPS, mode: str = "async"
) -> Prediction:
    """Simulate a scenario and its neighbours.

    Args:
        max_response_tokens: the length at which responses are cut.
        ranks: the trainer's ranks; None if trainer and engines share processors or GPUs. More of either would then slow
            down the other, so no change of their number is tried.
        mode: `pipeline.mode`, which in other modes than `async` sets the bound and how engines take new weights.
    """
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
    alternatives = _alternatives(scenario, max_response_tokens, ranks)
    bound = max(free_bound(bounds), current_bound)
    if mode != "async":
        asynchronous = replace(with_bound(scenario, bound), weight_update="keep")
        alternatives[f"pipeline.mode=async, pipeline.max_staleness={bound}"] = asynchronous
    else:
        if bound > current_bound:
            alternatives[f"pipeline.max_staleness={bound}"] = with_bound(scenario, bound)
        if scenario.weight_update != "keep":
            alternatives["pipeline.weight_update=keep"] = replace(scenario, weight_update="keep")
    # Only if publishing costs time, because groups get older with rarer versions. A run ends at a version.
    every = 2 * scenario.settings.publish_every
    if savings["publish"] > NOTICEABLE and scenario.settings.total_steps % every == 0:
        rarely = replace(scenario, settings=replace(scenario.settings, publish_every=every))
        alternatives[f"pipeline.publish_every={every}"] = rarely
    return Prediction(
        outcome=outcome,
        sync=outcome if current_bound == 0 else simulate(with_bound(scenario, 0), steps),
        lengths=describe(scenario.groups, max_response_tokens),
        bound=current_bound,
        bounds=bounds,
        savings=savings,
        changes=tuple(sorted(_helpful(alternatives, outcome.step_s, steps), key=lambda change: change.step_s)),
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


def _alternatives(scenario: Scenario, max_response_tokens: int, ranks: int | None) -> dict[str, Scenario]:
    trainer = scenario.costs.trainer
    shorter = truncated(scenario.groups, max(1, max_response_tokens // 2))
    alternatives = {
        f"rollout.max_running_rollouts={2 * scenario.slots}": replace(scenario, slots=2 * scenario.slots),
        f"rollout.max_response_tokens={max_response_tokens // 2}": replace(scenario, groups=shorter),
    }
    if ranks is not None:
        more_ranks = replace(trainer, per_token_s=trainer.per_token_s / 2)
        alternatives |= {
            f"rollout.engines={2 * scenario.engines}": replace(scenario, engines=2 * scenario.engines),
            f"trainer.ranks={2 * ranks}": replace(scenario, costs=replace(scenario.costs, trainer=more_ranks)),
        }
    return alternatives


def _helpful(alternatives: Mapping[str, Scenario], own_s: float, steps: int) -> Iterator[Change]:
    for setting, alternative in alternatives.items():
        step_s = simulate(alternative, steps).step_s
        if 1 - step_s / own_s > NOTICEABLE:
            yield Change(setting, step_s=step_s, gain=1 - step_s / own_s)


def less(share: float) -> str:
    """Format a saving, such as `31% less`. A negative saving is `31% more`."""
    return f"{abs(share):.0%} {'less' if share >= 0 else 'more'}"
