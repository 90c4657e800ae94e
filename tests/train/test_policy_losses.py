"""Policy losses and their gradients, compared with the papers' formulas in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from matrices import SIZES, Matrices, exact, matrices, tensors

from asyncrl_cli.spec.algorithm import AlgorithmSpec
from asyncrl_cli.train.algorithms.objective import Objective
from asyncrl_cli.train.algorithms.policy_loss import POLICY_LOSSES, TokenLosses
from tests.doc_examples import code_blocks

pytestmark = pytest.mark.slow

SETTINGS = {
    "plain": AlgorithmSpec(clip_low=0.2, clip_high=0.28),
    "dual": AlgorithmSpec(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "no lower edge": AlgorithmSpec(clip_low=1.0, clip_high=4.0, sapo_temperatures=(2.0, 0.5)),
}


def clipped(ratio: np.ndarray, advantage: np.ndarray, numbers: AlgorithmSpec) -> tuple[np.ndarray, np.ndarray]:
    """PPO's loss, and its gradient as a fraction of −A·r."""
    low, high = 1 - numbers.clip_low, 1 + numbers.clip_high
    gain = np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
    active = np.where(advantage > 0, ratio <= high, ratio >= low)
    if numbers.dual_clip is not None:
        bound = numbers.dual_clip * advantage
        active = active & ~((advantage < 0) & (gain < bound))
        gain = np.where(advantage < 0, np.maximum(gain, bound), gain)
    return -gain, active.astype(np.float64)


def reference(name: str, case: Matrices, numbers: AlgorithmSpec) -> tuple[np.ndarray, np.ndarray]:
    """Loss and its gradient with respect to the log-probs, [rows, tokens], in float64; only where the mask is true."""
    double = exact(case)
    log_ratio, advantage, mask = double["logprobs"] - double["proximal"], double["advantages"], case["mask"]
    ratio = np.exp(log_ratio)
    if name == "gspo":
        lengths = np.maximum(1, mask.sum(axis=1, keepdims=True))
        ratio = np.exp((log_ratio * mask).sum(axis=1, keepdims=True) / lengths) * np.ones_like(ratio)
    if name in ("clip", "gspo"):
        loss, active = clipped(ratio, advantage, numbers)
        return loss, -advantage * ratio * active
    if name == "cispo":
        weight = np.clip(ratio, 1 - numbers.clip_low, 1 + numbers.clip_high)
        return -weight * advantage * double["logprobs"], -weight * advantage
    tau = np.where(advantage > 0, *numbers.sapo_temperatures)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage


def evaluated(name: str, case: Matrices, numbers: AlgorithmSpec) -> tuple[TokenLosses, torch.Tensor]:
    logprobs, proximal, advantages, mask = tensors(case, "logprobs", "proximal", "advantages", "mask")
    logprobs.requires_grad_()
    found = POLICY_LOSSES[name](logprobs, proximal, advantages, mask, numbers)
    found.loss[mask].sum().backward()
    assert logprobs.grad is not None
    return found, logprobs.grad


def near_an_edge(name: str, case: Matrices, numbers: AlgorithmSpec) -> bool:
    """Whether some ratio is so near a clip limit that rounding matters."""
    double = exact(case)
    log_ratio, mask = double["logprobs"] - double["proximal"], case["mask"]
    if name == "gspo":
        log_ratio = (log_ratio * mask).sum(axis=1, keepdims=True) / np.maximum(1, mask.sum(axis=1, keepdims=True))
    edges = [1 - numbers.clip_low, 1 + numbers.clip_high, numbers.dual_clip or 1 + numbers.clip_high]
    return bool(np.isclose(np.exp(log_ratio)[..., None], edges, rtol=1e-5).any())


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@pytest.mark.parametrize("numbers", list(SETTINGS.values()), ids=list(SETTINGS))
@given(**SIZES)
def test_loss_and_gradient_match_the_paper(
    name: str, numbers: AlgorithmSpec, seed: int, rows: int, tokens: int, spread: float
) -> None:
    case = matrices(seed, rows, tokens, spread)
    if near_an_edge(name, case, numbers):
        return
    mask = case["mask"]
    found, gradient = evaluated(name, case, numbers)
    loss, expected = reference(name, case, numbers)
    np.testing.assert_allclose(found.loss.detach().numpy()[mask], loss[mask], rtol=1e-5, atol=1e-7)
    # 1 − p of the sigmoid has cancellation: its error is absolute, in units of the other factors.
    size = np.abs(np.exp(exact(case)["logprobs"] - exact(case)["proximal"]) * case["advantages"])
    error = np.abs(gradient.numpy() - expected)
    assert (error <= 1e-5 * (np.abs(expected) + size) + 1e-7)[mask].all()


def test_the_loss_in_the_docs_has_a_tenth_of_the_gradient_outside_the_edges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator, loss = code_blocks("algorithms.md", "## Your own estimator or loss", "python")
    (tmp_path / "my_losses.py").write_text(f"{loss}\n{estimator}")
    monkeypatch.setattr(sys, "path", list(sys.path))
    algorithm = AlgorithmSpec(loss="my_losses:soft_clip", advantage="my_losses:shorter_is_better")
    objective = Objective.of(algorithm, tmp_path)
    logprobs = torch.tensor([[-1.0, -0.5, -2.0]], requires_grad=True)
    ratio = (logprobs.detach() + 1).exp()  # 1, above and below the edges
    mask = torch.ones(1, 3, dtype=torch.bool)
    losses = objective.loss(logprobs, torch.full((1, 3), -1.0), torch.ones(1, 3), mask, algorithm)
    losses.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -ratio * torch.tensor([[1.0, 0.1, 0.1]]))
    assert losses.clipped_low.tolist() == [[False, False, True]]
    assert losses.clipped_high.tolist() == [[False, True, False]]
    assert objective.advantage is not None and objective.asks == ("lengths", "metrics")
    better = objective.advantage(rewards=torch.eye(2), lengths=torch.tensor([[1, 2], [1, 2]]), metrics={})
    torch.testing.assert_close(better, torch.tensor([[0.625, -0.5], [-0.625, 0.5]]))
