"""Compared with the methods of TRL's trainers, called on objects that have only the attributes that these read.

Where the two differ on purpose:
- TRL adds 1e-4 to a group's deviation, we add 1e-6: this is corrected before ``group_norm`` is compared, and GDPO's
  reward parts are compared with TRL's number in both;
- CISPO's clip limit is given as the ratio itself, and there is no lower limit;
- TRL's GSPO has one gradient for all tokens of a sequence, ours (GSPO-token) weighs each token by its importance
  weight: it is compared with the sequences' weights;
- TRL's bonus is the mean entropy of a micro-batch with any aggregation, ours is aggregated like the loss: they are
  compared with ``token_mean``, where they are the same;
- TRL's clipped losses also limit the ratio of positive advantages by ``delta``, without effect above the clip limit.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import Same
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from asyncrl_cli.spec.algorithm import AlgorithmSpec, CorrectionSpec
from asyncrl_cli.train.algorithms import advantages
from asyncrl_cli.train.algorithms.advantages import ADVANTAGES, DEVIATION_FLOOR
from asyncrl_cli.train.algorithms.corrections import correct
from asyncrl_cli.train.algorithms.kl import KL
from asyncrl_cli.train.algorithms.policy_loss import POLICY_LOSSES, Aggregation, LossInputs, policy_loss
from tests.train.matrices import matrices, tensors

ROWS, TOKENS, GROUP = 12, 16, 4
SPREADS = [0.01, 0.3, 1.0]
TRL_FLOOR = 1e-4

pytestmark = [pytest.mark.parametrize("seed", range(5)), pytest.mark.parametrize("spread", SPREADS)]


def bare(trainer: type, **attributes: Any) -> Any:
    made = object.__new__(trainer)
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    common = {"model": model, "accelerator": Accelerator(cpu=True), "_metrics": {"train": defaultdict(list)}}
    made.__dict__.update(common | attributes)
    return made


def case(seed: int, spread: float, *names: str) -> list[Tensor]:
    return tensors(matrices(seed, ROWS, TOKENS, spread), *names)


LOSS_CASES: list[tuple[str, str, Aggregation, AlgorithmSpec]] = [
    ("clip", "grpo", "sequence_mean", AlgorithmSpec(clip_low=0.2, clip_high=0.28)),
    ("clip", "bnpo", "token_mean", AlgorithmSpec(clip_low=0.2, clip_high=0.28)),
    ("clip", "dapo", "token_mean", AlgorithmSpec(clip_low=0.2, clip_high=0.28)),
    ("clip", "dapo", "token_mean", AlgorithmSpec(clip_low=0.2, clip_high=0.28, dual_clip=1.5)),
    ("clip", "dr_grpo", "sequence_sum", AlgorithmSpec(clip_low=0.2, clip_high=0.28)),
    ("gspo", "grpo", "sequence_mean", AlgorithmSpec(clip_low=3e-3, clip_high=4e-3)),
    ("cispo", "cispo", "token_mean", AlgorithmSpec(clip_low=1.0, clip_high=0.28)),
    ("sapo", "sapo", "sequence_mean", AlgorithmSpec(sapo_temperatures=(1.0, 1.05))),
]


@pytest.mark.parametrize(("name", "theirs", "aggregation", "numbers"), LOSS_CASES)
def test_policy_losses(
    same: Same, seed: int, spread: float, name: str, theirs: str, aggregation: Aggregation, numbers: AlgorithmSpec
) -> None:
    """With weights and a k3 penalty, and with an entropy bonus if both compute the same."""
    logprobs, proximal, advantages, behaviour, reference, entropies, mask = case(
        seed, spread, "logprobs", "proximal", "advantages", "behaviour", "reference", "entropies", "mask"
    )
    mask[:, 0] = True
    of_rows, tokens = advantages[:, 0], float(mask.sum())
    weights, _ = correct(
        proximal,
        behaviour,
        mask,
        CorrectionSpec(preset="decoupled", level="sequence" if name == "gspo" else "token", cap=2.0),
    )
    entropy_coef = 0.05 if aggregation == "token_mean" else 0.0
    denominator = {"token_mean": tokens, "sequence_mean": ROWS, "sequence_sum": ROWS * 7.0}[aggregation]

    policy = [logprobs.clone().requires_grad_(), entropies.clone().requires_grad_()]
    given = LossInputs(
        policy[0], proximal, of_rows[:, None].expand_as(mask), mask, weights, reference, entropies=policy[1]
    )
    changes = {"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": entropy_coef}
    settings = numbers.model_copy(update=changes)
    found, sums = policy_loss(given, settings, denominator, loss=POLICY_LOSSES[name])
    found.backward()

    high = 1 + numbers.clip_high if theirs == "cispo" else numbers.clip_high
    args = SimpleNamespace(
        use_bias_correction_kl=False, delta=numbers.dual_clip, steps_per_generation=1,
        sapo_temperature_pos=numbers.sapo_temperatures[0], sapo_temperature_neg=numbers.sapo_temperatures[1],
    )  # fmt: skip
    trainer = bare(
        GRPOTrainer, args=args, loss_type=theirs, importance_sampling_level="sequence" if name == "gspo" else "token",
        epsilon_low=numbers.clip_low, epsilon_high=high, beta=0.1, use_vllm=True,
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1, max_completion_length=7,
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        _entropy_bonus_enabled=entropy_coef > 0, use_adaptive_entropy=False, entropy_coef=entropy_coef,
    )  # fmt: skip
    their_policy = [logprobs.clone().requires_grad_(), entropies.clone().requires_grad_()]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (*their_policy, None)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask.int(),
        "advantages": of_rows, "old_per_token_logps": proximal, "ref_per_token_logps": reference,
        "importance_sampling_ratio": weights, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    expected = GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()

    dual = ", dual clip" if numbers.dual_clip else ""
    names = (f"loss `{name}`{dual}, `{aggregation}`", f"TRL `loss_type={theirs}`")
    assert policy[0].grad is not None
    assert their_policy[0].grad is not None
    same(*names, found.detach(), expected.detach(), size=their_policy[0].grad.abs().sum())
    same(*names, policy[0].grad, their_policy[0].grad, of="gradient")
    metrics = {key: torch.tensor(value[0]) for key, value in trainer._metrics["train"].items()}
    summary = {key: torch.tensor(value) for key, value in sums.summary().items()}
    same("mean entropy", "TRL `entropy`", summary["entropy"], metrics["entropy"])
    if name == "clip":
        low, upper = metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]
        same("share clipped low", "TRL `clip_ratio/low_mean`", summary["clip_low_fraction"], low)
        if not numbers.dual_clip:  # TRL does not count tokens that `delta` limits
            same("share clipped high", "TRL `clip_ratio/high_mean`", summary["clip_high_fraction"], upper)


def scored(
    trainer: type, rewards: Tensor, case_: list[Tensor], weights: tuple[float, ...] = (1.0,), **attributes: Any
) -> dict[str, Any]:
    """A trainer's results for completions with these rewards, proximal and behaviour log-probs, mask and reference.

    ``rewards``: with several ``weights``, [groups, group size, weights]."""
    proximal, behaviour, mask, reference = case_
    lists = [[0] * TOKENS for _ in range(ROWS)]
    args = SimpleNamespace(
        steps_per_generation=1, gradient_accumulation_steps=1, per_device_train_batch_size=ROWS,
        gradient_checkpointing_kwargs=None, report_to=[],
    )  # fmt: skip
    made = bare(
        trainer, args=args, environment_factories=None, environments=None, tools=None, num_iterations=1,
        _tokenizer=SimpleNamespace(pad_token_id=0), pad_to_multiple_of=None, mask_truncated_completions=False,
        multi_objective_aggregation="sum_then_normalize" if len(weights) == 1 else "normalize_then_sum",
        reward_weights=torch.tensor(weights), num_generations=GROUP, reward_clip_range=None, log_multimodal=False,
        reward_func_names=[f"reward {at}" for at in range(len(weights))], reward_funcs=[None] * len(weights),
        _logs=defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)}, _pending_extra_logs={},
        _pending_metrics={}, use_vllm=True, vllm_importance_sampling_correction=True, ref_model=None, **attributes,
    )  # fmt: skip
    generated = (lists, lists, mask.int().tolist(), [""] * ROWS, behaviour.tolist(), {}, None, None)
    made._generate = lambda _: generated if trainer is GRPOTrainer else (lists, lists, [""] * ROWS)
    made._calculate_rewards = lambda *_: rewards.reshape(ROWS, len(weights))
    made.ref_model = made.beta or None
    made._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        reference if model is made.ref_model else proximal, None, None,
    )  # fmt: skip
    found: dict[str, Any] = trainer._generate_and_score_completions(  # type: ignore[attr-defined]
        made, [{"prompt": ""} for _ in range(ROWS)]
    )
    return found


def rewards_of(seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(ROWS // GROUP, GROUP)).astype(np.float32))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_group_advantages(same: Same, seed: int, spread: float, scale: str) -> None:
    rewards, policies = rewards_of(seed), case(seed, spread, "proximal", "behaviour", "mask", "reference")
    options = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    theirs = scored(GRPOTrainer, rewards, policies, scale_rewards=scale, beta=0.0,
                    vllm_importance_sampling_clip_min=None, **options)["advantages"]  # fmt: skip
    name = {"group": "group_norm", "none": "group_mean"}[scale]
    found = ADVANTAGES[name](rewards)
    if scale == "group":
        deviation = rewards.std(dim=1, keepdim=True)
        found = found * (deviation + DEVIATION_FLOOR) / (deviation + TRL_FLOOR)
    same(f"advantage `{name}`", f"TRL `GRPOTrainer`, `scale_rewards={scale}`", found.flatten(), theirs)


@pytest.mark.parametrize("missing", [False, True])
def test_parts_of_rewards(same: Same, seed: int, spread: float, missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GDPO. ``missing``: one rollout lacks a part, and another one has none."""
    parts = torch.stack([rewards_of(seed), 10 * rewards_of(seed + 100), rewards_of(seed + 200).sign()])
    if missing:
        parts[1, 0, 2] = torch.nan
        parts[:, 1, 3] = torch.nan
    weights = (1.0, 0.3, 0.5)
    policies = case(seed, spread, "proximal", "behaviour", "mask", "reference")
    theirs = scored(GRPOTrainer, parts.permute(1, 2, 0), policies, weights, scale_rewards="group", beta=0.0,
                    vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_min=None,
                    vllm_importance_sampling_clip_max=2.0)["advantages"]  # fmt: skip
    monkeypatch.setattr(advantages, "DEVIATION_FLOOR", TRL_FLOOR)
    found = advantages.advantages_of_parts(parts, weights).nan_to_num(nan=0.0)
    names = "`reward_aggregation: normalize_then_sum`", "TRL `multi_objective_aggregation=normalize_then_sum`"
    same(*names, found.flatten(), theirs)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_leave_one_out(same: Same, seed: int, spread: float, beta: float) -> None:
    rewards, policies = rewards_of(seed), case(seed, spread, "proximal", "behaviour", "mask", "reference")
    proximal, _, mask, reference = policies
    mask[:] = True  # it has no mask for tokens that the policy did not sample
    theirs = scored(RLOOTrainer, rewards, policies, beta=beta, normalize_advantages=False)["advantages"]
    penalties = KL["k1"](proximal, reference).sum(dim=1).reshape(rewards.shape)
    found = ADVANTAGES["leave_one_out"]((rewards - beta * penalties).float())
    kl = ", k1 in the reward" if beta else ""
    same(f"advantage `leave_one_out`{kl}", "TRL `RLOOTrainer`", found.flatten(), theirs)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_importance_weights(same: Same, seed: int, spread: float, level: str, action: str) -> None:
    policies = case(seed, spread, "proximal", "behaviour", "mask", "reference")
    proximal, behaviour, mask, _ = policies
    theirs = scored(
        GRPOTrainer, rewards_of(seed), policies, scale_rewards="group", beta=0.0,
        vllm_importance_sampling_mode=f"{level}_{action}", vllm_importance_sampling_clip_max=2.0,
        vllm_importance_sampling_clip_min=0.5 if action == "mask" else None,
    )["importance_sampling_ratio"]  # fmt: skip
    bounds: dict[str, Any] = {"cap": 2.0} if action == "truncate" else {"mask_low": 0.5, "mask_high": 2.0}
    weights, _ = correct(proximal, behaviour, mask, CorrectionSpec(preset="decoupled", level=level, **bounds))  # type: ignore[arg-type]
    what = f"weights by {level}, " + {"truncate": "truncated", "mask": "masked"}[action]
    same(what, f"TRL `{level}_{action}`", weights, theirs * mask)
