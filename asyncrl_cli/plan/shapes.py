"""Reads the numbers that a model's speed follows from out of its config and its sizes."""

from __future__ import annotations

from typing import Any

from asyncrl_cli.plan.data_sheets import NUMBER_BYTES, Shape
from asyncrl_cli.sizing.model import SizedModel


def shape_of(model: SizedModel, config: Any) -> Shape:
    """The shape of a causal language model from its sizes and its transformers config.

    Shared experts count as dense.
    """
    text = config.get_text_config()
    layers = len(model.layers)
    heads = int(getattr(text, "num_attention_heads", 1))
    width = int(getattr(text, "head_dim", None) or model.hidden // heads)
    experts = int(_first(text, "num_experts", "n_routed_experts", "num_local_experts") or 0)
    used = int(_first(text, "num_experts_per_tok", "num_experts_per_token") or 0)
    chosen = used / experts if experts and used else 1.0
    routed = float(sum(model.experts)) if chosen < 1 else 0.0
    # A tied head is a matrix that every token uses; untied input embeddings are looked up.
    looked_up = model.embeddings if model.head else 0
    return Shape(
        parameters=float(model.parameters),
        active=model.parameters - looked_up - routed * (1 - chosen),
        layers=layers,
        attention=heads * width,
        cache_bytes=float(NUMBER_BYTES * (model.cache_numbers or 0)),
        experts=routed,
        chosen=chosen,
    )


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
