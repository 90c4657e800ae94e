"""On CPU: the next version's layers, made while the engine generates with the present ones.

vLLM's CPU kernels read weights that oneDNN has packed, and packing takes several times as long as a copy. No compiled
graph holds on to a layer's tensors there, so a version can be loaded and packed into separate layers, and the pause
only exchanges tensors. They need the memory of the model once more until then (decision 0052).

Invariant: before ``install`` nothing that the model computes with is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention, MMEncoderAttention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_TENSORS,
    restore_layer_on_meta,
    sanitize_layer_refs,
    to_meta_tensor,
)

PACKED = "cpu_linear"
"""The attribute of a layer that has the kernel of its packed weight."""
OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes that a copy of a module has for itself."""


def can_be_made(model: nn.Module, device: torch.device) -> bool:
    """Whether all that vLLM computes from a weight of this model is kept on the layer that has the weight."""
    return device.type == "cpu" and all(map(_is_plain, model.modules()))


def _is_plain(layer: nn.Module) -> bool:
    if layer._parameters and layer._buffers:
        return False
    if is_deferred_attention_layer(layer):  # others keep weights that are made from other layers' weights
        return type(layer) in (Attention, MMEncoderAttention)
    method = type(getattr(layer, "quant_method", None))
    return method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))


class NextLayers:
    """Layers of ``model`` with the tensors of another version. They share everything else with the model."""

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Load and pack ``tensors`` (by checkpoint name), which are not used any more afterwards. Any thread may do it.

        Raises ``RuntimeError`` when there is none for some layer.
        """
        copies: dict[nn.Module, nn.Module] = {}
        copy = _copy(model, copies)
        owners: dict[nn.Parameter, nn.Module] = {}
        self._layers: list[tuple[nn.Module, nn.Module]] = []
        tied: list[tuple[nn.Module, nn.Module]] = []
        for layer in copies:
            own = list(layer.parameters(recurse=False))
            if own and own[0] in owners:
                tied.append((layer, owners[own[0]]))
            elif own:
                owners |= dict.fromkeys(own, layer)
                self._layers.append((layer, copies[layer]))
                _await_weights(layer, copies[layer])
        copy.load_weights(tensors)  # type: ignore[operator]
        refuse_missing(copies[layer] for layer in with_own_weights(model, model_config))
        self._layers = [(layer, new) for layer, new in self._layers if not _has_nothing(new)]
        finalize_layerwise_processing(copy, model_config)
        for layer, owner in tied:  # such as an output layer that is the embedding: the kernel is the same as well
            if hasattr(layer, PACKED):
                setattr(copies[layer], PACKED, getattr(copies[owner], PACKED))
                self._layers.append((layer, copies[layer]))

    def install(self) -> None:
        """Exchange tensors and kernels with the model's, while it computes nothing."""
        for layer, new in self._layers:
            for name, parameter in layer.named_parameters(recurse=False):
                other = new.get_parameter(name)
                if other is not parameter:  # of a tied layer it is the owner's
                    parameter.data, other.data = other.data, parameter.data
            for name in new.__dict__.keys() - OWN:  # the kernel, made by processing
                made = new.__dict__[name]
                if made is not layer.__dict__.get(name):
                    new.__dict__[name] = layer.__dict__.get(name)
                    layer.__dict__[name] = made

    def clear(self) -> None:
        """Free what is here, after ``install`` the model's former tensors: after the pause, as it takes a while. The
        garbage collector would come too late: loaders in parameters and their layers refer to each other."""
        for _, new in self._layers:
            new._parameters.clear()
            for name in new.__dict__.keys() - OWN:
                del new.__dict__[name]


def _copy(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a module and all modules in it, with new dictionaries; ``copies`` gets the copies by original."""
    if module not in copies:
        copies[module] = copy = object.__new__(type(module))
        copy.__dict__ = dict(module.__dict__)
        for name in OWN:
            copy.__dict__[name] = module.__dict__[name].copy()
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else _copy(child, copies)
    return copies[module]


def _await_weights(layer: nn.Module, copy: nn.Module) -> None:
    """Have the copy take weights as vLLM's own reload has a layer do: all of them first, then processed together."""
    recorded, info = get_layerwise_info(layer), get_layerwise_info(copy)
    info.restore_device = recorded.restore_device
    parameters, _ = recorded.restore_metadata  # such layers have no buffers (``can_be_made``)
    # Copies, because vLLM binds the loaders in them to the layer that they are restored to.
    info.restore_metadata = (
        {name: sanitize_layer_refs(to_meta_tensor(tensor), layer) for name, tensor in parameters.items()},
        {},
    )
    for name in layer._parameters.keys() & SKIP_TENSORS:  # vLLM loads these in place
        if (parameter := layer._parameters[name]) is not None:
            empty: Any = torch.empty_like(parameter.data)
            empty.__class__ = type(parameter)
            empty.__dict__ = dict(parameter.__dict__)
            copy._parameters[name] = empty
    restore_layer_on_meta(copy, info)
    info.restore_metadata = {}, {}  # refers to the copy now, which would never be freed
    initialize_online_processing(copy)


def refuse_missing(layers: Iterable[nn.Module]) -> None:
    """Raise ``RuntimeError`` when one of these layers, which await weights, got none of them: vLLM would keep the old
    ones, or those that it has made up, with a warning in its log."""
    if missing := {type(layer).__name__ for layer in layers if _has_nothing(layer)}:
        raise RuntimeError(f"no weights came for layers of these types: {', '.join(sorted(missing))}")


def expect_nothing_more(model: nn.Module) -> None:
    """Have vLLM keep the tensors of layers that got none, such as rotary tables and a tied head, without a warning."""
    for layer in filter(_has_nothing, model.modules()):
        get_layerwise_info(layer).load_numel_total = 0


def _has_nothing(layer: nn.Module) -> bool:
    info = get_layerwise_info(layer)
    return bool(info.can_load() and info.load_numel_total and info.load_numel == 0)


def language_model(model: Any) -> Any:
    """The part of a model that generates text: the model itself, unless it has a vision model as well."""
    return getattr(model, "get_language_model", lambda: model)()


def with_own_weights(model: nn.Module, model_config: ModelConfig) -> list[nn.Module]:
    """The layers that must get weights: with parameters that no other layer has.

    Where no image reaches a vision model, it does not count, and the trainer may not have it.
    """
    settings = model_config.multimodal_config
    seeing = settings is not None and settings.get_limit_per_prompt("image") > 0
    owners: dict[nn.Parameter, nn.Module] = {}
    for layer in (model if seeing else language_model(model)).modules():
        if not is_deferred_attention_layer(layer):  # scales of a cache, which most checkpoints do not have
            for parameter in layer.parameters(recurse=False):
                owners.setdefault(parameter, layer)
    return list(dict.fromkeys(owners.values()))
