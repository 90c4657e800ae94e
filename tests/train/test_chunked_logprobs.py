"""The output head compared with formulas in float64, its gradient with finite differences, and its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl_cli.train.model import chunked_logprobs


def score(*arguments: Any, numbers: int) -> tuple[Tensor, Tensor]:
    """``chunked_logprobs`` with chunks of this many numbers."""
    before, chunked_logprobs.CHUNK_NUMBERS = chunked_logprobs.CHUNK_NUMBERS, numbers
    try:
        return chunked_logprobs.chunked_logprobs(*arguments)
    finally:
        chunked_logprobs.CHUNK_NUMBERS = before


@given(
    seed=st.integers(0, 10**6),
    positions=st.integers(0, 9),
    vocabulary=st.integers(1, 30),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    numbers=st.sampled_from([1, 64, 2**20]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_matches_the_formulas(
    seed: int, positions: int, vocabulary: int, temperature: float, numbers: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(positions, 4, generator=generator)
    layer = nn.Linear(4, vocabulary, bias=False)
    layer.weight.data = scale * torch.randn(vocabulary, 4, generator=generator)
    targets = torch.randint(vocabulary, (positions,), generator=generator)
    found, entropies = score(layer, hidden, targets, temperature, "measure", numbers=numbers)

    exact = layer(hidden).detach().numpy().astype(np.float64) / temperature
    exact -= exact.max(axis=1, keepdims=True) if positions else 0.0
    logs = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert found.dtype == entropies.dtype == torch.float32
    np.testing.assert_allclose(found.detach(), logs[np.arange(positions), targets.numpy()], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropies.detach(), -(np.exp(logs) * logs).sum(axis=1), rtol=1e-5, atol=1e-5)
    assert found.requires_grad and not entropies.requires_grad


@pytest.mark.parametrize("entropy", ["none", "measure", "train"])
@pytest.mark.parametrize("blocks", [10, 10**6])
def test_the_gradient_is_the_formulas(
    entropy: chunked_logprobs.Entropy, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_logprobs, "BLOCK_NUMBERS", blocks)
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 2, 2, 5])

    def scored(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        layer = nn.Module()
        layer.weight, layer.bias = weight, bias
        found = score(layer, hidden, targets, 0.7, entropy, numbers=14)
        return found if entropy == "train" else found[:1]

    assert torch.autograd.gradcheck(scored, (hidden, weight, bias))


def test_kernel_of_entropies_in_tritons_interpreter() -> None:
    """In a separate process: Triton reads the variable when it is imported."""
    pytest.importorskip("triton")
    program = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("interpreted_kernels.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "9 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("entropy", ["none", "measure", "train"])
def test_without_positions_a_gpu_runs_no_kernel_and_the_gradient_is_zero(
    entropy: chunked_logprobs.Entropy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "mm", None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    layer = nn.Linear(4, 7, dtype=torch.bfloat16)
    hidden = torch.zeros(0, 4, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = chunked_logprobs.chunked_logprobs(layer, hidden, torch.zeros(0, dtype=torch.int64), 0.7, entropy)
    logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 4)
    assert not layer.weight.grad.any() and not layer.bias.grad.any()


@pytest.mark.parametrize("chunks", [1, 64])
def test_in_bfloat16_the_gradient_of_the_head_is_rounded_once(chunks: int) -> None:
    """Compared with a float64 model of the same weights: only bfloat16's own rounding remains, at most 2^-8 of a
    number, for any number of chunks."""
    torch.manual_seed(0)
    positions, vocabulary = 512, 50
    layer = nn.Linear(16, vocabulary, dtype=torch.bfloat16)
    hidden = torch.randn(positions, 16, dtype=torch.bfloat16)
    targets, weights = torch.randint(vocabulary, (positions,)), torch.rand(positions, dtype=torch.float64)
    (score(layer, hidden, targets, 1.0, numbers=positions * vocabulary // chunks)[0] @ weights.float()).backward()
    exact = nn.Linear(16, vocabulary, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    logs = exact(hidden.double()).log_softmax(-1)
    (logs.gather(-1, targets[:, None])[:, 0] @ weights).backward()
    for found, wanted in ((layer.weight, exact.weight), (layer.bias, exact.bias)):
        assert found.grad.dtype == torch.bfloat16
        error = (found.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert error < 2**-8, f"{error:.2%}"


def test_the_layer_is_called_once_and_a_frozen_one_gets_no_gradient() -> None:
    layer, calls = nn.Linear(6, 20).requires_grad_(False), []
    layer.register_forward_pre_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: calls.append("backward"))
    hidden = torch.randn(11, 6, requires_grad=True)
    score(layer, hidden, torch.arange(11), 1.0, numbers=40)[0].sum().backward()
    assert calls == ["forward", "backward"]
    assert hidden.grad is not None and layer.weight.grad is None
    assert layer(hidden).shape == (11, 20), "the layer is unchanged"


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest result of any operation."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


@pytest.mark.parametrize("entropy", ["none", "measure", "train"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_the_bound(entropy: chunked_logprobs.Entropy, dtype: torch.dtype) -> None:
    positions, vocabulary, bound = 300, 1000, 50_000
    layer = nn.Linear(8, vocabulary, bias=False, dtype=dtype)
    hidden = torch.randn(positions, 8, dtype=dtype, requires_grad=True)
    with LargestTensor() as seen:
        found = score(layer, hidden, torch.arange(positions), 0.5, entropy, numbers=bound)
        sum(each.sum() for each in found if each.requires_grad).backward()
    assert positions * vocabulary > 5 * bound
    assert bound // 2 < seen.numbers <= bound
    assert hidden.grad is not None and hidden.grad.isfinite().all()
