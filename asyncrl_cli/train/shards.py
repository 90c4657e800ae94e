"""Each rank's own part of the weights, in the form that engines load.

Rank r of T has elements [r * ceil(n / T), (r + 1) * ceil(n / T)) of every flat weight of n elements. This is ZeRO-3's
partition, so a publish gathers no weights, only the small matrices of adapters (decision 0038). If engines get just the
adapters, it gathers nothing (decision 0053).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.train.model.lora import (
    PEFT,
    LoraError,
    adapter_matrices,
    by_layer,
    full_shape,
    gathered,
    plain_weights,
)
from asyncrl_cli.weights.layout import TensorSlot, plan_slots, shard_of
from asyncrl_cli.weights.mapped import Copies


def engine_layout(model: nn.Module, dtype: torch.dtype) -> tuple[TensorSlot, ...]:
    """Return the layout of the weights that engines get; it is the same on every rank. Raises ``UserError``."""
    weights = plain_weights(model)
    slots = plan_slots(
        # Buffers keep their dtype, in engines as in the trainer.
        (weight.name, dtype if isinstance(weight.parameter, nn.Parameter) else weight.parameter.dtype, weight.shape)
        for weight in weights
    )
    groups = (1 if weight.experts is None else weight.experts.groups for weight in weights)
    return with_checkpoint_parts(model, [replace(slot, groups=n) for slot, n in zip(slots, groups, strict=True)])


def shards(model: nn.Module, rank: int, ranks: int, zero_stage: int) -> Iterator[tuple[str, int, Tensor]]:
    """Yield this rank's elements of every weight: name, index of the first element, elements [count] on their device.

    Merged weights are float32, the others have the trainer's dtype. Collective: all ranks must iterate to the end.
    """
    for layer in by_layer(plain_weights(model)):
        adapters = [parameter for weight in layer for parameter in weight.adapter_parts]
        with gathered(adapters, zero_stage), torch.no_grad():
            for weight in layer:
                if weight.experts is not None:
                    begin, _ = shard_of(prod(weight.shape), rank=rank, ranks=ranks, groups=weight.experts.groups)
                    yield weight.name, begin, weight.experts.local_elements()
                    continue
                begin, end = shard_of(prod(weight.shape), rank, ranks)
                elements = _local_elements(weight.parameter, begin=begin, end=end, zero_stage=zero_stage)
                if weight.adapter is not None:
                    # Every rank computes the whole product: a product of fewer rows may differ in the last bits.
                    elements = elements.float() + weight.delta().reshape(-1)[begin:end].to(elements.device)
                yield weight.name, begin, elements


def adapter_layout(model: nn.Module, dtype: torch.dtype) -> tuple[TensorSlot, ...]:
    """Return the layout of the adapters. Engines load them under the names in a saved adapter: peft's names, with
    layers named as in the model's checkpoints (decision 0053).

    Raises ``LoraError`` for a layer that checkpoints do not have, and ``UserError`` like ``engine_layout``.
    """
    of_weight = {slot.name: slot.parts or (slot,) for slot in engine_layout(model, dtype)}
    names, tensors = [], []
    for weight, matrix_kind, matrix in adapter_matrices(model):
        if len(of_weight[weight]) > 1:
            raise LoraError(
                f"{weight} is several weights in the model's checkpoints, so vLLM has no such layer to adapt",
                "leave it out, or set model.lora.serve to merged",
            )
        names.append(f"{PEFT}{_matrix_name(of_weight[weight][0].name, matrix_kind)}")
        tensors.append((_matrix_name(weight, matrix_kind), dtype, full_shape(matrix)))
    slots = plan_slots(tensors)
    return tuple(replace(slot, parts=(replace(slot, name=name),)) for slot, name in zip(slots, names, strict=True))


def adapter_shards(model: nn.Module, rank: int, ranks: int, zero_stage: int) -> Iterator[tuple[str, int, Tensor]]:
    """Yield this rank's elements of every adapter, like ``shards``, in the trainer's dtype. Not collective."""
    for weight, matrix_kind, matrix in adapter_matrices(model):
        begin, end = shard_of(prod(full_shape(matrix)), rank, ranks)
        yield (
            _matrix_name(weight, matrix_kind),
            begin,
            _local_elements(matrix, begin=begin, end=end, zero_stage=zero_stage),
        )


def _matrix_name(weight: str, matrix_kind: str) -> str:
    return f"{weight.removesuffix('weight')}{matrix_kind}.weight"


def write_shard(target: Tensor, begin: int, elements: Tensor, copies: Copies) -> None:
    """Begin to copy elements into the full tensor, in its dtype, starting at element ``begin``."""
    copies.copy(target.view(-1)[begin : begin + elements.numel()], elements)


def _local_elements(parameter: Tensor, begin: int, end: int, zero_stage: int) -> Tensor:
    if zero_stage == 3 and isinstance(parameter, nn.Parameter):  # buffers are whole on every rank
        partition: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]  # padded at its end
        return partition.detach()[: end - begin]
    return parameter.detach().reshape(-1)[begin:end]


def with_checkpoint_parts(model: Any, slots: Sequence[TensorSlot]) -> tuple[TensorSlot, ...]:
    """Return ``slots`` with the tensors of the model's checkpoint as parts, unless these equal the slots.

    Engines load weights in the checkpoint's form. A loaded transformers model may have another form: a layer's experts
    as one tensor, other names for a block (Mixtral), no prefix of the vision model around it (Qwen 3.5).
    ``save_pretrained`` reverts this with ``revert_weight_conversion``. Here it converts row numbers instead of weights,
    which shows where each tensor of a checkpoint lies in the trainer's weights. So engines read the same bytes.

    ``slots`` have the weights of ``model``, a transformers model, by its own names. Raises ``UserError`` when a
    checkpoint has a tensor that is not a part of a slot.
    """
    from transformers.core_model_loading import revert_weight_conversion

    starts, row_numbers, count = [], {}, 0
    for slot in slots:
        starts.append(count)
        row_numbers[slot.name] = _row_numbers(count, slot.shape)
        count += _rows(slot.shape)
    slots_in_checkpoint: dict[str, list[TensorSlot]] = defaultdict(list)
    for name, tensor_rows in revert_weight_conversion(model, row_numbers).items():
        begin = int(tensor_rows.reshape(-1)[0])
        index = bisect_right(starts, begin) - 1
        slot, row = slots[index], begin - starts[index]
        width = slot.numel // _rows(slot.shape)
        shape = tuple(tensor_rows.shape) if len(slot.shape) < 2 else (*tensor_rows.shape[:-1], width)
        if row + _rows(shape) > _rows(slot.shape) or not torch.equal(tensor_rows, _row_numbers(begin, shape)):
            raise UserError(
                f"the checkpoint's {name} is not a part of the model's {slot.name} but computed from it",
                hint=f"use another model: engines cannot read the weights of a {model.config.model_type} in place",
            )
        offset = slot.offset + row * width * slot.itemsize
        slots_in_checkpoint[slot.name].append(replace(slot, name=name, shape=shape, offset=offset))
    divided = []
    for slot in slots:
        tensor_slots = sorted(slots_in_checkpoint[slot.name], key=lambda tensor_rows: tensor_rows.offset)
        assert sum(tensor_rows.numel for tensor_rows in tensor_slots) == slot.numel, slot.name
        divided.append(slot if tensor_slots == [slot] else replace(slot, parts=tuple(tensor_slots)))
    return tuple(divided)


def _rows(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) if len(shape) > 1 else prod(shape)


def _row_numbers(begin: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Number a weight's rows from ``begin`` on, in the weight's shape except for the last dimension. No conversion
    changes that dimension, so it has just two columns: some conversions drop dimensions of one."""
    rows = torch.arange(begin, begin + _rows(shape), dtype=torch.int32)  # a model has fewer than 2^31
    return rows.view(shape) if len(shape) < 2 else rows.view(*shape[:-1], 1).expand(*shape[:-1], 2).contiguous()
