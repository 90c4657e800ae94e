"""Training on episodes: given tokens are context, and every sequence has its rollout's advantage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl_cli.records.generation import CONTEXT, Rollout, branch_id
from asyncrl_cli.records.rewards import Turn
from asyncrl_cli.records.training import TrainingBatch, TrainingGroup
from asyncrl_cli.spec.inputs import ModelInit
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.algorithms.objective import Objective
from asyncrl_cli.train.model.initial import build_initial_model
from asyncrl_cli.train.model.policy import Policy
from asyncrl_cli.train.model.router_replay import replayed_routers
from asyncrl_cli.train.nonfinite_guard import SkipLimit
from asyncrl_cli.train.packing import TrainingRow, count_tokens, pad_rows, training_rows
from asyncrl_cli.train.precompute import Learner
from asyncrl_cli.train.step import train_batch
from asyncrl_cli.train.step_rewards import StepRewards

pytestmark = pytest.mark.slow

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


def experiment(**sections: Any) -> ExperimentSpec:
    smallest: dict[str, Any] = {"model": {"path": "org/model"}, "task": {"use": "chain_sum"}, "stop": {"steps": 10}}
    return ExperimentSpec.model_validate({**smallest, "trainer": {"tokens_per_microbatch": 24}, **sections})


def sequence(name: str, versions: tuple[int, ...], prompt: tuple[int, ...] = ()) -> Rollout:
    random = np.random.default_rng(sum(map(ord, name)))
    sampled = np.array(versions) != CONTEXT
    return Rollout(
        rollout_id=name,
        prompt_ids=prompt,
        ids=random.integers(3, 90, len(versions)).astype(np.int32),
        logprobs=np.where(sampled, random.uniform(-6, -3, len(versions)), 0.0).astype(np.float32),
        versions=np.array(versions, np.int32),
        text="",
        finish_reason="stop",
    )


def episode(name: str, *sequences: tuple[int, ...]) -> Rollout:
    root, *branches = (sequence(branch_id(name, at), versions) for at, versions in enumerate(sequences))
    return replace(root, branches=tuple(branches))


G = CONTEXT
ROLLOUTS = (
    episode("0-0", (G, G, 3, 3, G, G, 4, 4, G), (G, 4, 4), (G, G)),
    sequence("0-1", (3, 4), prompt=(5, 6)),
    episode("0-2", (G, G, G, 4)),
    episode("0-3", (G, G)),
)
BATCH = TrainingBatch(4, 4, (TrainingGroup(0, "a", 3, ROLLOUTS, (1.0, 0.0, 0.0, 0.5)),))


def rows_of(batch: TrainingBatch, spec: ExperimentSpec) -> list[TrainingRow]:
    return [row for rows in training_rows(batch, StepRewards.of(batch, spec).uniform, spec) for row in rows]


def test_rows_are_sequences_up_to_the_last_sampled_token() -> None:
    rows = rows_of(BATCH, experiment())
    root, single, short = ROLLOUTS[:3]
    trained = [root, root.branches[0], single, short]
    for row, of, last in zip(rows, trained, (8, 3, 2, 4), strict=True):
        assert row.tokens.ids.tolist() == [*of.prompt_ids, *of.ids[:last]]
        response = row.tokens.slice(len(of.prompt_ids), None)
        np.testing.assert_array_equal(response.logprobs, of.logprobs[:last])
        np.testing.assert_array_equal(response.sampled, of.sampled[:last])
    assert [count_tokens([row]) for row in rows] == [4, 2, 2, 1]
    assert [row.rollout for row in rows] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("keep", [[0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]),
        ("recompute", [[0, 0, 0, 0, 0, 0, 1, 1], [0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1]]),
    ],
)
def test_only_sampled_tokens_are_on_policy(update: str, expected: list[list[int]]) -> None:
    spec = experiment(pipeline={"weight_update": update})
    assert [pad_rows([row]).on_policy[0].int().tolist() for row in rows_of(BATCH, spec)] == expected
    # Context tokens between tokens of the version do not make a sequence stale.
    current = TrainingGroup(0, "a", 4, (episode("0-0", (G, 4, G, 4)), ROLLOUTS[1]), (1.0, 0.0))
    (row, *_) = rows_of(replace(BATCH, groups=(current,)), spec)
    assert pad_rows([row]).on_policy.tolist() == [[False, True, False, True]]


class OneRank:
    """The methods of DeepSpeed's engine that a step calls; the gradient remains in the weights."""

    def __init__(self, policy: Policy) -> None:
        self.policy = self.module = policy
        self.device = torch.device("cpu")
        self.optimizer = SimpleNamespace(param_groups=[{}])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.policy(*arguments, **named)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def set_gradient_accumulation_boundary(self, _: bool) -> None: ...

    def step(self) -> None: ...

    def get_global_grad_norm(self) -> float:
        return 1.0

    def was_step_applied(self) -> bool:
        return True

    def zero_optimization_stage(self) -> int:
        return 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model")
    init = ModelInit(architecture="qwen3", config=CONFIG, tokenizer="characters")
    build_initial_model(init, 64, 0, Path(folder))
    return Policy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), temperature=1.0)


def gradient(policy: Policy, spec: ExperimentSpec, batch: TrainingBatch) -> tuple[torch.Tensor, int, float]:
    """The step's gradient as one vector, the number of trained tokens, and the loss."""
    policy.zero_grad()
    report = train_batch(Learner(spec, 0, Objective.of(spec.algorithm, Path()), OneRank(policy), SkipLimit(0)), batch)
    found = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return found.clone(), report.trained_tokens, report.metrics["train/loss"]


TURNS = (
    (Turn(0.5, 0, 4), Turn(-1.0, 0, 8), Turn(1.5, 1, 3)),
    (Turn(0.0, 0, 2),),
    (Turn(0.0, 0, 4),),
    (),
)
"""The turns of ``ROLLOUTS``: the rewards from each of the first one's on are 1, 0.5 and 1.5."""
ADVANTAGES: dict[str, list[list[float]]] = {
    "turn_mean": [[0.625, 0.625, 0.0, 0.0], [0.0, 0.0], [-0.375, -0.375], [-0.375]],
    "none": [[1.0, 1.0, 0.5, 0.5], [1.5, 1.5], [0.0, 0.0], [0.0]],
}
"""Advantages by estimator, for each sequence's sampled tokens. Only the first rollout has a second turn."""


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("estimator", ["group_norm", "turn_mean", "none"])
def test_the_gradient_is_that_of_the_sampled_tokens(policy: Policy, aggregation: str, estimator: str) -> None:
    algorithm = {"aggregation": aggregation, "advantage": estimator, "uniform_groups": "train"}
    spec = experiment(algorithm=algorithm, pipeline={"weight_update": "recompute"})
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5])
    of_groups = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    each = [(one, a) for rollout, a in zip(ROLLOUTS, of_groups, strict=True) for one in rollout.sequences]
    sequences = [(one, advantage.expand(int(one.sampled.sum()))) for one, advantage in each if one.sampled.any()]
    batch = BATCH
    if estimator in ADVANTAGES:
        known = map(torch.tensor, ADVANTAGES[estimator])
        sequences = [(one, advantages) for (one, _), advantages in zip(sequences, known, strict=True)]
        batch = replace(BATCH, groups=(replace(BATCH.groups[0], turns=TURNS),))
    policy.zero_grad()
    tokens = sum(int(one.sampled.sum()) for one, _ in sequences)
    by_hand = torch.zeros(())
    for one, advantage in sequences:
        ids = torch.tensor([*one.prompt_ids, *one.ids.tolist()])
        logprobs = policy.model(ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs = logprobs.gather(-1, ids[1:, None])[-len(one.ids) + (not one.prompt_ids) :, 0]
        sampled = torch.tensor(one.sampled)[not one.prompt_ids :]
        behaviour = torch.tensor(one.logprobs)[not one.prompt_ids :]
        # Also for on-policy tokens, because the recorded log-probs here are random: the difference is not rounding.
        weights = (logprobs.detach() - behaviour).exp().clamp(max=2.0)
        terms = -advantage * (weights * (logprobs - logprobs.detach()).exp())[sampled]
        by_hand = by_hand + (terms.sum() / tokens if aggregation == "token_mean" else terms.mean() / len(sequences))
    by_hand.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).clone()
    found, trained, loss = gradient(policy, spec, batch)
    assert trained == tokens == 9
    assert loss == pytest.approx(by_hand.item(), abs=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert expected.abs().max() > 1e-3


def test_a_step_uses_the_recorded_experts_in_all_its_passes(tmp_path: Path) -> None:
    """In an episode, in old log-probs, the reference's and the loss: nothing depends on the routers' own choice."""
    from transformers import AutoModelForCausalLM

    sizes = {"num_local_experts": 6, "num_experts_per_tok": 2}
    build_initial_model(
        ModelInit(architecture="mixtral", config=CONFIG | sizes, tokenizer="characters"), 64, 0, tmp_path
    )
    random = np.random.default_rng(0)

    def chosen(tokens: int) -> Any:
        """Two layers, with two different experts each."""
        each = [random.choice(6, 2, replace=False) for _ in range(2 * tokens)]
        return np.array(each, np.uint8).reshape(tokens, 4)

    def routed(of: Rollout) -> Rollout:
        mine, given = chosen(len(of.ids)), chosen(len(of.prompt_ids))
        return replace(of, experts=mine, prompt_experts=given, branches=tuple(map(routed, of.branches)))

    batch = replace(BATCH, groups=(replace(BATCH.groups[0], rollouts=tuple(map(routed, ROLLOUTS))),))
    spec = experiment(algorithm={"kl_coef": 0.1, "router_replay": True}, trainer={"tokens_per_microbatch": 8})

    def made() -> Policy:
        return Policy(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), 1.0, router_replay=True)

    def step(of: TrainingBatch, favoured: int) -> torch.Tensor:
        """The gradient if the routers themselves would choose the ``favoured`` expert."""
        policy, reference = made(), made()
        for router in (*replayed_routers(policy.model).values(), *replayed_routers(reference.model).values()):
            router.register_forward_hook(
                lambda _, __, output: (*output[:2], torch.full_like(output[2], favoured)), prepend=True
            )
        learner = Learner(
            spec, 0, Objective.of(spec.algorithm, Path()), OneRank(policy), SkipLimit(0), reference=reference
        )
        train_batch(learner, of)
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    assert step(batch, 0).equal(step(batch, 1))
    assert not step(BATCH, 0).equal(step(BATCH, 1))
