"""Kernels that Triton interprets on a CPU; test_chunked_logprobs.py runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asyncrl_cli.train.model import chunked_logprobs


@pytest.mark.parametrize("entropy", ["none", "measure", "train"])
@pytest.mark.parametrize(("numbers", "products"), [(16, 3 + 3 + 3), (2**27, 1 + 1)])
def test_head_on_a_gpu_computes_bfloat16_products_in_float32(
    entropy: chunked_logprobs.Entropy, numbers: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branches for CUDA run on the CPU here: tensors say that they are on a GPU, `out_dtype`, which a CPU does not
    have, is emulated, and Triton interprets the kernel of entropies."""
    monkeypatch.setattr(chunked_logprobs, "GPU_CHUNK_NUMBERS", numbers)
    product, wide = torch.mm, []

    def mm(one: Tensor, other: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert one.dtype == other.dtype == torch.bfloat16
        wide.append(one.shape)
        return product(one.to(out_dtype), other.to(out_dtype))

    def addmm(total: Tensor, one: Tensor, other: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(total + mm(one, other, out_dtype))

    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((6, 64), (7, 64), (7,)))
    targets, factors = torch.tensor([0, 6, 2, 2, 5, 1]), torch.randn(2, 6)

    def scored(dtype: torch.dtype, how: chunked_logprobs.Entropy) -> list[Tensor]:
        leaves = [part.to(dtype).requires_grad_() for part in (hidden, weight, bias)]
        layer = nn.Module()
        layer.weight, layer.bias = leaves[1], leaves[2]
        logprobs, entropies = chunked_logprobs.chunked_logprobs(layer, leaves[0], targets, 0.7, how)  # type: ignore[arg-type]
        loss = (logprobs * factors[0]).sum() + (entropies * factors[1]).sum() * (how == "train")
        loss.backward()  # type: ignore[no-untyped-call]
        return [logprobs.detach(), entropies.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    exact = scored(torch.float64, entropy)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = scored(torch.bfloat16, entropy)
    assert len(wide) == products
    assert [part.dtype for part in found] == [torch.float32] * 2 + [torch.bfloat16] * 3
    for one, other, rounding in zip(found, exact, (1e-5, 1e-5, 2**-7, 2**-7, 2**-7), strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=0, atol=rounding * max(scale, 1e-9))


@pytest.mark.parametrize("vocabulary", [1, 4096, 9001])
def test_kernel_of_entropies_sums_rows_of_any_length(vocabulary: int) -> None:
    from asyncrl_cli.train.model.entropy_kernel import row_entropies

    logs = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0)).mul(5).log_softmax(-1)
    torch.testing.assert_close(row_entropies(logs), torch.distributions.Categorical(logits=logs).entropy())
