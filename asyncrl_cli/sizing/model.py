"""A model's sizes for a memory estimate, from its config: the model is built on torch's meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asyncrl_cli.rollout.engine_settings import cache_bytes_per_token
from asyncrl_cli.sizing.config import saved_config
from asyncrl_cli.sizing.memory_use import NUMBER_BYTES
from asyncrl_cli.spec.inputs import ModelSpec
from asyncrl_cli.spec.sections import ExperimentSpec, shares_prefixes

REFERENCE = "algorithm.reference_path"


ActivationBytes = Callable[[int, int, int, bool], int]
"""Takes rows, length, positions and recompute (``TracedMicrobatch``); returns a micro-batch's peak bytes, without
weights and gradients."""


@dataclass(frozen=True, slots=True)
class SizedModel:
    """Numbers in a model's weights. A tied weight counts once."""

    name: str  # the model's class in transformers
    parameters: int  # all weights, with adapters
    trained: int  # the trained weights: all, or the adapters
    embeddings: int  # the input embeddings
    layers: tuple[int, ...]  # each transformer layer, in order
    experts: tuple[int, ...]  # each layer's experts, which `trainer.expert_parallel` divides among ranks
    head: int  # the output head; 0 if it is tied to the embeddings
    cache_numbers: int | None  # a token's keys and values in all layers; None if the config does not tell
    kv_heads: int  # key-value heads, which tensor parallelism divides
    hidden: int  # width of the residual stream
    vocabulary: int  # rows of the output head
    activations: ActivationBytes
    teacher: int = 0  # all weights of the model in `algorithm.reference_path`; 0 without it
    routed: int = 0  # bytes of a token's experts in all layers, which `algorithm.router_replay` records


def size_model(spec: ExperimentSpec, config: Any) -> SizedModel:
    """Size a spec's model from its transformers config, with the spec's adapters; weights are neither read nor made.

    Raises transformers' error for a config that it cannot build, and ``ConfigError`` for impossible adapters and like
    ``sized``.
    """
    model = without_weights(config, spec.model)
    if spec.model.lora is not None:
        from asyncrl_cli.train.model.lora import add_adapters

        add_adapters(model, spec.model.lora, seed=0)
    return sized(spec, config, model)


def without_weights(config: Any, settings: ModelSpec) -> Any:
    """Build a config's model on torch's meta device, frozen as in ``settings``. Raises transformers' error if it cannot
    be built."""
    import torch

    from asyncrl_cli.train.model.images import freeze
    from asyncrl_cli.train.model.saving import model_class

    with torch.device("meta"):
        model = model_class(settings.max_images > 0).from_config(config, attn_implementation="eager")
    freeze(model, settings)
    return model


def sized(spec: ExperimentSpec, config: Any, model: Any) -> SizedModel:
    """Size ``model``, which is on torch's meta device and has the spec's adapters.

    Raises ``ConfigError`` when ``trainer.sequence_parallel`` ranks cannot divide its sequences, when
    ``trainer.expert_parallel`` ranks cannot divide its experts, or without a config in ``algorithm.reference_path``.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    from asyncrl_cli.train.model.expert_parallel import check_experts
    from asyncrl_cli.train.model.sequence_parallel import check_config

    weights = list(model.parameters())  # has a tied weight once
    language = getattr(model.base_model, "language_model", model)  # without a vision tower
    layers = [module for module in language.modules() if isinstance(module, GradientCheckpointingLayer)]
    layer_shapes = [tuple(tuple(weight.shape) for weight in layer.parameters()) for layer in layers]
    embedded, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    text = config.get_text_config()

    @lru_cache(maxsize=16)
    def activations(rows: int, length: int, positions: int, recompute: bool) -> int:
        from asyncrl_cli.sizing.activations import TracedMicrobatch, activation_bytes
        from asyncrl_cli.train.model.chunked_logprobs import GPU_CHUNK_NUMBERS

        trainer = spec.trainer
        settings = TracedMicrobatch(
            rows=rows,
            length=length,
            positions=positions,
            recompute=recompute,
            dtype=trainer.dtype,
            attention=trainer.attention,
            chunk=GPU_CHUNK_NUMBERS if trainer.gpus_per_rank else None,
            lora=spec.model.lora,
            masked=shares_prefixes(spec) and trainer.attention == "sdpa",
            images=spec.model.max_images > 0,
        )
        return activation_bytes(config, layer_shapes, settings)

    heads: Any = getattr(text, "num_attention_heads", 1)
    kv_heads: Any = getattr(text, "num_key_value_heads", None) or heads
    experts_per_token: Any = getattr(text, "num_experts_per_tok", None) or 0
    experts: Any = getattr(text, "num_experts", None) or getattr(text, "n_routed_experts", None) or 0
    check_config(config, spec.trainer.sequence_parallel)
    check_experts(config, spec.trainer)
    path, teacher = spec.algorithm.reference_path, 0
    if path is not None:
        teacher = sum(
            tensor.numel() for tensor in without_weights(saved_config(path, REFERENCE), spec.model).parameters()
        )
    return SizedModel(
        name=type(model).__name__,
        parameters=sum(weight.numel() for weight in weights),
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        embeddings=embedded.numel(),
        layers=tuple(sum(weight.numel() for weight in layer.parameters()) for layer in layers),
        experts=tuple(
            sum(weight.numel() for name, weight in layer.named_parameters() if ".experts." in name) for layer in layers
        ),
        head=0 if head is embedded else head.numel(),
        cache_numbers=cache_bytes_per_token(spec, text) // NUMBER_BYTES[spec.rollout.dtype] or None,
        kv_heads=int(kv_heads),
        hidden=int(embedded.shape[1]),
        vocabulary=int(head.shape[0]),
        activations=activations,
        teacher=teacher,
        routed=len(layers) * int(experts_per_token) * (2 if experts > 256 else 1),
    )
