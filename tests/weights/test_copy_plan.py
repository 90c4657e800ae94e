"""A plan of copies refuses every model that it might load otherwise than vLLM's reload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncrl_cli.weights.mapped import Copies

pytestmark = pytest.mark.stack

PUBLISHED = {"first": (2, 3), "second": (4, 3), "bias": (6,)}
"""Checkpoint names and shapes. ``Layer`` fuses the two matrices, and pads them with two rows of zeros."""
CONFIG: Any = SimpleNamespace(multimodal_config=None)
Load = Callable[["Layer", dict[str, Tensor]], None]


class Layer(nn.Module):
    def __init__(self, load: Load) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 3), torch.nan), requires_grad=False)
        self.bias = nn.Parameter(torch.full((6,), torch.nan, dtype=torch.bfloat16), requires_grad=False)
        self._load = load

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._load(self, dict(tensors))


def load(layer: Layer, tensors: dict[str, Tensor]) -> None:
    layer.weight.data[:2].copy_(tensors["first"])
    layer.weight.data.narrow(0, 2, 4).copy_(tensors["second"])
    layer.weight[6:].data.fill_(0)
    layer.bias.data.copy_(tensors["bias"])


def doubled(layer: Layer, tensors: dict[str, Tensor]) -> None:
    load(layer, tensors | {"bias": tensors["bias"] * 2})


def by_value(layer: Layer, tensors: dict[str, Tensor]) -> None:
    load(layer, tensors)
    layer.bias.data.fill_(tensors["bias"][0].item())


def twice(layer: Layer, tensors: dict[str, Tensor]) -> None:
    load(layer, tensors)
    layer.bias.data[:1].copy_(tensors["bias"][:1])


def without_padding(layer: Layer, tensors: dict[str, Tensor]) -> None:
    layer.weight.data[:2].copy_(tensors["first"])
    layer.weight.data[2:6].copy_(tensors["second"])
    layer.bias.data.copy_(tensors["bias"])


def without_bias(layer: Layer, tensors: dict[str, Tensor]) -> None:
    layer.weight.data[:2].copy_(tensors["first"])
    layer.weight.data[2:6].copy_(tensors["second"])
    layer.weight.data[6:].fill_(0)


def by_columns(layer: Layer, tensors: dict[str, Tensor]) -> None:
    load(layer, tensors)
    layer.weight.data[:2, :1].copy_(tensors["first"][:, :1])


def elsewhere(layer: Layer, tensors: dict[str, Tensor]) -> None:
    load(layer, tensors)
    layer.__dict__["transposed"][:].copy_(tensors["second"])


def of_another_tensor(layer: Layer, tensors: dict[str, Tensor]) -> None:
    load(layer, tensors | {"bias": layer.__dict__["transposed"].view(-1)[:6]})


def broken(layer: Layer, tensors: dict[str, Tensor]) -> None:
    layer.bias.data.copy_(tensors["first"].view(6)[:5])


def version(version_number: int) -> tuple[torch.UntypedStorage, dict[str, Tensor]]:
    """The memory of a version, in which every element has another number, and its tensors."""
    memory = torch.arange(24, dtype=torch.float32) + 100 * version_number
    starts = {"first": 0, "second": 6, "bias": 18}
    return memory.untyped_storage(), {
        name: memory[start:].view(-1)[: torch.Size(PUBLISHED[name]).numel()].view(PUBLISHED[name])
        for name, start in starts.items()
    }


def test_copies_by_plan_equal_the_loaders_copies() -> None:
    """The plan is recorded from one version and used for another, in other memory."""
    from asyncrl_cli.weights.copy_plan import CopyPlan

    copied_layer, loaded_layer = Layer(load), Layer(load)
    memory, tensors = version(1)
    plan = CopyPlan(copied_layer, CONFIG, memory, tensors.items())
    assert bool(copied_layer.weight.isnan().all()), "nothing is written while it is recorded"
    assert not plan.agrees(plan.sources(memory))
    copied_layer.load_weights(tensors.items())
    assert plan.agrees(plan.sources(memory))
    memory, tensors = version(2)
    assert not plan.agrees(plan.sources(memory))
    plan.copy(plan.sources(memory), Copies().loads())
    loaded_layer.load_weights(tensors.items())
    for name, parameter in loaded_layer.named_parameters():
        assert torch.equal(copied_layer.get_parameter(name), parameter)
    assert plan.agrees(plan.sources(memory))
    copied_layer.bias.data = copied_layer.bias.data.clone()
    assert not plan.agrees(plan.sources(memory)), "the model computes with other memory"


@pytest.mark.parametrize(
    ("wrong_load", "reason"),
    [
        (doubled, "calls aten.mul"),
        (by_value, "calls aten._local_scalar_dense"),
        (twice, "two weights are loaded into the same elements"),
        (without_padding, "72 of the 96 bytes of weight"),
        (without_bias, "no weights come for bias"),
        (by_columns, "scattered"),
        (elsewhere, "not the model's"),
        (of_another_tensor, "calls aten.copy_"),
        (broken, "calls aten.copy_"),
    ],
)
def test_a_plan_refuses_loaders_that_do_more_than_copy_each_element_once(wrong_load: Load, reason: str) -> None:
    from asyncrl_cli.weights.copy_plan import CopyPlan, NoCopyPlan

    layer = Layer(wrong_load)
    layer.__dict__["transposed"] = torch.zeros(4, 3)
    memory, tensors = version(1)
    with pytest.raises(NoCopyPlan, match=reason):
        CopyPlan(layer, CONFIG, memory, tensors.items())
    assert bool(layer.weight.isnan().all())
