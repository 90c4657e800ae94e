"""KL estimators: Schulman's formulas in float64, their expectations, and the divergences that gradients minimize."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import SIZES, exact, matrices, tensors
from torch import Tensor

from asyncrl_cli.train.algorithms.kl import KL, k2, k3

pytestmark = pytest.mark.slow

FORMULAS = {"k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.expm1(d) - d}
POLICY = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@given(**SIZES)
def test_matches_the_formula(name: str, seed: int, rows: int, tokens: int, spread: float) -> None:
    case = matrices(seed, rows, tokens, spread)
    double = exact(case)
    found = KL[name](*tensors(case, "logprobs", "reference"))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), FORMULAS[name](double["reference"] - double["logprobs"]), rtol=1e-9)


@given(gap=st.floats(1e-7, 5.0), sign=st.sampled_from([-1, 1]))
def test_k3_keeps_its_precision_near_zero(gap: float, sign: int) -> None:
    """Compared with the series of e^d − 1 − d, summed from its smallest term, which has no cancellation."""
    d = np.float64(np.float32(sign * gap))
    terms = [d**n / math.factorial(n) for n in range(40, 1, -1)]
    found = k3(torch.zeros(1), torch.tensor([d], dtype=torch.float32)).item()
    assert found == pytest.approx(math.fsum(terms), rel=1e-5, abs=1e-16)
    assert found >= 0


def gradient(of: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(of, logits)
    return found


def test_gradients_are_those_of_the_divergence_that_the_docstring_names() -> None:
    """Expected gradients over the policy's samples, by enumeration, compared with the divergences' gradients."""
    logits = POLICY.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    weights = logprobs.exp().detach()
    expected = {name: gradient((weights * KL[name](logprobs, REFERENCE.log())).sum(), logits) for name in KL
                for logprobs in [logits.log_softmax(0)]}  # fmt: skip
    reverse = gradient((logprobs.exp() * (logprobs - REFERENCE.log())).sum(), logits)
    forward = gradient((REFERENCE * (REFERENCE.log() - logits.log_softmax(0))).sum(), logits)
    torch.testing.assert_close(expected["k1"], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected["k2"], reverse)
    torch.testing.assert_close(expected["k3"], forward)


def test_distances_are_clamped_before_exp_would_overflow() -> None:
    far = torch.tensor([1e4, -1e4])
    for name, estimate in KL.items():
        assert estimate(far, torch.zeros(2)).isfinite().all(), name
    assert k2(far, torch.zeros(2)).tolist() == [200.0, 200.0]
