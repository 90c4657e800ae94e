"""Writes models as Hugging Face directories: a trainer's, or a checkpoint's without Ray and trainer.

Invariant: ``generation_config.json`` is copied byte for byte. It names the tokens that end a reply. Some models on the
hub have contradictory settings in it, which transformers loads but refuses to save.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.files import atomic_folder
from asyncrl_cli.runs.checkpoints import STATE, Checkpoint
from asyncrl_cli.spec.inputs import LoraSpec
from asyncrl_cli.train.checkpoints import reading_tensors
from asyncrl_cli.weights.layout import TensorSlot

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asyncrl_cli.train.model.lora import PlainWeight

GENERATION_CONFIG = "generation_config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Processor files of models with images, in all versions of transformers."""
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
"""Largest size of a file of weights. A single tensor may be larger."""


def model_class(images: bool) -> Any:
    """Return the transformers class that loads or builds a language model, or one that also sees images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def save_model(model: Any, source: str | Path, folder: str | Path, **options: Any) -> None:
    """Write weights, config, generation config and processor of a transformers model to ``folder``.

    ``source``: folder or hub id of the model that it was made from; may be ``folder``. ``options`` are passed to
    ``save_pretrained``.
    """
    from transformers import GenerationConfig

    from asyncrl_cli.data.tokenizer import without_progress_bars

    generation_config = _saved_file(source, GENERATION_CONFIG)
    text = None if generation_config is None else generation_config.read_bytes()
    if text is not None:
        model.generation_config = GenerationConfig()
    with without_progress_bars():
        model.save_pretrained(folder, **options)
    if text is not None:
        (Path(folder) / GENERATION_CONFIG).write_bytes(text)
    copy_processor(source, Path(folder))


def save_while_gathered(
    model: Any, source: str | Path, folder: str | Path, slots: Iterable[TensorSlot], weights: Iterable[PlainWeight]
) -> None:
    """Write the same as ``save_model``, with at most two files of weights and one layer in memory.

    ``weights``: the weights of ``model``, each complete until the next one is taken (``full_weights``). ``slots``: from
    ``engine_layout``, with the weights' names in a checkpoint.
    """
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    from asyncrl_cli.train.model.lora import plain_weights

    folder = Path(folder)
    save_model(model, source, folder, state_dict={})
    for old_file in folder.glob("model*.safetensors*"):  # a loader would prefer an old file with all weights
        old_file.unlink()
    left_out = model._keys_to_ignore_on_save or ()
    saved = {slot.name: slot for slot in slots if slot.name not in left_out}
    dtypes = {weight.name: weight.parameter.dtype for weight in plain_weights(model)}
    sizes = {
        tensor_slot.name: torch.empty(tensor_slot.shape, dtype=dtypes[slot.name], device="meta")
        for slot in saved.values()
        for tensor_slot in slot.parts or (slot,)
    }
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=FILE_BYTES)
    unfinished_files: dict[str, dict[str, Tensor]] = {file: {} for file in plan.filename_to_tensors}
    for weight in weights:
        if (weight_slot := saved.get(weight.name)) is None:
            continue
        full = weight.merged().reshape(-1)
        for tensor_slot in weight_slot.parts or (weight_slot,):
            start = (tensor_slot.offset - weight_slot.offset) // weight_slot.itemsize
            file = plan.tensor_to_filename[tensor_slot.name]
            tensor = full[start : start + tensor_slot.numel].view(tensor_slot.shape)
            unfinished_files[file][tensor_slot.name] = tensor.to("cpu", dtypes[weight.name], copy=True)
            if len(unfinished_files[file]) == len(plan.filename_to_tensors[file]):
                save_file(unfinished_files.pop(file), folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def copy_generation_config(source: str | Path, folder: Path) -> None:
    """Copy a model's generation config, if it has one; ``source``: as in ``save_model``."""
    if (file := _saved_file(source, GENERATION_CONFIG)) is not None:
        shutil.copyfile(file, folder / GENERATION_CONFIG)


def copy_processor(source: str | Path, folder: Path) -> None:
    """Copy the files of a model's image processor, if it has one; ``source``: as in ``save_model``."""
    for name in PROCESSOR_FILES:
        if (file := _saved_file(source, name)) is not None and file.parent != folder:
            shutil.copyfile(file, folder / name)


def _saved_file(source: str | Path, name: str) -> Path | None:
    from transformers.utils import cached_file

    path = cached_file(
        str(source), name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if path is None else Path(path)


PREFIX = "model."
"""Prefix of the model's weights in a ``Policy``."""


def consolidate(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return full weights by their names in the model, from any ZeRO stage and any number of ranks.

    They are the optimizer's float32 weights, except for ZeRO 0 in bfloat16, which saves only the rounded weights. With
    a ``dtype`` they are rounded one by one, so a ZeRO-3 model is never whole in float32. Raises ``RunError`` when the
    shards cannot be read.
    """
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with reading_tensors(checkpoint.folder):
            state = _saved(checkpoint)
        # By identity: tied weights are one object with two names.
        full_weights = {id(tensor): tensor.contiguous().to(dtype or torch.float32) for tensor in state.values()}
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise RunError(
            f"the weights cannot be read: {type(error).__name__}: {error}",
            location=str(checkpoint.folder),
            hint="check the checkpoint with `asyncrl checkpoint verify`",
        ) from error
    return {name.removeprefix(PREFIX): full_weights[id(tensor)] for name, tensor in state.items()}


def export_model(
    checkpoint: Checkpoint, model_stub: str, folder: Path, lora: LoraSpec | None, images: bool = False
) -> None:
    """Write a directory for transformers and vLLM: weights in the dtype of training, and the tokenizer.

    ``model_stub``: a folder or hub id with the model's config and tokenizer. ``lora``: the adapters of the training,
    which are merged. ``images``: the model sees images. ``folder`` appears complete or not at all. Raises ``RunError``
    when it exists and is not empty.
    """
    from transformers import AutoTokenizer

    check_target(folder)
    folder = folder.resolve()  # writes to a link's target, and keeps the link
    try:
        with atomic_folder(folder) as unfinished:
            model = _whole_model(checkpoint, model_stub, lora, model_class(images))
            save_model(model, model_stub, unfinished, max_shard_size=FILE_BYTES)
            AutoTokenizer.from_pretrained(model_stub, trust_remote_code=False).save_pretrained(unfinished)
    except OSError as error:
        raise RunError(
            f"the model cannot be written: {error.strerror or error}",
            location=str(folder),
            hint="name another folder with --to",
        ) from None


def _whole_model(checkpoint: Checkpoint, model_stub: str, lora: LoraSpec | None, built: Any) -> Any:
    import torch
    from transformers import AutoConfig

    from asyncrl_cli.train.model.lora import merge

    dtype = getattr(torch, checkpoint.trainer().dtype)
    weights = consolidate(checkpoint, dtype if lora is None else torch.float32)
    config = AutoConfig.from_pretrained(model_stub, trust_remote_code=False)
    with torch.device("meta"):
        model = built.from_config(config, dtype=dtype)
        if lora is not None:
            weights = merge(built.from_config(config), lora, weights)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    model.tie_weights()
    return model


def check_target(folder: Path) -> None:
    """Raise ``RunError`` when a model cannot be written there: it is a file, or a folder that is not empty."""
    if folder.exists() and not folder.is_dir():
        raise RunError("a file with this name exists", location=str(folder), hint="name a folder with --to")
    if folder.exists() and any(folder.iterdir()):
        raise RunError("the folder is not empty", location=str(folder), hint="name another folder with --to")


def _saved(checkpoint: Checkpoint) -> dict[str, Tensor]:
    import torch

    from asyncrl_cli.train.model.expert_parallel import undivided

    saved = checkpoint.trainer()
    if saved.expert_parallel > 1:
        return undivided(checkpoint.folder / STATE, saved)
    unsharded: dict[str, Tensor] = {}
    if saved.zero_stage < 2:  # stage 1's shards lack frozen weights
        (path,) = (checkpoint.folder / STATE).glob("*_model_states.pt")
        unsharded = torch.load(path, map_location="cpu")["module"]
    if saved.zero_stage == 0:
        return unsharded
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        # Lazy: for ZeRO 3 it returns objects that join a tensor's shards when ``contiguous`` is called.
        state: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint.folder), tag=STATE, lazy_mode=True
        )
    return unsharded | state
