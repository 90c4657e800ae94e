"""Compared with verl's core algorithms and its rollout correction.

Where the two differ on purpose:
- a group of one has advantage 0 here; verl's is the reward itself;
- verl's dual clip is always on (``clip_ratio_c``): if ours is off, it gets a limit that is never reached;
- verl's SAPO always takes the mean by sequence;
- its k3 is clamped to 10 nats: k3 is compared where policies are at most 2 nats apart, and losses carry a k2 penalty;
- its rejection removes tokens from the mask; ours gives them weight 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import Same
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils.torch_functional import masked_whiten
from verl.workers.config import ActorConfig

from asyncrl_cli.spec.algorithm import AlgorithmSpec, CorrectionSpec
from asyncrl_cli.train.algorithms.advantages import (
    ADVANTAGES,
    Moments,
    gae,
    rewards_at_turn_ends,
    rewards_to_go,
    whiten,
)
from asyncrl_cli.train.algorithms.corrections import correct
from asyncrl_cli.train.algorithms.kl import KL
from asyncrl_cli.train.algorithms.policy_loss import POLICY_LOSSES, Aggregation, LossInputs, policy_loss
from asyncrl_cli.train.algorithms.value_loss import value_loss
from tests.train.matrices import matrices, tensors

ROWS, TOKENS, GROUP = 12, 16, 4
SPREADS = [0.01, 0.3, 1.0]
GROUPS = np.repeat(np.arange(ROWS // GROUP), GROUP)

pytestmark = [pytest.mark.parametrize("seed", range(5)), pytest.mark.parametrize("spread", SPREADS)]


def case(seed: int, spread: float, *names: str) -> list[Tensor]:
    return tensors(matrices(seed, ROWS, TOKENS, spread), *names)


def rewards(seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(ROWS // GROUP, GROUP)).astype(np.float32))


def at_last_tokens(scores: Tensor, mask: Tensor) -> Tensor:
    return rewards_at_turn_ends(scores.flatten()[:, None], torch.zeros(mask.shape, dtype=torch.int64), mask)


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("group_norm", core_algos.compute_grpo_outcome_advantage, {}),
        ("group_norm", core_algos.compute_grpo_vectorized_outcome_advantage, {}),
        ("group_mean", core_algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        ("leave_one_out", core_algos.compute_rloo_outcome_advantage, {}),
        ("leave_one_out", core_algos.compute_rloo_vectorized_outcome_advantage, {}),
    ],
)
def test_advantages_of_groups(
    same: Same, seed: int, spread: float, name: str, theirs: Any, options: dict[str, Any]
) -> None:
    scores = rewards(seed)
    (mask,) = case(seed, spread, "mask")
    mask[:, 0] = True
    expected, _ = theirs(at_last_tokens(scores, mask), mask.float(), GROUPS, **options)
    found = ADVANTAGES[name](scores).flatten()[:, None] * mask
    same(f"advantage `{name}`", f"verl `{theirs.__name__}`", found, expected)


def test_advantages_of_tokens(same: Same, seed: int, spread: float) -> None:
    token_rewards, values, mask = case(seed, spread, "advantages", "behaviour", "mask")
    counts = mask.float()
    advantages, returns = gae(token_rewards, values, mask, 0.99, 0.95)
    whitened, expected = core_algos.compute_gae_advantage_return(token_rewards, values, counts, 0.99, 0.95)
    name = "verl `compute_gae_advantage_return`"
    same("`gae`, returns", name, returns, expected * mask)
    same("`gae`, whitened", name, whiten(advantages, mask, Moments.of(advantages, mask)), whitened * mask)

    theirs = core_algos.compute_reinforce_plus_plus_outcome_advantage
    whitened, expected = theirs(token_rewards * mask, counts, config=AlgoConfig(gamma=0.99))
    to_go = rewards_to_go(token_rewards, mask, 0.99)
    same("`rewards_to_go`", f"verl `{theirs.__name__}`", to_go, expected)
    same(
        "`rewards_to_go`, whitened", f"verl `{theirs.__name__}`", whiten(to_go, mask, Moments.of(to_go, mask)), whitened
    )

    same(
        "`whiten`",
        "verl `masked_whiten`",
        whiten(values, mask, Moments.of(values, mask)),
        masked_whiten(values, counts) * mask,
    )

    theirs = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
    scores = rewards(seed)
    mask[:, 0] = True
    expected, _ = theirs(at_last_tokens(scores, mask), mask.float(), GROUPS)
    of_tokens = ADVANTAGES["group_mean"](scores).flatten()[:, None] * mask
    found = whiten(of_tokens, mask, Moments.of(of_tokens, mask))
    same("advantage `group_mean`, whitened", f"verl `{theirs.__name__}`", found, expected)


AGGREGATIONS: dict[Aggregation, str] = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum-norm",
}
NEVER = 1e9
LOSS_CASES = [
    ("clip", "vanilla", AlgorithmSpec(clip_low=0.2, clip_high=0.28)),
    ("clip", "vanilla", AlgorithmSpec(clip_low=0.2, clip_high=0.28, dual_clip=1.5)),
    ("gspo", "gspo", AlgorithmSpec(clip_low=3e-3, clip_high=4e-3)),
    ("cispo", "cispo", AlgorithmSpec(clip_low=0.9, clip_high=0.28)),
    ("sapo", "sapo", AlgorithmSpec(sapo_temperatures=(1.0, 1.05))),
]


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize(("name", "theirs", "numbers"), LOSS_CASES)
def test_policy_losses(
    same: Same, seed: int, spread: float, aggregation: Aggregation, name: str, theirs: str, numbers: AlgorithmSpec
) -> None:
    """With weights, a k2 penalty and an entropy bonus, combined as in verl's actor."""
    if theirs == "sapo":
        aggregation = "sequence_mean"
    logprobs, proximal, advantages, behaviour, reference, entropies, mask = case(
        seed, spread, "logprobs", "proximal", "advantages", "behaviour", "reference", "entropies", "mask"
    )
    mask[:, 0] = True
    weights, _ = correct(proximal, behaviour, mask, CorrectionSpec(preset="decoupled", level="token", cap=2.0))
    denominator = {"token_mean": float(mask.sum()), "sequence_mean": ROWS, "sequence_sum": ROWS * 7.0}[aggregation]
    info = {"batch_num_tokens": int(mask.sum()), "global_batch_size": ROWS, "loss_scale_factor": 7, "dp_size": 1}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, global_batch_info=info,
        clip_ratio_low=numbers.clip_low, clip_ratio_high=numbers.clip_high, clip_ratio_c=numbers.dual_clip or NEVER,
        tau_pos=numbers.sapo_temperatures[0], tau_neg=numbers.sapo_temperatures[1],
    )  # fmt: skip

    results = []
    for whose in ("ours", "theirs"):
        policy = [logprobs.clone().requires_grad_(), entropies.clone().requires_grad_()]
        if whose == "ours":
            inputs = LossInputs(policy[0], proximal, advantages, mask, weights, reference, entropies=policy[1])
            changes = {"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.05}
            settings = numbers.model_copy(update=changes)
            loss, _ = policy_loss(inputs, settings, denominator, loss=POLICY_LOSSES[name], kl=KL["k2"])
        else:
            counts, mode = mask.float(), AGGREGATIONS[aggregation]
            function = core_algos.get_policy_loss_fn(theirs)
            loss, _ = function(proximal, policy[0], advantages, counts, mode, config, weights)
            penalty = core_algos.kl_penalty(policy[0], reference, "k2")
            loss = loss + 0.1 * core_algos.agg_loss(penalty, counts, mode, **info)
            loss = loss - 0.05 * core_algos.agg_loss(policy[1], counts, mode, **info)
        loss.backward()
        results.append((loss.detach(), *(tensor.grad for tensor in policy)))
    dual = ", dual clip" if numbers.dual_clip else ""
    names = (f"loss `{name}`{dual}, `{aggregation}`", f"verl `{theirs}`")
    (found, *our_gradients), (expected, *their_gradients) = results
    same(*names, found, expected, size=their_gradients[0].abs().sum())
    for mine, its in zip(our_gradients, their_gradients, strict=True):
        same(*names, mine, its, of="gradient")


@pytest.mark.parametrize("name", list(KL))
def test_kl(same: Same, seed: int, spread: float, name: str) -> None:
    logprobs, reference = case(seed, spread, "logprobs", "reference")
    reference = logprobs + (reference - logprobs).clamp(-2, 2)
    theirs = logprobs.clone().requires_grad_()
    ours = logprobs.clone().requires_grad_()
    # In float64: in float32 verl's k3 has only two or three correct digits where the policies are close.
    expected, found = core_algos.kl_penalty(theirs.double(), reference.double(), name), KL[name](ours, reference)
    same(f"KL `{name}`", "verl `kl_penalty`", found, expected)
    expected.sum().backward()
    found.sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    same(f"KL `{name}`", "verl `kl_penalty`", ours.grad, theirs.grad, of="gradient")


@pytest.mark.parametrize("clip", [0.2, 1.0])
def test_value_loss(same: Same, seed: int, spread: float, clip: float) -> None:
    values, old, returns, mask = case(seed, spread, "logprobs", "proximal", "reference", "mask")
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    found, sums = value_loss(ours, old, returns, mask, clip=clip, denominator=float(mask.sum()))
    expected, clipped = core_algos.compute_value_loss(theirs, returns, old, mask.float(), clip)
    same("`value_loss`", "verl `compute_value_loss`", found.detach(), expected.detach())
    found.backward()
    expected.backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    same("`value_loss`", "verl `compute_value_loss`", ours.grad, theirs.grad, of="gradient")
    share = torch.tensor(sums.summary()["clip_fraction"])
    same("`value_loss`, clipped share", "verl `compute_value_loss`", share, clipped)


@pytest.mark.parametrize(
    ("ours", "level", "threshold"),
    [
        (CorrectionSpec(preset="decoupled", level="token", cap=2.0), "token", 2.0),
        (CorrectionSpec(preset="decoupled", level="sequence", cap=2.0), "sequence", 2.0),
        (CorrectionSpec(preset="decoupled", level="token", mask_low=0.5, mask_high=5.0), "token", "0.5_5.0"),
        (CorrectionSpec(preset="decoupled", level="sequence", mask_low=0.5, mask_high=5.0), "sequence", "0.5_5.0"),
    ],
)
def test_importance_weights(
    same: Same, seed: int, spread: float, ours: CorrectionSpec, level: str, threshold: float | str
) -> None:
    proximal, behaviour, mask = case(seed, spread, "proximal", "behaviour", "mask")
    weights, sums = correct(proximal, behaviour, mask, ours)
    proto, _, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        proximal, behaviour, mask.float(), rollout_is=level, rollout_is_threshold=threshold
    )
    what = f"weights by {level}, " + ("truncated" if ours.cap else "masked")
    theirs = "verl `compute_rollout_correction_weights`"
    same(what, theirs, weights, proto.batch["rollout_is_weights"])
    same("k3 of behaviour and proximal", "verl `compute_offpolicy_metrics`",
         torch.tensor(sums.summary()["kl_behaviour"]), k3_in_float64(proximal, behaviour, mask))  # fmt: skip
    if ours.mask_high:
        found = torch.tensor(sums.summary()["importance_masked_fraction"])
        same(f"{what}: share", theirs, found, torch.tensor(metrics["rollout_corr/rollout_is_oob_ratio"]))


def k3_in_float64(proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    metrics = rollout_corr_helper.compute_offpolicy_metrics(proximal.double(), behaviour.double(), mask.double())
    return torch.tensor(metrics["k3_kl"])


OVER = {"token": "token", "seq_mean": "sequence_mean", "seq_sum": "sequence_sum", "seq_max": "sequence_max"}


@pytest.mark.parametrize("option", sorted(rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS))
@pytest.mark.parametrize(("low", "high"), [(0.9, 1.05), (None, 1.2)])
def test_rejection(same: Same, seed: int, spread: float, option: str, low: float | None, high: float) -> None:
    proximal, behaviour, mask = case(seed, spread, "proximal", "behaviour", "mask")
    over, _, by = option.rpartition("_")
    if by != "k1":
        low, high = None, (high - 1) / 5
    rejection: dict[str, Any] = {"reject_by": by, "reject_over": OVER[over], "reject_low": low, "reject_high": high}
    weights, sums = correct(proximal, behaviour, mask, CorrectionSpec(preset="decoupled", **rejection))
    threshold = high if low is None else f"{low}_{high}"
    kept, metrics = rollout_corr_helper.compute_rollout_rejection_mask(
        proximal - behaviour, mask.float(), option, threshold
    )
    theirs = f"verl `rollout_rs={option}`"
    same(f"rejection by `{by}` over `{OVER[over]}`", theirs, weights, kept)
    share = torch.tensor(sums.summary()["rejected_token_fraction"])
    same(
        "rejected share",
        "verl `rollout_rs_masked_fraction`",
        share,
        torch.tensor(metrics["rollout_rs_masked_fraction"]),
    )
