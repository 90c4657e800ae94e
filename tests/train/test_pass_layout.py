"""No operation of a pass depends on a number that only the device knows: a GPU's host would wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import varlen_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl_cli.train.model.pass_layout import PassLayout
from asyncrl_cli.train.model.policy import ValueModel
from asyncrl_cli.train.prefix_trees import PrefixTree, TreeLayout
from tests.train.test_policy import make, rows

aten = torch.ops.aten
WAITS = {aten.nonzero.default, aten._local_scalar_dense.default, aten.masked_select.default, aten.is_nonzero.default}


class NoWaits(TorchDispatchMode):
    """Raises for operations with a result that the host must know, or with a size that depends on values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = function in (aten.index.Tensor, aten.index_put_.default) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert function not in WAITS and not by_mask, f"{function} makes the host wait"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])  # without and with windows
def test_packed_rows_attend_by_varlen_without_a_host_wait(architecture: str) -> None:
    ids, mask = rows()
    layout = PassLayout.of(mask, packing=True)
    with varlen_kernel.installed():
        policy = make(architecture, attention="varlen", packing=True)
        with NoWaits():
            policy(ids, mask, layout=layout).sum().backward()
    assert varlen_kernel.LONGEST


# With trees. For padded rows transformers itself waits once a pass, when it makes the mask of sdpa.
@pytest.mark.parametrize("critic", [False, True])
def test_a_pass_and_its_gradient_make_no_host_wait(critic: bool) -> None:
    policy = make("qwen3")
    model = ValueModel(policy.model.base_model) if critic else policy
    ids, mask = rows()
    ids, mask = ids[:2], mask[:2]
    trees = TreeLayout.of([PrefixTree((0, 1), (ids.shape[1] - 1,) * 2, shared=(0, 1))], ids.shape[1], False)
    layout = PassLayout.of(mask, packing=False, trees=trees)
    with NoWaits():
        results = model(ids, mask, layout=layout, trees=trees)
        results.sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
