"""The loss of a micro-batch compared with NumPy in float64, its gradient, and its sums."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import SIZES, Matrices, exact, matrices, with_garbage

from asyncrl_cli.spec.algorithm import AlgorithmSpec
from asyncrl_cli.train.algorithms.kl import KL
from asyncrl_cli.train.algorithms.policy_loss import (
    POLICY_LOSSES,
    Aggregation,
    LossInputs,
    LossSums,
    TokenLosses,
    policy_loss,
)

pytestmark = pytest.mark.slow

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
NUMBERS = AlgorithmSpec(clip_low=0.2, clip_high=0.28)
CLIP: dict[str, Any] = {"loss": POLICY_LOSSES["clip"], "settings": NUMBERS}
COEFFICIENTS: dict[str, Any] = CLIP | {"kl_coef": 0.1, "entropy_coef": 0.05}
CASES = {**SIZES, "aggregation": st.sampled_from(AGGREGATIONS)}
EVERYTHING = {**CASES, "loss": st.sampled_from(list(POLICY_LOSSES)), "kl": st.sampled_from(list(KL))}


INPUTS = frozenset(field.name for field in fields(LossInputs))
NUMBERS_OF_SPEC = ("aggregation", "kl_coef", "entropy_coef")


def loss_of(settings: AlgorithmSpec, **given: Any) -> tuple[torch.Tensor, LossSums]:
    """``policy_loss`` with its inputs and the spec's numbers as keywords."""
    changes = {name: given.pop(name) for name in NUMBERS_OF_SPEC if name in given}
    inputs = LossInputs(**{name: given.pop(name) for name in INPUTS & given.keys()})
    return policy_loss(inputs, settings.model_copy(update=changes), **given)


def arguments(case: Matrices) -> dict[str, Any]:
    """Arguments of ``policy_loss``, with weights computed from the behaviour policy's log-probs."""
    names = {"logprobs": "logprobs", "proximal_logprobs": "proximal", "advantages": "advantages", "mask": "mask"}
    names |= {"reference_logprobs": "reference", "entropies": "entropies"}
    chosen = {name: torch.from_numpy(case[source].copy()) for name, source in names.items()}
    return chosen | {"importance_weights": torch.from_numpy(np.minimum(2, -case["behaviour"]).astype(np.float32))}


def evaluated(case: Matrices, **options: Any) -> tuple[float, dict[str, float], dict[str, np.ndarray]]:
    """Loss, summary of the sums, and gradients."""
    inputs = arguments(case)
    for name in ("logprobs", "entropies"):
        inputs[name].requires_grad_()
    loss, sums = loss_of(**inputs, **COEFFICIENTS | options)
    loss.backward()
    return loss.item(), sums.summary(), {name: inputs[name].grad.numpy() for name in ("logprobs", "entropies")}


@given(**CASES, kl=st.sampled_from(list(KL)))
def test_loss_and_gradient_match_the_formula(
    seed: int, rows: int, tokens: int, spread: float, aggregation: Aggregation, kl: str
) -> None:
    case = matrices(seed, rows, tokens, spread)
    loss, _, gradients = evaluated(case, kl=KL[kl], aggregation=aggregation, denominator=7.0)
    double = exact(case)
    ratio, advantage = np.exp(double["logprobs"] - double["proximal"]), double["advantages"]
    weight = np.minimum(2, -double["behaviour"])
    gap = double["reference"] - double["logprobs"]
    clipped = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    penalty, slope = {"k1": (-gap, 1), "k2": (gap**2 / 2, -gap), "k3": (np.exp(gap) - 1 - gap, 1 - np.exp(gap))}[kl]
    per_token = weight * clipped + 0.1 * penalty - 0.05 * double["entropies"]
    active = np.where(advantage > 0, ratio <= 1.28, ratio >= 0.8)
    gradient = -weight * advantage * ratio * active + 0.1 * slope
    scale = case["mask"] / 7.0
    if aggregation == "sequence_mean":
        scale /= np.maximum(1, case["mask"].sum(axis=1, keepdims=True))

    size = (np.abs(per_token) * scale).sum()
    assert loss == pytest.approx((per_token * scale).sum(), rel=1e-5, abs=1e-6 * size)
    np.testing.assert_allclose(gradients["logprobs"], gradient * scale, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradients["entropies"], -0.05 * scale, rtol=1e-5)


def chosen(aggregation: Aggregation, loss: str, kl: str) -> dict[str, Any]:
    return {"aggregation": aggregation, "denominator": 7.0, "loss": POLICY_LOSSES[loss], "kl": KL[kl]}


@given(**EVERYTHING, columns=st.integers(0, 3))
def test_order_of_rows_padding_and_garbage_in_it_change_nothing(
    seed: int, rows: int, tokens: int, spread: float, aggregation: Aggregation, loss: str, kl: str, columns: int
) -> None:
    case = matrices(seed, rows, tokens, spread)
    options = chosen(aggregation, loss, kl)
    whole, summary, gradients = evaluated(case, **options)
    order = np.random.default_rng(seed).permutation(rows)
    dirty = {name: array[order] for name, array in with_garbage(case, columns).items()}
    again, summary_again, gradients_again = evaluated(dirty, **options)
    size = abs(whole) + float(np.abs(gradients["logprobs"]).sum())
    assert again == pytest.approx(whole, rel=1e-6, abs=1e-6 * size)
    assert summary_again == pytest.approx(summary, rel=1e-6)
    for name, gradient in gradients.items():
        # Sums of float32 in another order: differences of a dozen rounding errors of the largest term were observed.
        np.testing.assert_allclose(gradients_again[name][:, :tokens], gradient[order], rtol=1e-5, atol=1e-9)
        assert not gradients_again[name][~dirty["mask"]].any()


@given(**CASES)
def test_sums_match_their_definitions(
    seed: int, rows: int, tokens: int, spread: float, aggregation: Aggregation
) -> None:
    case = matrices(seed, rows, tokens, spread)
    inputs = arguments(case)
    _, sums = loss_of(**inputs, **COEFFICIENTS, aggregation=aggregation, denominator=1.0)
    double, mask = exact(case), case["mask"]
    log_ratio = double["logprobs"] - double["proximal"]
    ratio, advantage = np.exp(log_ratio), double["advantages"]
    gap = double["reference"] - double["logprobs"]
    assert sums.tokens.item() == mask.sum()
    assert sums.ratio.item() == pytest.approx(ratio[mask].sum(), rel=1e-5, abs=1e-9)
    if not np.isclose(ratio[..., None], [0.8, 1.28], rtol=1e-5).any():
        assert sums.clipped_low.item() == (mask & (advantage < 0) & (ratio < 0.8)).sum()
        assert sums.clipped_high.item() == (mask & (advantage > 0) & (ratio > 1.28)).sum()
    assert sums.kl_proximal.item() == pytest.approx((ratio - 1 - log_ratio)[mask].sum(), rel=1e-5, abs=1e-9)
    assert sums.kl_reference.item() == pytest.approx((np.exp(gap) - 1 - gap)[mask].sum(), rel=1e-5, abs=1e-9)
    assert sums.entropy.item() == pytest.approx(double["entropies"][mask].sum(), rel=1e-6)


def test_a_users_loss_is_used_and_checked() -> None:
    case = matrices(0, 3, 5, 0.3)

    def reinforce(logprobs: Any, proximal: Any, advantages: Any, mask: Any, numbers: AlgorithmSpec) -> TokenLosses:
        assert not torch.cat([logprobs[~mask], proximal[~mask], advantages[~mask]]).any()
        return TokenLosses(-logprobs * advantages, mask, ~mask)

    _, summary, gradients = evaluated(case, loss=reinforce, aggregation="token_mean", denominator=1.0, kl_coef=0.0)
    expected = -np.minimum(2, -case["behaviour"]) * case["advantages"] * case["mask"]
    np.testing.assert_allclose(gradients["logprobs"], expected)
    assert (summary["clip_low_fraction"], summary["clip_high_fraction"]) == (1.0, 0.0)

    def of_rows(*inputs: Any) -> TokenLosses:
        found = reinforce(*inputs)
        return TokenLosses(found.loss.sum(1), found.clipped_low, found.clipped_high)

    with pytest.raises(ValueError, match="shapes differ"):
        evaluated(case, loss=of_rows, aggregation="token_mean", denominator=1.0)


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_an_empty_microbatch_can_run_backward(rows: int, aggregation: Aggregation, name: str) -> None:
    logprobs = torch.full((rows, 3), float("nan"), requires_grad=True)
    inputs = LossInputs(logprobs, torch.zeros(rows, 3), torch.ones(rows, 3), torch.zeros(rows, 3, dtype=torch.bool))
    numbers = NUMBERS.model_copy(update={"aggregation": aggregation})
    loss, sums = policy_loss(inputs, numbers, 5.0, loss=POLICY_LOSSES[name])
    loss.backward()
    assert loss.item() == 0.0
    assert set(sums.summary().values()) == {0.0}
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize(("gap", "advantage"), [(1e4, -1.0), (-1e4, 1.0), (1e4, 1.0), (-1e4, -1.0)])
def test_extreme_ratios_stay_finite(gap: float, advantage: float, name: str) -> None:
    logprobs = torch.full((1, 2), gap, requires_grad=True)
    mask, zeros = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    inputs = LossInputs(logprobs, zeros, torch.full((1, 2), advantage), mask, reference_logprobs=zeros)
    numbers = NUMBERS.model_copy(update={"kl_coef": 0.1})
    loss, sums = policy_loss(inputs, numbers, 2.0, loss=POLICY_LOSSES[name])
    loss.backward()
    assert logprobs.grad is not None
    assert math.isfinite(loss.item())
    assert logprobs.grad.isfinite().all()
    assert all(map(math.isfinite, sums.summary().values()))


def test_refuses_inputs_that_do_not_fit() -> None:
    inputs = arguments(matrices(3, 2, 4, 0.3))
    call: dict[str, Any] = CLIP | {"aggregation": "token_mean", "denominator": 1.0}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"mask": inputs["mask"].float()}, "bool"),
        ({"proximal_logprobs": torch.zeros(2, 3)}, "shapes"),
        ({"importance_weights": torch.zeros(2)}, "shapes"),
        ({"entropies": torch.zeros(2)}, "shapes"),
        ({"advantages": torch.zeros(2)}, "shapes"),
        ({"denominator": 0.0}, "denominator"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            loss_of(**{**inputs, **call, **change})
