"""A full step of every algorithm on a small real model, with autograd instead of DeepSpeed: the result does not depend
on how the work is divided and ordered; settings have their effect."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_train_episodes import BATCH, CONFIG, OneRank, experiment, sequence

from asyncrl_cli.checks.model import check_algorithm
from asyncrl_cli.core.errors import UserError
from asyncrl_cli.records.generation import Rollout
from asyncrl_cli.records.training import TrainingBatch, TrainingGroup
from asyncrl_cli.spec.algorithm import CORRECTION_PRESETS, PRESETS
from asyncrl_cli.spec.inputs import ModelInit
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.algorithms.objective import Objective
from asyncrl_cli.train.model.initial import build_initial_model
from asyncrl_cli.train.model.policy import Policy, ValueModel
from asyncrl_cli.train.nonfinite_guard import SkipLimit
from asyncrl_cli.train.packing import longest_response, training_rows
from asyncrl_cli.train.precompute import Learner
from asyncrl_cli.train.schedule import factor
from asyncrl_cli.train.step import train_batch
from asyncrl_cli.train.step_rewards import StepRewards

pytestmark = pytest.mark.slow


def model(folder: Path, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    build_initial_model(ModelInit(architecture="qwen3", config=CONFIG, tokenizer="characters"), 64, seed, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Policy, ValueModel]:
    """Policy, reference, critic."""
    policy, reference, critic = (model(tmp_path_factory.mktemp("model"), seed) for seed in range(3))
    value_model = ValueModel(critic.base_model)
    torch.nn.init.normal_(value_model.head.weight, std=0.1)
    return Policy(policy, 1.0), Policy(reference, 1.0), value_model


class Optimized(OneRank):
    """A model with plain gradient descent as its optimizer; the sum of its gradients is recorded."""

    def __init__(self, policy: Any, rate: float = 0.0) -> None:
        super().__init__(policy)
        self.rate = rate
        self.start = {name: value.detach().clone() for name, value in policy.named_parameters()}

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    parameter.sub_(self.rate * parameter.grad)

    def restore(self) -> None:
        with torch.no_grad():
            for name, value in self.policy.named_parameters():
                value.copy_(self.start[name])


def step(
    models: tuple[Policy, Policy, ValueModel], spec: ExperimentSpec, batch: TrainingBatch, rate: float = 0.0
) -> tuple[torch.Tensor, dict[str, float]]:
    """The step's gradient of the policy (and of the critic, where there is one), and its metrics."""
    policy, reference, value_model = models
    engine, critic = Optimized(policy, rate), Optimized(value_model)
    policy.zero_grad()
    value_model.zero_grad()
    learner = Learner(
        spec,
        0,
        Objective.of(spec.algorithm, Path(__file__).parent),
        engine,
        SkipLimit(0),
        reference if spec.algorithm.kl_coef else None,
        critic if spec.algorithm.needs_critic else None,
    )
    report = train_batch(learner, batch)
    parameters = [*policy.parameters(), *value_model.parameters()]
    gradient = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
    engine.restore()
    return gradient.clone(), report.metrics


def batch_of(groups: int) -> TrainingBatch:
    """Groups of four rollouts with one turn, of versions 3 and 4, with different lengths and rewards."""
    random = np.random.default_rng(0)
    made = []
    for group_id in range(groups):
        rollouts = tuple(
            sequence(
                f"{group_id}-{index}", (3,) * int(random.integers(0, 4)) + (4,) * int(random.integers(1, 6)), (5, 6, 7)
            )
            for index in range(4)
        )
        rewards = (1.0, 0.0, *map(float, random.integers(0, 3, 2)))
        made.append(TrainingGroup(group_id, f"uid-{group_id}", 3, rollouts, rewards))
    return TrainingBatch(4, 4, tuple(made))


def experiment_of(**sections: Any) -> ExperimentSpec:
    return experiment(**({"rollout": {"group_size": 4, "max_response_tokens": 10}} | sections))


VARIANTS = [
    *({"preset": name} for name in sorted(PRESETS)),
    {"kl_coef": 0.1, "kl_placement": "reward"},
    {"kl_coef": 0.1, "aggregation": "sequence_sum", "entropy_coef": 0.01},
    {"correction": {"preset": "geometric", "reject_high": 1.5, "reject_low": 0.7}},
    {"correction": {"preset": "sequence_truncated"}},
    {"advantage": "test_step:squares", "loss": "test_step:plain"},
]


def squares(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.square() - 1.0


def plain(logprobs: Any, proximal: Any, advantages: Any, mask: Any, settings: Any) -> Any:
    from asyncrl_cli.train.algorithms.policy_loss import TokenLosses

    nothing = torch.zeros_like(mask)
    return TokenLosses(-advantages * logprobs, nothing, nothing)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=str)
def test_how_the_work_is_split_changes_nothing(models: Any, algorithm: dict[str, Any]) -> None:
    small, large = (
        experiment_of(algorithm=algorithm, trainer={"tokens_per_microbatch": tokens}) for tokens in (16, 10_000)
    )
    batch = batch_of(6)
    gradient, metrics = step(models, small, batch)
    again, metrics_again = step(models, large, batch)
    size = gradient.abs().max()
    assert size > 1e-6
    torch.testing.assert_close(gradient, again, rtol=0, atol=1e-5 * float(size))
    assert metrics["train/loss"] == pytest.approx(metrics_again["train/loss"], rel=1e-5, abs=1e-7)
    backward = TrainingBatch(
        4,
        4,
        tuple(
            replace(group, rollouts=group.rollouts[::-1], rewards=group.rewards[::-1]) for group in batch.groups[::-1]
        ),
    )
    turned, _ = step(models, small, backward)
    torch.testing.assert_close(gradient, turned, rtol=0, atol=1e-5 * float(size))


def test_epochs_are_further_updates_on_the_same_rows(models: Any) -> None:
    once = experiment_of(trainer={"minibatches": 2})
    twice = experiment_of(trainer={"minibatches": 2, "epochs": 2})
    _, first = step(models, once, batch_of(4), rate=0.1)
    _, both = step(models, twice, batch_of(4), rate=0.1)
    assert (first["train/updates"], both["train/updates"]) == (2, 4)
    assert both["train/kl_proximal"] > first["train/kl_proximal"] > 0


def test_the_gradient_norm_of_a_step_is_the_largest_of_its_updates(models: Any, monkeypatch: Any) -> None:
    norms = iter([0.3, 0.5, 0.0])  # the last minibatch has only groups with equal rewards
    monkeypatch.setattr(OneRank, "get_global_grad_norm", lambda _: next(norms))
    _, metrics = step(models, experiment_of(trainer={"minibatches": 3}), batch_of(3))
    assert (metrics["train/updates"], metrics["train/gradient_norm"]) == (3, 0.5)


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 1), (2, 3)])
def test_learning_rate_follows_from_the_step_whatever_updates_earlier_steps_had(
    models: Any, minibatches: int, epochs: int
) -> None:
    trainer = {"minibatches": minibatches, "epochs": epochs, "schedule": {"kind": "linear"}}
    spec = experiment_of(trainer=trainer, stop={"steps": 10})
    _, metrics = step(models, spec, batch_of(4))
    per_step = minibatches * epochs
    last_factor = factor(
        5 * per_step - 1, 10 * per_step, spec.trainer.schedule
    )  # the batch's step is 4, after 4 others
    assert metrics["train/learning_rate"] == spec.trainer.optimizer.learning_rate * last_factor


def recorded_by(policy: Policy, noise: float) -> TrainingBatch:
    """Groups of version 4 only, with the policy's own log-probs of their tokens, plus noise."""
    random = np.random.default_rng(1)

    def recorded(rollout: Rollout) -> Rollout:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.ids.tolist()]])
        mask = torch.arange(ids.shape[1])[None] >= len(rollout.prompt_ids)
        with torch.no_grad():
            logprobs = policy(ids, mask)[0, len(rollout.prompt_ids) :].numpy()
        signs = random.choice(np.array([-1, 1], np.float32), len(logprobs))
        versions = np.full_like(rollout.versions, 4)
        return replace(rollout, versions=versions, logprobs=logprobs + np.float32(noise) * signs)

    groups = (replace(group, rollouts=tuple(map(recorded, group.rollouts)), version=4) for group in batch_of(4).groups)
    return TrainingBatch(4, 4, tuple(groups))


@pytest.mark.parametrize("preset", sorted(CORRECTION_PRESETS))
def test_without_staleness_an_engines_last_bits_reach_no_weight(models: Any, preset: str) -> None:
    spec = experiment_of(
        algorithm={"correction": {"preset": preset}},
        trainer={"minibatches": 2, "epochs": 2},
        pipeline={"mode": "sync", "groups_per_step": 4},
    )
    exact, metrics = step(models, spec, recorded_by(models[0], 0.0), rate=0.5)
    noisy, _ = step(models, spec, recorded_by(models[0], 1e-5), rate=0.5)
    assert torch.equal(exact, noisy)
    assert metrics["train/kl_proximal"] > 1e-3, "later updates use other weights"
    assert metrics["engine/logprob_gap_max"] < 1e-4, "the engine's gap is separate"


def test_an_engine_that_is_wrong_is_corrected_and_shown(models: Any) -> None:
    _, metrics = step(models, experiment_of(), recorded_by(models[0], 0.5))
    assert metrics["engine/logprob_gap_max"] == pytest.approx(0.5, abs=1e-3)
    assert metrics["correction/importance_max"] == pytest.approx(np.exp(0.5), rel=1e-3)


def test_no_gap_is_shown_where_none_was_measured(models: Any) -> None:
    batch = batch_of(4)
    older = replace(batch, version=6, step=6)
    _, metrics = step(models, experiment_of(), older)
    assert "correction/logprob_gap_max" in metrics
    assert not any(name.startswith("engine/") for name in metrics)


def test_a_kl_penalty_in_the_reward_is_summed_over_the_rollout(models: Any) -> None:
    """Rewards minus the summed penalties, computed by hand, give the same gradient."""
    policy, reference, _ = models
    batch = batch_of(1)
    spec = experiment_of(
        algorithm={"advantage": "group_mean", "kl_coef": 0.3, "kl_estimator": "k1", "kl_placement": "reward"}
    )
    group = batch.groups[0]
    sums = []
    for rollout in group.rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.ids.tolist()]])
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, len(rollout.prompt_ids) :] = True
        with torch.no_grad():
            sums.append(float((policy(ids, mask) - reference(ids, mask)).sum()))
    rewards = tuple(reward - 0.3 * kl for reward, kl in zip(group.rewards, sums, strict=True))
    by_hand = TrainingBatch(4, 4, (replace(group, rewards=rewards),))
    expected, _ = step(models, experiment_of(algorithm={"advantage": "group_mean"}), by_hand)
    found, _ = step(models, spec, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "grpo"},
        {"preset": "rloo", "kl_coef": 0.1},
        {"preset": "rloo", "kl_coef": 0.1, "mask_truncated": True},
        {"preset": "dapo", "overlong_buffer": 0.5},
        {"preset": "reinforce_pp"},
        {"preset": "ppo"},
        {"advantage": "test_step:squares", "uniform_groups": "train"},
    ],
    ids=str,
)
def test_a_masked_rollout_changes_a_step_as_if_its_group_did_not_have_it(
    models: Any, algorithm: dict[str, Any]
) -> None:
    groups = batch_of(4).groups
    at = [2, 0, 3, 1]
    masked = [
        replace(group, rewards=tuple(None if index == own else reward for index, reward in enumerate(group.rewards)))
        for group, own in zip(groups, at, strict=True)
    ]
    if "mask_truncated" in algorithm:
        masked = [
            replace(
                group,
                rollouts=tuple(
                    replace(rollout, finish_reason="length" if index == masked_index else "stop")
                    for index, rollout in enumerate(group.rollouts)
                ),
            )
            for group, masked_index in zip(groups, at, strict=True)
        ]
    left = [
        replace(
            group,
            rollouts=tuple(one for index, one in enumerate(group.rollouts) if index != own),
            rewards=tuple(one for index, one in enumerate(group.rewards) if index != own),
        )
        for group, own in zip(groups, at, strict=True)
    ]
    found, metrics = step(models, experiment_of(algorithm=algorithm), TrainingBatch(4, 4, tuple(masked)))
    spec = experiment_of(algorithm=algorithm, rollout={"group_size": 3, "max_response_tokens": 10})
    expected, those = step(models, spec, TrainingBatch(4, 4, tuple(left)))
    assert expected.abs().max() > 1e-6
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert metrics["train/loss"] == pytest.approx(those["train/loss"], rel=1e-5, abs=1e-7)


def test_while_the_critic_warms_up_the_policy_stays(models: Any) -> None:
    algorithm = {"preset": "ppo", "critic": {"warmup_steps": 5}}
    gradient, metrics = step(models, experiment_of(algorithm=algorithm), batch_of(2))
    _, _, value_model = models
    assert metrics["train/updates"] == 0
    assert "critic/explained_variance" in metrics and "train/loss" not in metrics
    assert gradient.numel() == sum(parameter.numel() for parameter in value_model.parameters())


def test_overlong_responses_lose_reward_and_truncated_ones_may_be_masked() -> None:
    batch = batch_of(2)
    spec = experiment_of(algorithm={"preset": "dapo", "overlong_buffer": 0.5})
    recorded = torch.tensor([group.rewards for group in batch.groups], dtype=torch.float64)
    lengths = torch.tensor([[len(rollout.ids) for rollout in group.rollouts] for group in batch.groups])
    expected = recorded - ((lengths - 5).clamp(min=0) / 5).double()
    torch.testing.assert_close(StepRewards.of(batch, spec).rollouts, expected, rtol=1e-6, atol=1e-6)
    assert longest_response(BATCH.groups[0].rollouts[0]) == 2

    group = batch.groups[0]
    truncated = replace(group, rollouts=(replace(group.rollouts[0], finish_reason="length"), *group.rollouts[1:]))
    spec = experiment_of(algorithm={"mask_truncated": True})
    one = replace(batch, groups=(truncated,))
    rows = training_rows(one, StepRewards.of(one, spec).uniform, spec)[0]
    assert [row.rollout for row in rows] == [1, 2, 3]


def of_tokens(rewards: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return rewards


def of_lengths(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.double()


def of_all(rewards: torch.Tensor, metrics: dict[str, torch.Tensor], scale: float = 2.0) -> torch.Tensor:
    return (rewards - rewards.mean(dim=1, keepdim=True)) * metrics["certain"] * scale


def test_a_users_advantage_function_gets_what_its_parameters_name(models: Any) -> None:
    batch = batch_of(2)
    measured = tuple(replace(group, metrics=({"certain": 0.5},) * len(group.rollouts)) for group in batch.groups)
    assert check_algorithm(experiment_of(algorithm={"advantage": "test_step:of_all"}), Path(__file__).parent, print)
    found, _ = step(models, experiment_of(algorithm={"advantage": "test_step:of_all"}), replace(batch, groups=measured))
    same, _ = step(models, experiment_of(algorithm={"advantage": "group_mean"}), batch)
    assert found.abs().max() > 1e-6
    torch.testing.assert_close(found, same, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"loss": "no_such_module:f"}, r"algorithm.loss: no module 'no_such_module'.*put no_such_module.py"),
        ({"advantage": "test_step:nothing"}, r"algorithm.advantage: module test_step .* has no 'nothing'"),
        ({"advantage": "test_step:VARIANTS"}, "is not a function .got list"),
        ({"advantage": "test_step:of_tokens"}, "of_tokens has the parameters rewards, tokens"),
        ({"advantage": "test_step:of_lengths"}, "of_lengths has the parameters lengths"),
    ],
)
def test_missing_functions_are_named_in_the_error(algorithm: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Objective.of(experiment(algorithm=algorithm).algorithm, Path(__file__).parent)
    assert re.search(words, str(caught.value))
