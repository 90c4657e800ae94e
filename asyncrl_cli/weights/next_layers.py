"""On CPU: makes the next version's layers while the engine generates with the current ones.

vLLM's CPU kernels need weights that oneDNN has packed, and packing takes several times as long as a copy. On CPU no
compiled graph refers to a layer's tensors. So a version can be loaded and packed into separate layers, and the pause
only exchanges tensors. Until then the model needs its memory twice (decision 0052).

Invariant: nothing that the model computes with changes before ``install``.
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
"""A layer's attribute with the kernel of its packed weight."""
COPIED_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes that a copied module does not share with the original."""


def layers_are_plain(model: nn.Module) -> bool:
    """True if vLLM computes nothing from a layer's weights except their packed form on CPU."""
    return all(map(_is_plain, model.modules()))


def _is_plain(layer: nn.Module) -> bool:
    if layer._parameters and layer._buffers:
        return False
    if is_deferred_attention_layer(layer):
        # Other attention types compute weights from other layers' weights. Some kernels convert sinks into a copy.
        has_sinks = getattr(getattr(layer, "impl", None), "sinks", None) is not None
        return type(layer) in (Attention, MMEncoderAttention) and not has_sinks
    method = type(getattr(layer, "quant_method", None))
    return method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))


class NextLayers:
    """Layers of ``model`` with another version's tensors. They share everything else with the model."""

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, model_config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Load and pack ``tensors`` (by checkpoint name), which are not needed afterwards. Any thread may call this.

        Raises ``RuntimeError`` if a layer gets no tensor.
        """
        copies: dict[nn.Module, nn.Module] = {}
        copy = _copy(model, copies)
        owners: dict[nn.Parameter, nn.Module] = {}
        self._layers: list[tuple[nn.Module, nn.Module]] = []
        tied: list[tuple[nn.Module, nn.Module]] = []
        for layer in copies:
            parameters = list(layer.parameters(recurse=False))
            if parameters and parameters[0] in owners:
                tied.append((layer, owners[parameters[0]]))
            elif parameters:
                owners |= dict.fromkeys(parameters, layer)
                self._layers.append((layer, copies[layer]))
                _await_weights(layer, copies[layer])
        copy.load_weights(tensors)  # type: ignore[operator]
        refuse_missing(copies[layer] for layer in with_own_weights(model, model_config))
        self._layers = [(layer, next_layer) for layer, next_layer in self._layers if not _has_nothing(next_layer)]
        finalize_layerwise_processing(copy, model_config)
        for layer, owner in tied:  # such as an output layer tied to the embedding: it has the same kernel
            if hasattr(layer, PACKED):
                setattr(copies[layer], PACKED, getattr(copies[owner], PACKED))
                self._layers.append((layer, copies[layer]))

    def install(self) -> None:
        """Exchange tensors and kernels with the model. Call it while the model computes nothing."""
        for layer, next_layer in self._layers:
            for name, parameter in layer.named_parameters(recurse=False):
                next_parameter = next_layer.get_parameter(name)
                if next_parameter is not parameter:  # a tied layer has its owner's parameter
                    parameter.data, next_parameter.data = next_parameter.data, parameter.data
            for name in next_layer.__dict__.keys() - COPIED_ATTRIBUTES:  # the kernel from the packing
                kernel = next_layer.__dict__[name]
                if kernel is not layer.__dict__.get(name):
                    next_layer.__dict__[name] = layer.__dict__.get(name)
                    layer.__dict__[name] = kernel

    def clear(self) -> None:
        """Free these tensors, which after ``install`` are the model's previous ones. Call it after the pause: it takes
        a while. The garbage collector would be too late, because layers and their parameters' loaders form cycles."""
        for _, next_layer in self._layers:
            next_layer._parameters.clear()
            for name in next_layer.__dict__.keys() - COPIED_ATTRIBUTES:
                del next_layer.__dict__[name]


def _copy(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a module and all modules in it, with new dictionaries. ``copies``: the copies by original."""
    if module not in copies:
        copies[module] = copy = object.__new__(type(module))
        copy.__dict__ = dict(module.__dict__)
        for name in COPIED_ATTRIBUTES:
            copy.__dict__[name] = module.__dict__[name].copy()
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else _copy(child, copies)
    return copies[module]


def _await_weights(layer: nn.Module, copy: nn.Module) -> None:
    """Prepare the copy for vLLM's layerwise reload: it collects all its weights, and then processes them together."""
    recorded, info = get_layerwise_info(layer), get_layerwise_info(copy)
    info.restore_device = recorded.restore_device
    parameters, _ = recorded.restore_metadata  # layers with parameters have no buffers (``_is_plain``)
    # Copies, because vLLM binds the loaders in the metadata to the layer that it restores.
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
    info.restore_metadata = {}, {}  # it now refers to the copy, which would never be freed
    initialize_online_processing(copy)


def refuse_missing(layers: Iterable[nn.Module]) -> None:
    """Raise ``RuntimeError`` if a layer got no weights: vLLM would only log a warning and keep its previous ones."""
    if layer_types := {type(layer).__name__ for layer in layers if _has_nothing(layer)}:
        raise RuntimeError(f"no weights came for layers of these types: {', '.join(sorted(layer_types))}")


def expect_nothing_more(model: nn.Module) -> None:
    """Have vLLM keep the tensors of layers that got none (rotary tables, a tied head) without a warning."""
    for layer in filter(_has_nothing, model.modules()):
        get_layerwise_info(layer).load_numel_total = 0


def _has_nothing(layer: nn.Module) -> bool:
    info = get_layerwise_info(layer)
    return bool(info.can_load() and info.load_numel_total and info.load_numel == 0)


def language_model(model: Any) -> Any:
    """The part of a model that generates text: the model itself, unless it also has a vision model."""
    return getattr(model, "get_language_model", lambda: model)()


def with_own_weights(model: nn.Module, model_config: ModelConfig) -> list[nn.Module]:
    """The layers that must get weights: all layers with parameters, tied ones once.

    A vision model counts only if it gets images: otherwise the trainer may not have it.
    """
    settings = model_config.multimodal_config
    seeing = settings is not None and settings.get_limit_per_prompt("image") > 0
    owners: dict[nn.Parameter, nn.Module] = {}
    for layer in (model if seeing else language_model(model)).modules():
        if not is_deferred_attention_layer(layer):  # its scales of the KV cache are missing in most checkpoints
            for parameter in layer.parameters(recurse=False):
                owners.setdefault(parameter, layer)
    return list(dict.fromkeys(owners.values()))
