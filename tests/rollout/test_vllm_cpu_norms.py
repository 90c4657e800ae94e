"""vLLM's kernels for normalization on CPU engines: they compute the same as vLLM's implementation in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow  # imports vLLM

EPSILON = 1e-6


@pytest.fixture(scope="module")
def norms() -> Any:
    """The module, registered in this process."""
    from asyncrl_cli.rollout import vllm_cpu_norms

    vllm_cpu_norms.register_norms()
    return vllm_cpu_norms


def _heads(rows: int, heads: int, size: int) -> Any:
    """Keys as views of wider rows of queries, keys and values, as in vLLM's models: [rows, heads, size]."""
    import torch

    wide = torch.randn(rows, (heads + 3) * size, generator=torch.Generator().manual_seed(rows))
    return wide[:, size : (heads + 1) * size].view(rows, heads, size)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 65])
@pytest.mark.parametrize("size", [24, 32, 128])
def test_heads_within_wider_rows(norms: Any, rows: int, heads: int, size: int) -> None:
    import torch
    from vllm import ir

    keys = _heads(rows, heads, size)
    weight = torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.5
    before = keys.clone()
    found = norms.rms_norm(keys, weight, EPSILON)
    torch.testing.assert_close(found, ir.ops.rms_norm.impls["native"].impl_fn(keys, weight, EPSILON))
    assert torch.equal(keys, before)


@pytest.mark.parametrize("rows", [1, 64])
def test_norm_of_a_sum_and_the_sum(norms: Any, rows: int) -> None:
    import torch
    from vllm import ir

    generator = torch.Generator().manual_seed(rows)
    x, residual = torch.randn(2, rows, 96, generator=generator).unbind()
    weight = torch.rand(96, generator=generator) + 0.5
    wanted = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x.clone(), residual.clone(), weight, EPSILON)
    torch.testing.assert_close(norms.fused_add_rms_norm(x, residual, weight, EPSILON), wanted)


def test_a_row_does_not_depend_on_its_batch(norms: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(33, 96, generator=generator), torch.rand(96, generator=generator)
    together = norms.rms_norm(x, weight, EPSILON)
    alone = [norms.rms_norm(x[row : row + 1], weight, EPSILON) for row in range(33)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(
    ("call", "own"),
    [
        ("float32", True),
        ("bfloat16", False),
        ("no weight", False),
        ("part of a row", False),
        ("bfloat16 weight", False),
    ],
)
def test_which_calls_vllm_gives_to_the_kernels(norms: Any, call: str, own: bool) -> None:
    import torch
    from vllm import ir

    x = torch.randn(2, 32, dtype=torch.bfloat16 if call == "bfloat16" else torch.float32)
    weight = torch.ones(32, dtype=torch.bfloat16 if call.startswith("bfloat16") else torch.float32)
    part = 16 if call == "part of a row" else None
    arguments = (None if call == "no weight" else weight, EPSILON, part)
    norm, added = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    with norm.set_priority(norms.IR_OP_PRIORITY["rms_norm"] + ["native"]):
        assert (norm.dispatch(x, *arguments).provider == norms.PROVIDER) == own
    with added.set_priority(norms.IR_OP_PRIORITY["fused_add_rms_norm"] + ["native"]):
        assert (added.dispatch(x, x.clone(), *arguments).provider == norms.PROVIDER) == own
        assert added.dispatch(x, torch.randn(32, 2).T, *arguments).provider == "native"
        assert added.dispatch(x, x.to(torch.float16), *arguments).provider == "native"
