"""Adapters in a folder that peft and vLLM load: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.files import atomic_folder
from asyncrl_cli.runs.checkpoints import Checkpoint
from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.train.model.lora import ADAPTER, PEFT
from asyncrl_cli.train.model.saving import check_target, consolidate

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PATH = "model.lora.path"
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
}
"""Values in peft's config of an adapter that is just two matrices for each layer, with one rank and one alpha."""


def save_adapter(matrices: Mapping[str, Tensor], lora: LoraSpec, base_model: str, folder: Path) -> None:
    """Write an adapter to a folder that exists.

    ``matrices``: by their names in the model with adapters, such as `model.layers.0.mlp.up_proj.lora_A.default.weight`.
    ``base_model``: folder or hub id of the model that they adapt.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    tensors = {f"{PEFT}{_without_adapter(name)}": matrix.cpu().contiguous() for name, matrix in matrices.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        # Full names, because a vision tower may have layers of the same name without adapters.
        target_modules=sorted({name.partition(".lora_")[0] for name in matrices}),
        base_model_name_or_path=base_model,
        task_type="CAUSAL_LM",
        inference_mode=True,
    ).save_pretrained(str(folder))


def export_adapter(checkpoint: Checkpoint, lora: LoraSpec, base_model: str, folder: Path) -> None:
    """Write a checkpoint's adapters, in the dtype of training. ``folder`` appears complete or not at all.

    Raises ``RunError`` when it exists and is not empty.
    """
    check_target(folder)
    weights = consolidate(checkpoint, getattr(torch, checkpoint.trainer().dtype))
    matrices = {name: weight for name, weight in weights.items() if f".{ADAPTER}." in name}
    with atomic_folder(folder.resolve()) as unfinished:
        save_adapter(matrices, lora, base_model, unfinished)


def load_adapter(model: Any, lora: LoraSpec) -> None:
    """Give the adapters of ``model`` (``add_adapters``) the values in ``lora.path``. On the meta device it only checks.

    Raises ``ConfigError`` when the folder has no adapter, or one that differs from the spec's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    assert lora.path is not None
    folder = Path(lora.path)
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        matrices = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        hint = f"name a folder with {CONFIG} and {WEIGHTS}, as peft writes them"
        raise ConfigError(f"{folder} has no adapter: {error}", location=PATH, hint=hint) from error
    for name, plain in PLAIN.items():
        if (value := config.get(name)) not in (plain, None, {}, [], False):
            raise ConfigError(
                f"the adapter has {name} {json.dumps(value)}, which asyncrl does not train",
                location=f"{PATH}: {folder / CONFIG}",
                hint="merge it into its model (peft's merge_and_unload), and name the result in model.path",
            )
    for key, name, current in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if config.get(name) != current:
            message = f"the adapter in {folder} has {key} {config.get(name)}, and the spec {current:g}"
            raise ConfigError(message, location=f"model.lora.{key}", hint=f"set it to {config.get(name)}")
    parameters = {
        f"{PEFT}{_without_adapter(name)}": parameter
        for name, parameter in model.named_parameters()
        if f".{ADAPTER}." in name
    }
    if differing := sorted(parameters.keys() ^ matrices.keys()):
        owner = "the spec's adapters lack" if differing[0] in matrices else "the adapter lacks"
        raise ConfigError(
            f"{owner} {differing[0].removeprefix(PEFT)}",
            location="model.lora.target_modules",
            hint=f"list the layers that {folder / CONFIG} names",
        )
    for name, parameter in parameters.items():
        if parameter.shape != matrices[name].shape:
            raise ConfigError(
                f"{name} has the shape {tuple(matrices[name].shape)}, and the model needs {tuple(parameter.shape)}",
                location=PATH,
                hint="name an adapter of the model in model.path",
            )
        with torch.no_grad():
            parameter.copy_(matrices[name])


def _without_adapter(name: str) -> str:
    return name.replace(f".{ADAPTER}.", ".")
