"""The rewards of a step: of rollouts, turns and parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.records.generation import CONTEXT, Rollout, branch_id
from asyncrl_cli.records.rewards import Scored, Turn
from asyncrl_cli.records.training import TrainingBatch, TrainingGroup
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.packing import pad_rows, training_rows
from asyncrl_cli.train.step_rewards import StepRewards
from tests.train.test_step import experiment_of

Drawn = list[tuple[int, int, float]]
"""The turns of a rollout: branch, sampled tokens and reward of each."""


def sequence(name: str, versions: list[int], branches: tuple[Rollout, ...] = ()) -> Rollout:
    return Rollout(
        np.arange(len(versions), dtype=np.int32),
        logprobs=np.zeros(len(versions), np.float32),
        versions=np.array(versions, np.int32),
        rollout_id=name,
        prompt_ids=(),
        text="",
        finish_reason="stop",
        branches=branches,
    )


def played(name: str, turns: Drawn) -> tuple[Rollout, tuple[Turn, ...]]:
    """A rollout with these turns; branches are numbered in the order of their first turns."""
    sequences: dict[int, list[int]] = {}
    recorded = []
    for branch, tokens, reward in turns:
        versions = sequences.setdefault(branch, [])
        versions += [CONTEXT] + [3] * tokens
        recorded.append(Turn(reward, [*sequences].index(branch), len(versions)))
    root, *others = sequences.values()
    branches = (sequence(branch_id(name, number), versions) for number, versions in enumerate(others, start=1))
    return sequence(name, root, tuple(branches)), tuple(recorded)


def group_of(*rollouts: Drawn, rewards: list[float | None] | None = None, **more: Any) -> TrainingGroup:
    made = [played(f"0-{index}", turns) for index, turns in enumerate(rollouts)]
    own = rewards or [sum(turn.reward for turn in turns) for _, turns in made]
    turns = tuple(() if rewards else turns for _, turns in made)
    return TrainingGroup(0, "uid", 3, tuple(rollout for rollout, _ in made), tuple(own), turns=turns, **more)


def spec_of(**algorithm: Any) -> ExperimentSpec:
    return experiment_of(algorithm=algorithm, rollout={"group_size": 2, "max_response_tokens": 10})


def rewards_of(group: TrainingGroup, step: int = 0, **algorithm: Any) -> StepRewards:
    return StepRewards.of(TrainingBatch(step, 3, (group,)), spec_of(**algorithm))


PLAYED = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.floats(-5, 5)), min_size=1, max_size=6)


@given(one=PLAYED, other=PLAYED, overlong=st.sampled_from([0.0, 1.0]))
def test_turns_sum_to_the_rollouts_reward_and_each_sampled_token_has_its_turn(
    one: Drawn, other: Drawn, overlong: float
) -> None:
    group = group_of(one, other)
    found = rewards_of(group, overlong_penalty=overlong, overlong_buffer=1.0)
    torch.testing.assert_close(found.turns.nansum(dim=2), found.rollouts, rtol=1e-12, atol=1e-12)
    for index, turns in enumerate((one, other)):
        known, recorded = found.turns[0, index], [reward for *_, reward in turns]
        assert (~known.isnan()).sum() == len(turns)
        assert known[: len(turns) - 1].tolist() == recorded[:-1], "what is subtracted is subtracted from the last turn"
        if not overlong:
            assert known[len(turns) - 1].item() == pytest.approx(recorded[-1], abs=1e-12)
    rows = training_rows(TrainingBatch(0, 3, (group,)), found.uniform, spec_of(uniform_groups="train"))[0]
    counted = [[0] * len(one), [0] * len(other)]
    for row in rows:
        padded = pad_rows([row])
        for turn in padded.turns[padded.response_mask].tolist():
            counted[row.rollout][turn] += 1
    assert counted == [[tokens for _, tokens, _ in turns] for turns in (one, other)]


def test_a_rollout_without_turns_has_one_and_a_masked_one_none() -> None:
    group = group_of([(0, 2, 1.0)], [(0, 3, 1.0)], [(0, 3, 1.0)], rewards=[None, 0.75, 0.5])
    found = rewards_of(group)
    assert found.turns.nan_to_num(-1).tolist() == [[[-1], [0.75], [0.5]]]
    assert found.rollouts.isnan().tolist() == [[True, False, False]]
    assert found.lengths.tolist() == [[2, 3, 3]]


def test_earlier_rewards_have_the_weights_of_the_parts() -> None:
    weights, length = {"reward": 1.0, "format": 0.5}, [(0, 10, 1.0)]
    earlier = (Scored(1.0, {"format": 1.0}), Scored(0.5))
    new, old = (group_of(length, rewards=[0.0], metrics=({"format": 2.0},), earlier=visits) for visits in ((), earlier))
    spec = spec_of(reward_parts=weights, overlong_penalty=0.25, reward_coef=2.0, baseline_half_life=1.0)
    found = StepRewards.of(TrainingBatch(5, 3, (new, old)), spec)
    assert found.rollouts.tolist() == [[1.75], [1.75]]
    assert found.baseline.tolist() == [[1.75], [(1.75 + 3.0 + 1.0 / 2) / 2.5]]


METRICS = ({"format": 1.0, "steps": 3.0}, {"format": 0.5}, {"format": 1.0, "steps": 1.0})


def parts_of(weights: dict[str, float], step: int = 0) -> StepRewards:
    group = group_of([(0, 1, 1.0)], [(0, 2, 0.0)], [(0, 1, 0.5)], rewards=[1.0, 0.0, None], metrics=METRICS)
    return rewards_of(group, step, reward_parts=weights)


def test_the_weighted_sum_of_the_parts_is_the_reward() -> None:
    found = parts_of({"reward": 2.0, "format": -0.5, "steps": 1.0})
    assert found.rollouts[0, :2].tolist() == [2.0 - 0.5 + 3.0, -0.25]
    assert found.rollouts[0, 2].isnan() and found.reward_parts[:, 0, 2].isnan().all(), "a masked rollout has no part"
    assert found.missing_parts == 1, "a rollout with a reward has no steps"
    assert found.turns.nansum(dim=2)[0, :2].tolist() == found.rollouts[0, :2].tolist()
    assert found.metrics.keys() == {"format", "steps"}


def test_the_weight_of_the_own_reward_is_that_of_the_turns() -> None:
    group = group_of([(0, 1, 1.0), (0, 1, 2.0)], [(0, 2, 0.5)], metrics=({"format": 1.0}, {"format": 0.0}))
    found = rewards_of(group, reward_parts={"reward": 2.0, "format": 0.5})
    assert found.turns.nan_to_num(-1).tolist() == [[[2.0, 4.5], [1.0, -1.0]]]


def test_a_metric_that_no_rollout_of_the_first_batch_has_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError) as caught:
        parts_of({"reward": 1.0, "fromat": 0.3})
    assert caught.value.location == "algorithm.reward_parts.fromat"
    assert "the task reports reward, format, steps" in str(caught.value)
    assert parts_of({"reward": 1.0, "fromat": 0.3}, step=1).missing_parts == 2, "later it is counted"


def test_a_group_is_uniform_when_the_rewards_it_learns_from_are_equal() -> None:
    def uniform(one: dict[str, float], other: dict[str, float], aggregation: str) -> bool:
        group = group_of([(0, 1, 1.0)], [(0, 1, 1.0)], metrics=(one, other))
        weights = {"reward": 1.0, "a": 1.0, "b": 1.0}
        return bool(rewards_of(group, reward_parts=weights, reward_aggregation=aggregation).uniform)

    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        assert uniform({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}, aggregation)
        assert not uniform({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.5}, aggregation)
    crossed = {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}
    assert uniform(*crossed, "sum_then_normalize") and not uniform(*crossed, "normalize_then_sum")
    assert uniform({"a": 1.0, "b": 1.0}, {"a": 1.0}, "normalize_then_sum"), "one value has nothing to differ from"
