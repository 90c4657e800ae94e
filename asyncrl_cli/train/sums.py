"""Sums over micro-batches, added up over ranks.

A *sums* object is a dataclass whose fields are float64 tensors without dimensions, or sums objects themselves. Fields
whose names end in ``_max`` are maxima; all others add.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Sums = TypeVar("Sums")


def add_over_ranks(values: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place; collective."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(values)
    return values


def over_ranks(sums: Sums, device: torch.device) -> Sums:
    """A sums object with what all ranks have in theirs; collective."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return sums
    leaves = dict(_leaves(sums))
    for operation, wanted in ((torch.distributed.ReduceOp.MAX, True), (torch.distributed.ReduceOp.SUM, False)):
        names = [name for name in leaves if name.endswith("_max") == wanted]
        if names:
            packed = torch.stack([leaves[name] for name in names]).to(device)
            torch.distributed.all_reduce(packed, operation)
            leaves |= dict(zip(names, packed, strict=True))
    rebuilt: Sums = _rebuilt(sums, leaves)
    return rebuilt


def _leaves(sums: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for part in fields(sums):
        value = getattr(sums, part.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{part.name}.")
        elif value is not None:
            yield prefix + part.name, value


def _rebuilt(sums: Any, leaves: dict[str, Tensor], prefix: str = "") -> Any:
    changed: dict[str, Any] = {}
    for part in fields(sums):
        value = getattr(sums, part.name)
        if is_dataclass(value):
            changed[part.name] = _rebuilt(value, leaves, f"{prefix}{part.name}.")
        elif value is not None:
            changed[part.name] = leaves[prefix + part.name]
    return replace(sums, **changed)
