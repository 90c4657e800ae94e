"""A model's weights, with and without low-rank adapters, whole and sharded.

Adapters (LoRA, arXiv 2106.09685): W + (alpha / rank) · B A, where A and B are trained. B starts at 0, so the policy
starts as the model. Saved models and exports get merged weights under the names of the model without adapters
(``plain_weights``, which does not change the trainer's weights). So do engines, unless they apply the adapters
themselves (``adapter_matrices``, decision 0053). Under ZeRO-3 weights are sharded over the ranks; ``gathered`` makes
them whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.train.model.expert_parallel import RoutedExperts, divided_layers, own_names

ADAPTER = "default"
"""The adapter's name in peft."""

PEFT = "base_model.model."
"""Prefix of layer names in adapters saved by peft."""

BASE = "base_layer"
"""Peft's name for the layer inside an adapted one."""

MATRICES = ("lora_A", "lora_B")
"""Peft's names for an adapter's two matrices."""

INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integer types by their size in bytes."""


class LoraError(ConfigError):
    """Adapters that the model cannot have."""

    def __init__(self, message: str, hint: str = "name linear layers of the model, or use all-linear") -> None:
        super().__init__(message, location="model.lora.target_modules", hint=hint)


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeight:
    """One weight of the model without adapters: a parameter, or a buffer that is in checkpoints."""

    name: str  # in the model without adapters
    parameter: Tensor  # the trainer's, without an adapter's addition
    adapter: Any | None  # the adapted layer; None without an adapter
    experts: RoutedExperts | None = None  # the full weight if ranks divide its experts; ``parameter`` is a part of it

    @property
    def shape(self) -> tuple[int, ...]:
        """The full weight's shape, even if this rank has only a part of it."""
        return full_shape(self.parameter) if self.experts is None else self.experts.shape

    @property
    def adapter_parts(self) -> list[Tensor]:
        """Parameters to gather for ``delta``."""
        if self.adapter is None:
            return []
        adapter = (module for name, module in self.adapter.named_children() if name != BASE)
        return [parameter for module in adapter for parameter in module.parameters()]

    @property
    def parameters_to_merge(self) -> list[Tensor]:
        """Parameters to gather for ``merged``."""
        return [] if self.experts is not None else [self.parameter, *self.adapter_parts]

    def delta(self) -> Tensor:
        """Return the adapter's addition to the weight: float32, in the weight's shape."""
        assert self.adapter is not None
        delta: Tensor = self.adapter.get_delta_weight(ADAPTER).detach().float()
        return delta

    def merged(self) -> Tensor:
        """Return the merged weight, detached; with an adapter a new tensor, in float32."""
        if self.adapter is None:
            return self.parameter.detach()
        return self.parameter.detach().float() + self.delta()


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the full parameter's shape, even if ZeRO-3 keeps only a shard of it here."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def add_adapters(model: Any, lora: LoraSpec, seed: int) -> None:
    """Freeze a transformers model, and add adapters to its layers in place.

    Does not change the process's random state. Raises ``ConfigError`` without peft, and ``LoraError`` if
    ``target_modules`` names a missing layer, the embeddings or the output head.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        hint = "pip install 'asyncrl[lora]'"
        raise ConfigError(f"needs peft: {error}", location="model.lora", hint=hint) from error
    embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    # Hides the model's config: guided by it, peft would adapt a model's experts and router instead of linear layers.
    holder = nn.Module()
    holder.model = model
    targets = [f"model.{name}" for name in _targets(model, lora)]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, holder, ADAPTER)
        except ValueError as error:
            raise LoraError(" ".join(str(error).split())) from error
    if embeddings != (model.get_input_embeddings(), model.get_output_embeddings()):
        raise LoraError("the embeddings and the output head can have no adapter", "leave them out, or use all-linear")
    # The first layer's input must require a gradient, too: its backward pass tells ZeRO-3 that the layer is done.
    model.enable_input_require_grads()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the block, the model computes as without adapters."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def plain_weights(model: nn.Module) -> list[PlainWeight]:
    """Return all weights of a model, which may have adapters, by their names without adapters.

    They include persistent buffers, such as DeepSeek-V3's router correction: without it an engine would choose other
    experts than the trainer.
    """
    layers, divided = adapted_layers(model), divided_layers(model)
    weights = []
    persistent = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
    for name, parameter in (*model.named_parameters(), *buffers):
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(f".{BASE}"):
            owner = owner.removesuffix(f".{BASE}")
            weights.append(PlainWeight(f"{owner}.{leaf}", parameter, layers[owner] if leaf == "weight" else None))
        elif not any(owner.startswith(f"{adapted}.") for adapted in layers):
            weights += [
                PlainWeight(name_in_model, parameter=parameter, adapter=None, experts=experts)
                for name_in_model, experts in own_names(divided, name)
            ]
    return weights


def adapter_matrices(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the trained matrices: the adapted weight's name, ``lora_A`` ([rank, inputs]) or ``lora_B`` ([outputs,
    rank]), and the parameter."""
    for weight in plain_weights(model):
        if weight.adapter is not None:
            for matrix_kind in MATRICES:
                yield weight.name, matrix_kind, getattr(weight.adapter, matrix_kind)[ADAPTER].weight


def base_bits(model: nn.Module) -> list[int]:
    """Return a sum over the bits of each frozen weight, in this rank's part of it."""
    local_weights = [
        getattr(weight, "ds_tensor", weight).detach() for weight in model.parameters() if not weight.requires_grad
    ]
    return [int(bits.contiguous().view(INTEGERS[bits.element_size()]).sum(dtype=torch.int64)) for bits in local_weights]


def merge(model: Any, lora: LoraSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return merged weights by their plain names, from the state of a model with adapters.

    ``model``: a transformers model on the meta device, to which the adapters are added. Raises like ``add_adapters``.
    """
    untouched = {name: state[name] for name in model.state_dict() if name in state}
    add_adapters(model, lora, seed=0)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return untouched | {weight.name: weight.merged() for weight in plain_weights(model)}


def _targets(model: Any, lora: LoraSpec) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    layers = dict(model.named_modules())
    if (language := getattr(model.base_model, "language_model", None)) is not None:  # without the vision tower
        language_layers = {id(layer) for layer in language.modules()}
        layers = {name: layer for name, layer in layers.items() if id(layer) in language_layers}
    target_names = lora.target_modules
    if isinstance(target_names, str):
        head = model.get_output_embeddings()
        return [name for name, layer in layers.items() if isinstance(layer, nn.Linear | Conv1D) and layer is not head]
    layers_by_name = {name: [layer for layer in layers if f".{layer}".endswith(f".{name}")] for name in target_names}
    if missing_names := [name for name in target_names if not layers_by_name[name]]:
        raise LoraError(f"the model has no layer {', '.join(missing_names)}")
    return sorted({layer for of_name in layers_by_name.values() for layer in of_name})


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, BASE)}


LAYER = re.compile(r".*?\.\d+\.")
"""Beginning of a weight's name up to its layer's number, such as `model.layers.3.`"""


@contextmanager
def gathered(parameters: list[Tensor], zero_stage: int, writer: int | None = None) -> Iterator[None]:
    """Inside the block, parameters are full; collective under ZeRO-3. If rank ``writer`` changes them, all ranks have
    its values after the block."""
    if zero_stage < 3 or not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=writer):
        yield


def full_weights(model: nn.Module, zero_stage: int) -> Iterator[PlainWeight]:
    """Yield a model's weights, each complete until the next one is taken. Collective: all ranks iterate to the end."""
    for layer in by_layer(plain_weights(model)):
        with (
            gathered([parameter for weight in layer for parameter in weight.parameters_to_merge], zero_stage),
            torch.no_grad(),
        ):
            for weight in layer:
                yield weight if weight.experts is None else PlainWeight(weight.name, weight.experts.gathered(), None)


def by_layer(weights: Iterable[PlainWeight]) -> Iterator[list[PlainWeight]]:
    """Group weights, in their order: a transformer layer's weights together, to gather them at once, others alone."""
    for _, layer in groupby(weights, lambda weight: (LAYER.match(weight.name) or [weight.name])[0]):
        yield list(layer)
