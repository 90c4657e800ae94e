"""Which micro-batches the policy scores before the first update of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl_cli.spec.algorithm import AlgorithmSpec
from asyncrl_cli.train.algorithms.objective import Objective
from asyncrl_cli.train.nonfinite_guard import SkipLimit
from asyncrl_cli.train.precompute import Learner, Minibatch, precompute
from asyncrl_cli.train.step_rewards import StepRewards


class Policy:
    """Records which rows it scores."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.scored: list[int] = []

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.scored.append(int(ids[0, 0]))
        return torch.zeros(ids.shape)


def test_a_distilled_tokens_advantage_is_the_teachers_log_prob_less_its_own() -> None:
    """Rewards do not matter. Whitening, which the preset has, only shifts and scales these numbers."""
    torch.manual_seed(0)
    own, theirs = -3 * torch.rand(1, 3), -3 * torch.rand(1, 3)
    for whitens in (False, True):
        objective = Objective.of(AlgorithmSpec(preset="distill", whiten_advantages=whitens), Path())
        spec: Any = SimpleNamespace(trainer=SimpleNamespace(epochs=1, sequence_parallel=1))
        policy = type("Fixed", (), {"device": torch.device("cpu"), "__call__": lambda *_: own})()
        learner = Learner(spec, 0, objective, policy, SkipLimit(0), lambda ids, mask: theirs)
        one = minibatch(0)
        precompute(learner, [one], rewards(torch.zeros(1, 1)), keep_old_logprobs=False)
        expected = (theirs - own).double()
        if whitens:
            expected = (expected - expected.mean()) / expected.std()
        torch.testing.assert_close(one.precomputed[0].advantages, expected.float())


def rewards(rollouts: Tensor) -> StepRewards:
    """The rewards of rollouts without metrics, of one turn each."""
    exact = rollouts.double()
    return StepRewards(
        rollouts=exact,
        turns=exact[..., None],
        reward_parts=exact[None],
        metrics={},
        lengths=torch.ones_like(exact).long(),
        uniform=torch.zeros(len(exact), dtype=torch.bool),
        baseline=torch.zeros_like(exact),
    )


def minibatch(number: int, empty: bool = False) -> Minibatch:
    padded: Any = SimpleNamespace(
        input_ids=torch.full((1, 3), number),
        response_mask=torch.ones(1, 3).bool(),
        policy_arguments={},
        behaviour_logprobs=torch.zeros(1, 3),
        rollouts=torch.tensor([number]),
        turns=torch.zeros(1, 3).long(),
    )
    row: Any = object()
    return Minibatch([] if empty else [row], [], [padded])


@pytest.mark.parametrize(
    ("epochs", "in_reward", "empty", "scored"),
    [
        (1, False, (), [1, 2, 3]),  # the first update uses the log-probs from its forward pass
        (1, False, (0,), [2, 3]),  # the first update is on the first minibatch that is not empty
        (2, False, (), [0, 1, 2, 3]),  # the second pass needs the initial log-probs of the first minibatch, too
        (1, True, (), [0, 1, 2, 3]),  # a penalty in the reward needs them, too
    ],
)
def test_the_first_minibatch_is_scored_only_if_its_logprobs_are_used(
    epochs: int, in_reward: bool, empty: tuple[int, ...], scored: list[int]
) -> None:
    policy = Policy()
    penalty = {"kl_coef": 0.1, "kl_placement": "reward"} if in_reward else {}
    objective = Objective.of(AlgorithmSpec.model_validate(penalty), Path())
    minibatches = [minibatch(number, number in empty) for number in range(4)]
    reference = (lambda ids, mask: torch.zeros(ids.shape)) if in_reward else None
    spec: Any = SimpleNamespace(trainer=SimpleNamespace(epochs=epochs, sequence_parallel=1))
    learner = Learner(spec, 0, objective, policy, SkipLimit(0), reference)
    precompute(learner, minibatches, rewards(torch.rand(2, 2)), keep_old_logprobs=True)
    assert policy.scored == scored
    for number, one in enumerate(minibatches):
        assert [before.old_logprobs is not None for before in one.precomputed] == [number in scored][: len(one.rows)]
