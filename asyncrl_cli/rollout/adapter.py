"""The settings with which vLLM serves an adapter (decision 0057)."""

from __future__ import annotations

from typing import Any

from asyncrl_cli.spec.inputs import LoraSpec


def adapted_names(lora: LoraSpec, model_dir: str) -> list[str]:
    """The last parts of the names of layers that have an adapter: vLLM has slots for these alone.

    It would have them for the embeddings and the head as well, and compute with them. A model's experts have no
    adapter, as transformers has no linear layers there.
    """
    if lora.target_modules != "all-linear":
        return list(lora.target_modules)
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    head = model.get_output_embeddings()
    linear = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head)
    return sorted({name.rpartition(".")[2] for name in linear})
