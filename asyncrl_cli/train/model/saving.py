"""Saves a model as a Hugging Face directory, with files of the model that it was made from.

Invariant: ``generation_config.json`` is copied byte for byte. It names the tokens that end a reply; and transformers
loads, but does not save, one with settings that contradict each other, which some models on the hub have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.weights.layout import TensorSlot

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl_cli.train.model.lora import PlainWeight

GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
"""Of weights in one file, at most. One tensor may be larger."""


def save_model(model: Any, source: str | Path, folder: str | Path, **options: Any) -> None:
    """Write weights, config and generation config of a transformers model to ``folder``.

    ``source``: the folder, or the hub id, of the model that it was made from; it may be ``folder``. ``options`` go
    to ``save_pretrained``.
    """
    from transformers import GenerationConfig

    from asyncrl_cli.train.model.tokenizer import without_progress_bars

    kept = generation_config_file(source)
    text = None if kept is None else kept.read_bytes()
    if text is not None:
        model.generation_config = GenerationConfig()
    with without_progress_bars():
        model.save_pretrained(folder, **options)
    if text is not None:
        (Path(folder) / GENERATION_CONFIG).write_bytes(text)


def save_while_gathered(
    model: Any, source: str | Path, folder: str | Path, slots: Iterable[TensorSlot], weights: Iterable[PlainWeight]
) -> None:
    """Write what ``save_model`` writes, with two files of weights and one layer in memory at most.

    ``weights`` are those of ``model``, each complete until the next is taken (``full_weights``); ``slots`` are those of
    ``engine_layout``, which has their names in a checkpoint.
    """
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    from asyncrl_cli.train.model.lora import plain_weights

    folder = Path(folder)
    save_model(model, source, folder, state_dict={})
    for old in folder.glob("model*.safetensors*"):  # one old file of all weights would be read first
        old.unlink()
    left_out = model._keys_to_ignore_on_save or ()
    saved = {slot.name: slot for slot in slots if slot.name not in left_out}
    dtypes = {weight.name: weight.parameter.dtype for weight in plain_weights(model)}
    sizes = {
        part.name: torch.empty(part.shape, dtype=dtypes[slot.name], device="meta")
        for slot in saved.values()
        for part in slot.parts or (slot,)
    }
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=FILE_BYTES)
    begun: dict[str, dict[str, Tensor]] = {file: {} for file in plan.filename_to_tensors}
    for weight in weights:
        if (found := saved.get(weight.name)) is None:
            continue
        full = weight.merged().reshape(-1)
        for part in found.parts or (found,):
            start, file = (part.offset - found.offset) // found.itemsize, plan.tensor_to_filename[part.name]
            tensor = full[start : start + part.numel].view(part.shape)
            begun[file][part.name] = tensor.to("cpu", dtypes[weight.name], copy=True)
            if len(begun[file]) == len(plan.filename_to_tensors[file]):
                save_file(begun.pop(file), folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def copy_generation_config(source: str | Path, folder: Path) -> None:
    """Copy a model's generation config, if it has one; ``source`` as in ``save_model``."""
    if (kept := generation_config_file(source)) is not None:
        shutil.copyfile(kept, folder / GENERATION_CONFIG)


def generation_config_file(source: str | Path) -> Path | None:
    """The generation config of a model's folder or hub id; None if it has none."""
    from transformers.utils import cached_file

    found = cached_file(
        str(source),
        GENERATION_CONFIG,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
