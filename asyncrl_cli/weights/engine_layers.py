"""The layers of an engine's model: which ones must get weights in a reload, and which ones got none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention, MMEncoderAttention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


def layers_are_plain(model: nn.Module) -> bool:
    """True if vLLM computes nothing else from a layer's weights."""
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
