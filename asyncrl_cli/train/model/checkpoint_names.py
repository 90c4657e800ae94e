"""The names and shapes that a model's weights have in its checkpoints, which are those that engines load.

A loaded transformers model may have them differently: the experts of a layer as one tensor, other names for a block
(Mixtral), no prefix of the vision model around it (Qwen 3.5). ``save_pretrained`` calls ``revert_weight_conversion``.
Here it converts row numbers instead of weights, which shows where in the trainer's weights each tensor of a checkpoint
lies. So engines read it from the same bytes, and nothing is copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from asyncrl_cli.train.model.policy import PolicyError
from asyncrl_cli.weights.layout import TensorSlot


def with_checkpoint_parts(model: Any, slots: Sequence[TensorSlot]) -> tuple[TensorSlot, ...]:
    """``slots`` with the tensors of the model's checkpoint as their parts, where these are not the slots themselves.

    ``slots`` have the weights of ``model``, a transformers model, by its own names. Raises ``PolicyError`` when a
    checkpoint has a tensor that is not a part of a slot.
    """
    from transformers.core_model_loading import revert_weight_conversion

    starts, numbers, count = [], {}, 0
    for slot in slots:
        starts.append(count)
        numbers[slot.name] = _row_numbers(count, slot.shape)
        count += _rows(slot.shape)
    parts: dict[str, list[TensorSlot]] = defaultdict(list)
    for name, part in revert_weight_conversion(model, numbers).items():
        begin = int(part.reshape(-1)[0])
        index = bisect_right(starts, begin) - 1
        slot, row = slots[index], begin - starts[index]
        width = slot.numel // _rows(slot.shape)
        shape = tuple(part.shape) if len(slot.shape) < 2 else (*part.shape[:-1], width)
        if row + _rows(shape) > _rows(slot.shape) or not torch.equal(part, _row_numbers(begin, shape)):
            raise PolicyError(
                f"the checkpoint's {name} is not a part of the model's {slot.name} but computed from it",
                hint=f"use another model: engines cannot read the weights of a {model.config.model_type} in place",
            )
        offset = slot.offset + row * width * slot.itemsize
        parts[slot.name].append(replace(slot, name=name, shape=shape, offset=offset))
    divided = []
    for slot in slots:
        own = sorted(parts[slot.name], key=lambda part: part.offset)
        assert sum(part.numel for part in own) == slot.numel, slot.name
        divided.append(slot if own == [slot] else replace(slot, parts=tuple(own)))
    return tuple(divided)


def _rows(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) if len(shape) > 1 else prod(shape)


def _row_numbers(begin: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers from ``begin`` on of a weight's rows, in its shape except the last dimension, which no conversion
    touches: two columns stand for it, as some conversions drop dimensions of one."""
    rows = torch.arange(begin, begin + _rows(shape), dtype=torch.int32)  # a model has fewer than 2^31
    return rows.view(shape) if len(shape) < 2 else rows.view(*shape[:-1], 1).expand(*shape[:-1], 2).contiguous()
