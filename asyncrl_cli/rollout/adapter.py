"""The settings with which vLLM serves an adapter (decision 0057)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.spec.inputs import LoraSpec

ABSORBED = "kv_b_proj"
"""A layer of latent attention, as in DeepSeek-V3. vLLM multiplies its weight into others when it loads a model, and
calls the layer itself without its adapter. It still has a slot for the adapter, so it does not report the layer among
those whose adapters it cannot serve."""


def adapted_names(lora: LoraSpec, model_dir: str) -> list[str]:
    """The last parts of the names of layers that have an adapter, so that vLLM has slots for only these.

    By default it would also have slots for the embeddings and the head, and compute with them. A model's experts have
    no adapter, as they are not linear layers in transformers.
    """
    if lora.target_modules != "all-linear":
        return sorted({name.rpartition(".")[2] for name in lora.target_modules})
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    head = model.get_output_embeddings()
    linear = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def check_adapters(model: Any, layers: Iterable[str], on_gpus: bool) -> None:
    """Raise ``ConfigError`` when vLLM would ignore an adapter, or cannot compute the model where adapters are enabled.

    ``layers`` are the names of those of ``model`` (of transformers) that have an adapter.
    """
    if not on_gpus and any(name.endswith(".experts") for name, _ in model.named_modules()):
        raise ConfigError(
            "with adapters vLLM computes a mixture of experts on GPUs only",
            location="model.lora.serve",
            hint="set it to merged, or use engines on GPUs (rollout.gpus_per_engine)",
        )
    if ignored := next((layer for layer in layers if layer.rpartition(".")[2] == ABSORBED), None):
        raise ConfigError(
            f"vLLM would ignore the adapter of {ignored}: it computes latent attention without calling that layer",
            location="model.lora.serve",
            hint=f"set it to merged, or list the other layers in model.lora.target_modules, without {ABSORBED}",
        )
