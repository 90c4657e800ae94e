"""Loads a saved model into ZeRO-3's shards, one weight at a time (decision 0053).

By default ``from_pretrained`` makes every rank read all files of the checkpoint and convert weights that the model has
in another form, such as a layer's experts as one tensor. Here only rank 0 reads, and a host has at most one converted
weight in addition to the shards. transformers still decides which tensors make which weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.train.model.lora import gathered


@contextmanager
def streamed() -> Iterator[None]:
    """Inside the block, ``from_pretrained`` under ZeRO-3 loads safetensors weight by weight; collective.

    It raises ``UserError`` on all ranks if rank 0 cannot read a weight, or if the weight has another shape.
    """
    from transformers import PreTrainedModel

    load_all = PreTrainedModel._load_pretrained_model
    PreTrainedModel._load_pretrained_model = staticmethod(partial(_load, load_all))
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(load_all)


def _load(load_all: Any, model: Any, state_dict: Any, files: list[str] | None, config: Any, *arguments: Any) -> Any:
    """Replaces ``PreTrainedModel._load_pretrained_model``, which is ``load_all``."""
    from transformers.modeling_utils import LoadStateDictInfo

    if state_dict is not None or not files or not all(str(file).endswith(".safetensors") for file in files):
        return load_all(model, state_dict, files, config, *arguments)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    missing_names = set(model.state_dict())
    with ExitStack() as opened:
        # On all ranks: planning marks the conversions that the checkpoint needs, and saving reverts these.
        plan = _plan(model, files=files, mapping=config.weight_mapping or [], opened=opened)
        weights = _converted(model, plan, tensors) if torch.distributed.get_rank() == 0 else None
        for name, value in _announced(weights):
            _fill(tensors[name], value)
            del value  # freed before the next one is read
            missing_names.discard(name)
    model._weight_conversions = [entry for entry in config.weight_mapping or [] if entry.was_used()]
    nothing: dict[str, Any] = {"unexpected_keys": set(), "mismatched_keys": set(), "skipped_pp_keys": set()}
    info = LoadStateDictInfo(missing_keys=missing_names, error_msgs=[], conversion_errors={}, **nothing)
    return info, None


def _plan(model: Any, files: list[str], mapping: list[Any], opened: ExitStack) -> dict[str, Any]:
    """Map weights to the conversions that make them; a conversion of several weights is under the first one's name. No
    tensor is read yet. Follows ``transformers.core_model_loading.convert_and_load_state_dict_in_model``.
    """
    from safetensors import safe_open
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    sources: dict[str, Any] = {}
    for file in files:
        # Read, not mapped: mapped files stay in a process's memory as long as there is room.
        tensors = opened.enter_context(safe_open(file, framework="pt", device="cpu", backend="pread"))
        sources |= {name: partial(tensors.get_tensor, name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
    names, prefix = model.state_dict(), model.base_model_prefix
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    plan: dict[str, Any] = {}
    for source in sorted(sources, key=dot_natural_key):
        target, pattern = rename_source_key(source, renamings, converters, prefix, names)
        if target not in names and source in names:
            target, pattern = rename_source_key(source, [], [], prefix, names)
        if target not in names:
            continue
        if pattern is None:
            conversion, pattern = WeightRenaming(source, target), source
        else:
            conversion = copy.deepcopy(by_pattern[pattern])
        plan.setdefault(target, conversion).add_tensor(target, source, pattern, sources[source])
    return plan


def _converted(model: Any, plan: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Read and convert weights, one conversion at a time; yields names in the model, and values.

    Raises ``ValueError`` for a weight of another shape than the model's.
    """
    from asyncrl_cli.train.model.lora import full_shape

    for target in list(plan):
        values = plan.pop(target).convert(target, model=model, config=model.config)
        for name in list(values):
            value = values.pop(name)
            value = value[0] if isinstance(value, list) else value
            if name not in tensors:
                continue
            if tuple(value.shape) != full_shape(tensors[name]):
                raise ValueError(f"{name} is {list(value.shape)}, but {list(full_shape(tensors[name]))} in the model")
            yield name, value
            del value


def _announced(weights: Iterator[tuple[str, Tensor]] | None) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the names of rank 0's ``weights`` on all ranks, and their values only on rank 0.

    Raises ``UserError`` on all ranks when rank 0 fails: otherwise the others would wait in a collective call.
    """
    while True:
        name, value, failed = None, None, None
        if weights is not None:
            try:
                name, value = next(weights, (None, None))
            except Exception as error:  # from a file, or from a conversion
                failed = f"{type(error).__name__}: {' '.join(str(error).split())}"
        stated: list[Any] = [name, failed]
        torch.distributed.broadcast_object_list(stated, src=0)
        name, failed = stated
        if failed is not None:
            raise UserError(
                f"the weights cannot be loaded: {failed}", hint="check the *.safetensors files in the model's folder"
            )
        if name is None:
            return
        yield name, value


def _fill(target: Tensor, value: Tensor | None) -> None:
    """Write rank 0's ``value`` into a sharded parameter, or into a buffer, which is whole on every rank; collective."""
    with torch.no_grad():
        if isinstance(target, nn.Parameter):
            with gathered([target], zero_stage=3, writer=0):
                if value is not None:
                    target.copy_(value)
        else:
            stated = [value]
            torch.distributed.broadcast_object_list(stated, src=0)
            assert stated[0] is not None
            target.copy_(stated[0])
    target._is_hf_initialized = True  # type: ignore[attr-defined]  # otherwise transformers draws random values
