"""The simulator: properties that hold for all costs, and a few runs calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from asyncrl_cli.journal.staleness import mean_age
from asyncrl_cli.plan.costs import Costs, EngineCost, Overheads, PublishCost, TrainerCost, iterations_in, seconds_of
from asyncrl_cli.plan.lengths import GroupLengths, RolloutLength, truncated
from asyncrl_cli.plan.prediction import with_bound
from asyncrl_cli.plan.simulator import Scenario, Simulation, simulate
from tests.plan.scenarios import COSTS, lengths, scenario, settings

pytestmark = pytest.mark.slow

NOISE = 1.05
"""A change may put other groups into a batch, which changes the time of a step by this fraction."""

scenarios = st.builds(
    lambda batch, bound, every, engines, slots, mean, sigma, trainer_s, publish_s: scenario(
        settings(batch, bound, every),
        lengths(mean, sigma),
        replace(COSTS, trainer=TrainerCost(trainer_s, 1e-5), publish=PublishCost(publish_s, publish_s, publish_s / 2)),
        engines,
        slots,
    ),
    st.integers(2, 12),
    st.integers(0, 5),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(8, 96),
    st.floats(10, 120),
    st.floats(0.0, 1.2),
    st.floats(0.01, 2.0),
    st.floats(0.0, 0.3),
)


def exact(seconds: list[float], batch: int, bound: int, places: int, **changes: object) -> Scenario:
    """Groups of one rollout with these durations, whatever else runs; 4 s of training, no other costs."""
    costs = Costs(EngineCost(1.0, 0.0), TrainerCost(4.0, 0.0))
    groups = [GroupLengths((RolloutLength(0, 0, each),)) for each in seconds]
    return replace(
        Scenario(settings(batch, bound, group_size=1), groups, costs, 1, places),
        **changes,  # type: ignore[arg-type]
    )


# -- by hand


def test_without_staleness_both_sides_take_turns() -> None:
    # Two groups a step: each step waits for its slower group, then trains for 4 s.
    outcome = simulate(exact([2, 6, 3, 1], 2, 0, 8), 2, warm_up=0)
    assert outcome.step_s == (6 + 4 + 3 + 4) / 2
    assert outcome.trainer == {"groups": 9, "training": 8}
    assert outcome.staleness == {0: 4}


def test_with_staleness_the_second_batch_is_ready_when_the_first_is_trained() -> None:
    outcome = simulate(exact([2, 6, 3, 1], 2, 1, 8), 2, warm_up=0)
    assert outcome.trainer == {"groups": 2, "training": 8}
    assert outcome.staleness == {0: 2, 1: 2}


def test_places_bound_what_runs() -> None:
    assert simulate(exact([2, 6, 3, 1], 2, 1, 1), 2, warm_up=0).trainer["groups"] == 8
    assert simulate(exact([2, 6, 3, 1], 2, 1, 2), 2, warm_up=0).trainer["groups"] == 5


def test_sequences_of_an_engine_advance_together() -> None:
    # Two sequences: an iteration takes 1 + 2 s. The first has 2 tokens, the other 5: 2·3 s, and then 3·2 s alone.
    costs = Costs(EngineCost(1.0, 1.0), TrainerCost(4.0, 0.0))
    groups = [GroupLengths((RolloutLength(0, 2), RolloutLength(0, 5)))]
    outcome = simulate(Scenario(settings(1, 0, group_size=2), groups, costs, 1, 2), 1, warm_up=0)
    assert outcome.trainer["groups"] == pytest.approx(12)
    assert outcome.generated_tokens * outcome.step_s == pytest.approx(7)


def test_contexts_make_iterations_longer() -> None:
    # One sequence with a prompt of 10: iterations of 1 + 10·0.1 s, and each 0.1 s longer; the model is fluid.
    costs = Costs(EngineCost(1.0, 0.0, per_context_token_s=0.1), TrainerCost(4.0, 0.0))
    groups = [GroupLengths((RolloutLength(10, 4),))]
    outcome = simulate(Scenario(settings(1, 0, group_size=1), groups, costs, 1, 2), 1, warm_up=0)
    assert outcome.trainer["groups"] == pytest.approx(4 * 2 + 0.1 * 16 / 2)


def test_engines_load_during_the_next_step() -> None:
    publish = PublishCost(held_s=1.0, deliver_s=3.0)
    for bound, waits in ((0, 3.0), (1, 0.0)):
        these = exact([0.0], 2, bound, 8)
        these = replace(these, costs=replace(these.costs, publish=publish))
        outcome = simulate(these, 10)
        assert outcome.trainer.get("publish", 0.0) == pytest.approx(10 * waits)
        assert outcome.trainer["publishing"] == pytest.approx(10)


def test_one_publish_at_a_time() -> None:
    these = exact([0.0], 2, 8, 8)
    these = replace(these, costs=replace(these.costs, publish=PublishCost(1.0, 10.0)))
    assert simulate(these, 10).step_s == pytest.approx(11)


def test_rejected_groups_cost_time() -> None:
    groups = [GroupLengths((RolloutLength(0, 0, seconds),), seconds == 3) for seconds in (2.0, 3.0, 4.0)]
    outcome = simulate(replace(exact([1.0], 2, 0, 2), groups=groups), 1, warm_up=0)
    assert outcome.trainer["groups"] == 3 + 4  # the third one starts when the second is rejected


def test_both_sides_slow_each_other_down_on_one_host() -> None:
    alone = scenario()
    engine = replace(alone.costs.engine, beside_trainer=0.5)
    trainer = replace(alone.costs.trainer, beside_engines=0.5)
    together = replace(alone, costs=replace(alone.costs, engine=engine, trainer=trainer))
    quiet, busy = simulate(alone), simulate(together)
    assert 1.1 < busy.step_s / quiet.step_s < 1.6
    # Without staleness the engines are idle while the trainer trains.
    assert simulate(with_bound(together, 0)).trainer["training"] == pytest.approx(
        simulate(with_bound(alone, 0)).trainer["training"]
    )


def test_contention_on_one_host_slows_other_work() -> None:
    def deliver(bound: int) -> float:
        # The trainer waits only for publishes, which take 10 s if nothing else runs.
        these = exact([0.0], 2, bound, 8)
        engine = replace(these.costs.engine, beside_trainer=1.0)
        costs = replace(these.costs, engine=engine, publish=PublishCost(deliver_s=10.0))
        return simulate(replace(these, costs=costs), 10).step_s

    assert deliver(0) == pytest.approx(4 + 10)
    # During 4 s of training, 2 s of this work are done, up to the size of the time slices.
    assert deliver(8) == pytest.approx(4 + 8, abs=2.5 / 4 * 2)


def test_engines_without_places_for_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="no places"):
        simulate(scenario(settings(group_size=4), slots=3))


# -- whatever the costs


@given(scenarios)
@examples(max_examples=60, deadline=None)
def test_the_bound_holds_and_time_adds_up(of: Scenario) -> None:
    outcome = simulate(of, 12)
    assert max(outcome.staleness) <= of.settings.max_staleness
    assert outcome.staleness.total() == 12 * of.settings.groups_per_step
    assert sum(outcome.trainer.values()) == pytest.approx(12 * outcome.step_s)
    assert 0 <= outcome.engines_idle <= 1 + 1e-9


@given(scenarios)
@examples(max_examples=30, deadline=None)
def test_tokens_are_trained_or_outstanding(of: Scenario) -> None:
    simulation = Simulation(of, 10, warm_up=0)
    outcome = simulation.run()
    generated = outcome.generated_tokens * 10 * outcome.step_s
    counts = simulation.ledger.counts()
    outstanding = counts.running + counts.finished
    trained = outcome.trained_tokens * 10 * outcome.step_s
    most = max(sum(rollout.response for rollout in group.rollouts) for group in of.groups)
    assert trained <= generated * (1 + 1e-6) + 1
    assert generated <= trained + outstanding * most + 1


@given(scenarios)
@examples(max_examples=30, deadline=None)
def test_without_staleness_draining_changes_nothing(of: Scenario) -> None:
    of = with_bound(of, 0)
    drained, kept = (simulate(replace(of, weight_update=how), 8) for how in ("drain", "keep"))
    assert drained.step_s == pytest.approx(kept.step_s)
    assert drained.trainer == pytest.approx(kept.trainer)


@given(scenarios, st.sampled_from(["engines", "bound", "places"]))
@examples(max_examples=60, deadline=None)
def test_more_never_slows_a_run(of: Scenario, what: str) -> None:
    # Waiting sequences fill additional places. More sequences slow each other down, but not all of them together.
    of = replace(of, costs=replace(of.costs, engine=EngineCost(0.005, 0.0)))
    more = {
        "engines": replace(of, engines=2 * of.engines),
        "bound": with_bound(of, of.settings.max_staleness + 2),
        "places": replace(of, slots=2 * of.slots),
    }[what]
    assert simulate(more, 40).step_s <= NOISE * simulate(of, 40).step_s


def test_mean_staleness_follows_littles_law() -> None:
    # Groups that are admitted and not taken, divided by those that a step takes: no group is rejected here.
    for bound in (1, 3, 6):
        simulation = Simulation(scenario(settings(8, bound), lengths(120, 0.9, 600), slots=256), 60)
        outcome = simulation.run()
        counts = simulation.ledger.counts()
        assert mean_age(outcome.staleness) == pytest.approx((counts.running + counts.finished) / 8 - 0.5, abs=0.6)


@given(st.floats(1e-4, 1.0), st.floats(0.0, 1e-2), st.floats(0.0, 1e4))
def test_iterations_are_the_inverse_of_seconds(base_s: float, growth_s: float, iterations: float) -> None:
    seconds = seconds_of(base_s, growth_s, iterations)
    assert iterations_in(base_s, growth_s, seconds) == pytest.approx(iterations, rel=1e-6, abs=1e-9)


# -- lengths


def test_truncated_lengths_keep_the_limit() -> None:
    groups = truncated(lengths(cut=300), 100)
    assert max(rollout.response for group in groups for rollout in group.rollouts) == 100


def test_overheads_are_waited_for() -> None:
    these = exact([2.0], 1, 0, 1)
    these = replace(these, costs=replace(these.costs, overheads=Overheads(0.5, 0.25, 1.0)))
    # The time between two steps overlaps with the group of the next step.
    assert simulate(these, 5).step_s == pytest.approx(0.5 + 2 + 0.25 + 4)


def test_a_place_is_free_when_the_rollout_is_delivered() -> None:
    usual = scenario(settings(8, 0))
    late = replace(usual, costs=replace(usual.costs, overheads=replace(usual.costs.overheads, deliver_s=0.5)))
    assert simulate(late, 10).step_s == pytest.approx(simulate(usual, 10).step_s + 0.5)
    # 64 places for 4 rollouts a group: a place that is in use is missing for the others.
    full = scenario(settings(32, 2))
    late = replace(full, costs=replace(full.costs, overheads=replace(full.costs.overheads, deliver_s=0.5)))
    assert simulate(late).running < 0.9 * simulate(full).running
