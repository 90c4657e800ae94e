"""The policy loss against float64 NumPy, its gradient against the formula's, and its sums over any cut."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.train.losses import Aggregation, LossSums, aggregate, k3, policy_loss

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
CASES = {
    "seed": st.integers(0, 10**6),
    "rows": st.integers(1, 5),
    "tokens": st.integers(1, 10),
    "spread": st.sampled_from([0.001, 0.3, 3.0]),
    "aggregation": st.sampled_from(["token_mean", "sequence_mean"]),
}


def random_case(seed: int, rows: int, tokens: int, spread: float) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    proximal = -generator.exponential(2.0, (rows, tokens))
    return {
        "logprobs": (proximal + spread * generator.standard_normal((rows, tokens))).astype(np.float32),
        "proximal_logprobs": proximal.astype(np.float32),
        "reference_logprobs": (proximal + spread * generator.standard_normal((rows, tokens))).astype(np.float32),
        "advantages": generator.choice([-1.5, -0.3, 0.0, 0.7, 2.0], rows).astype(np.float32),
        "importance_weights": generator.uniform(0, 2, (rows, tokens)).astype(np.float32),
        "mask": generator.random((rows, tokens)) < 0.7,
    }


def reference(case: dict[str, np.ndarray], aggregation: str, kl_coef: float) -> tuple[float, np.ndarray]:
    """Loss and gradient (by hand), undivided by a denominator, in float64."""
    double = {name: array if name == "mask" else array.astype(np.float64) for name, array in case.items()}
    ratio = np.exp(double["logprobs"] - double["proximal_logprobs"])
    advantage = np.broadcast_to(double["advantages"][:, None], ratio.shape)
    inside = np.clip(ratio, 0.8, 1.28)
    weight = double["importance_weights"]
    gap = double["reference_logprobs"] - double["logprobs"]
    per_token = -weight * np.minimum(ratio * advantage, inside * advantage) + kl_coef * (np.exp(gap) - 1 - gap)
    active = np.where(advantage > 0, ratio <= 1.28, ratio >= 0.8)
    gradient = -weight * advantage * ratio * active + kl_coef * (1 - np.exp(gap))
    scale = double["mask"].astype(np.float64)
    if aggregation == "sequence_mean":
        scale /= np.maximum(1, scale.sum(axis=1, keepdims=True))
    return float((per_token * scale).sum()), gradient * scale


def tensors(case: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(array.copy()) for name, array in case.items()}


@settings(deadline=None)
@given(**CASES, kl_coef=st.sampled_from([0.0, 0.1]))
def test_loss_and_gradient_match_the_formula(
    seed: int, rows: int, tokens: int, spread: float, aggregation: Aggregation, kl_coef: float
) -> None:
    case = random_case(seed, rows, tokens, spread)
    inputs = tensors(case)
    inputs["logprobs"].requires_grad_()
    denominator = 7.0
    loss, _ = policy_loss(**inputs, **CLIP, aggregation=aggregation, denominator=denominator, kl_coef=kl_coef)
    loss.backward()
    expected, gradient = reference(case, aggregation, kl_coef)
    magnitude = np.abs(gradient).sum() + 1e-6
    assert loss.item() * denominator == pytest.approx(expected, rel=1e-5, abs=1e-5 * magnitude)
    found = inputs["logprobs"].grad
    assert found is not None
    np.testing.assert_allclose(found.numpy() * denominator, gradient, rtol=2e-5, atol=1e-6)
    assert not found[~inputs["mask"]].any()


@settings(deadline=None)
@given(**CASES, cuts=st.sets(st.integers(1, 4)))
def test_microbatches_add_up_to_the_minibatch(
    seed: int, rows: int, tokens: int, spread: float, aggregation: Aggregation, cuts: set[int]
) -> None:
    inputs = tensors(random_case(seed, rows, tokens, spread))
    mask = inputs["mask"]
    denominator = float(max(1, mask.sum()) if aggregation == "token_mean" else rows)
    settings_: dict[str, Any] = {**CLIP, "aggregation": aggregation, "denominator": denominator, "kl_coef": 0.2}
    whole, sums = policy_loss(**inputs, **settings_)
    edges = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    loss, total = torch.zeros(()), None
    for start, end in pairwise(edges):
        part, part_sums = policy_loss(**{name: t[start:end] for name, t in inputs.items()}, **settings_)
        loss = loss + part
        total = part_sums if total is None else total + part_sums
    assert isinstance(total, LossSums)
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-5)
    assert total.summary() == pytest.approx(sums.summary(), rel=1e-6)


@settings(deadline=None)
@given(**CASES)
def test_sums_match_their_definitions(
    seed: int, rows: int, tokens: int, spread: float, aggregation: Aggregation
) -> None:
    case = random_case(seed, rows, tokens, spread)
    _, sums = policy_loss(**tensors(case), **CLIP, aggregation=aggregation, denominator=1.0)
    double = {name: array.astype(np.float64) for name, array in case.items()}
    mask = case["mask"]
    log_ratio = double["logprobs"] - double["proximal_logprobs"]
    ratio = np.exp(log_ratio)
    advantage = np.broadcast_to(double["advantages"][:, None], ratio.shape)
    gap = double["reference_logprobs"] - double["logprobs"]
    assert sums.tokens.item() == mask.sum()
    assert sums.ratio.item() == pytest.approx(ratio[mask].sum(), rel=1e-5, abs=1e-9)
    assert sums.clipped_low.item() == (mask & (advantage < 0) & (ratio < 0.8)).sum()
    assert sums.clipped_high.item() == (mask & (advantage > 0) & (ratio > 1.28)).sum()
    assert sums.kl_proximal.item() == pytest.approx((ratio - 1 - log_ratio)[mask].sum(), rel=1e-5, abs=1e-9)
    assert sums.kl_reference.item() == pytest.approx((np.exp(gap) - 1 - gap)[mask].sum(), rel=1e-5, abs=1e-9)


def test_the_clip_range_is_asymmetric() -> None:
    ratios = torch.tensor([[0.79, 0.81, 1.27, 1.29]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    gradients = []
    for advantage in (1.0, -1.0):
        logprobs = ratios.log().requires_grad_()
        loss, _ = policy_loss(
            logprobs, torch.zeros(1, 4), torch.tensor([advantage]), mask,
            **CLIP, aggregation="token_mean", denominator=1.0,
        )  # fmt: skip
        loss.backward()
        assert logprobs.grad is not None
        gradients.append((logprobs.grad != 0).tolist()[0])
    assert gradients == [[True, True, True, False], [False, True, True, True]]


def test_advantages_may_differ_by_token() -> None:
    inputs = tensors(random_case(0, 3, 5, 0.3))
    by_row, _ = policy_loss(**inputs, **CLIP, aggregation="token_mean", denominator=1.0)
    inputs["advantages"] = inputs["advantages"][:, None].repeat(1, 5)
    by_token, _ = policy_loss(**inputs, **CLIP, aggregation="token_mean", denominator=1.0)
    assert by_row.item() == by_token.item()
    inputs["advantages"][:, ::2] = 0.0
    other, _ = policy_loss(**inputs, **CLIP, aggregation="token_mean", denominator=1.0)
    assert other.item() != by_token.item()


def test_only_logprobs_carry_gradient() -> None:
    inputs = {
        name: tensor if name == "mask" else tensor.requires_grad_()
        for name, tensor in tensors(random_case(1, 2, 4, 0.3)).items()
    }
    loss, _ = policy_loss(**inputs, **CLIP, aggregation="token_mean", denominator=1.0, kl_coef=0.1)
    loss.backward()
    assert [name for name, tensor in inputs.items() if tensor.grad is not None] == ["logprobs"]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_garbage_in_padding_has_no_effect(aggregation: Aggregation) -> None:
    clean = tensors(random_case(2, 3, 6, 0.3))
    clean["advantages"] = clean["advantages"][:, None].repeat(1, 6)
    dirty = {name: t if name == "mask" else t.masked_fill(~clean["mask"], float("nan")) for name, t in clean.items()}
    results = []
    for inputs in (clean, dirty):
        inputs["logprobs"].requires_grad_()
        loss, sums = policy_loss(**inputs, **CLIP, aggregation=aggregation, denominator=2.0, kl_coef=0.1)
        loss.backward()
        grad = inputs["logprobs"].grad
        assert grad is not None
        results.append((loss.item(), sums.summary(), grad))
    assert results[0][:2] == results[1][:2]
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_an_empty_microbatch_can_run_backward(rows: int, aggregation: Aggregation) -> None:
    logprobs = torch.full((rows, 3), float("nan"), requires_grad=True)
    loss, sums = policy_loss(
        logprobs, torch.zeros(rows, 3), torch.ones(rows), torch.zeros(rows, 3, dtype=torch.bool),
        **CLIP, aggregation=aggregation, denominator=5.0,
    )  # fmt: skip
    loss.backward()
    assert loss.item() == 0.0
    assert set(sums.summary().values()) == {0.0}
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


@pytest.mark.parametrize(("gap", "advantage"), [(1e4, -1.0), (-1e4, 1.0), (1e4, 1.0), (-1e4, -1.0)])
def test_extreme_ratios_stay_finite(gap: float, advantage: float) -> None:
    logprobs = torch.full((1, 2), gap, requires_grad=True)
    loss, sums = policy_loss(
        logprobs, torch.zeros(1, 2), torch.tensor([advantage]), torch.ones(1, 2, dtype=torch.bool),
        **CLIP, aggregation="token_mean", denominator=2.0, reference_logprobs=torch.zeros(1, 2), kl_coef=0.1,
    )  # fmt: skip
    loss.backward()
    assert logprobs.grad is not None
    assert math.isfinite(loss.item())
    assert logprobs.grad.isfinite().all()
    assert all(map(math.isfinite, sums.summary().values()))


@settings(deadline=None)
@given(gap=st.floats(1e-7, 5.0), sign=st.sampled_from([-1, 1]))
def test_k3_keeps_its_precision_near_zero(gap: float, sign: int) -> None:
    """The series of e^d − 1 − d from its smallest term up has no cancellation."""
    d = np.float64(np.float32(sign * gap))
    terms = [d**n / math.factorial(n) for n in range(40, 1, -1)]
    found = k3(torch.zeros(1), torch.tensor([d], dtype=torch.float32)).item()
    assert found == pytest.approx(math.fsum(terms), rel=1e-5, abs=1e-16)
    assert found >= 0


def test_k3_is_unbiased() -> None:
    policy, other = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.25, 0.25]).log()
    kl = (policy.exp() * (policy - other)).sum().item()
    assert (policy.exp() * k3(policy, other)).sum().item() == pytest.approx(kl, rel=1e-5)


def test_aggregations_weigh_tokens_and_sequences() -> None:
    values = torch.tensor([[1.0, 3.0, 9.0], [5.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert aggregate(values, mask, "token_mean", 3.0).item() == 3.0
    assert aggregate(values, mask, "sequence_mean", 2.0).item() == 3.5


def test_refuses_inputs_that_do_not_fit() -> None:
    inputs = tensors(random_case(3, 2, 4, 0.3))
    call: dict[str, Any] = {**CLIP, "aggregation": "token_mean", "denominator": 1.0}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"mask": inputs["mask"].float()}, "bool"),
        ({"proximal_logprobs": torch.zeros(2, 3)}, "shapes"),
        ({"importance_weights": torch.zeros(2)}, "shapes"),
        ({"advantages": torch.zeros(3)}, "shapes"),
        ({"reference_logprobs": None, "kl_coef": 0.1}, "reference"),
        ({"denominator": 0.0}, "denominator"),
        ({"aggregation": "mean"}, "aggregation"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            policy_loss(**{**inputs, **call, **change})
