"""Sums over micro-batches and ranks, for metrics of a whole step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReducedSums:
    """Base of sums that add with ``+`` over micro-batches, and with ``reduce_over_ranks`` over ranks.

    Fields are detached float64 tensors without dimensions, or ``ReducedSums`` themselves. Adding waits for no device.
    Fields with names that end in ``_max`` are maxima; all others are sums.
    """

    def __add__(self, other: Self) -> Self:
        return replace(
            self,
            **{
                field.name: torch.maximum(getattr(self, field.name), getattr(other, field.name))
                if field.name.endswith("_max")
                else getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            },
        )


SomeSums = TypeVar("SomeSums", bound=ReducedSums)


def check_shapes(mask: Tensor, *tensors: Tensor | None) -> None:
    """Raise ``ValueError`` unless the mask is a bool matrix and all other given tensors have its shape."""
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool, not {mask.dtype}")
    shapes = [list(tensor.shape) for tensor in tensors if tensor is not None]
    if mask.ndim != 2 or any(shape != list(mask.shape) for shape in shapes):
        raise ValueError(f"shapes differ from the mask's {list(mask.shape)}: {shapes}")


def sum_over_ranks(values: Tensor, group: Any = None) -> Tensor:
    """Sum a tensor in place over the ranks of a process group (None: all ranks); collective."""
    if not _single_rank(group):
        torch.distributed.all_reduce(values, group=group)
    return values


def reduce_over_ranks(sums: SomeSums, device: torch.device, group: Any = None) -> SomeSums:
    """Return sums and maxima over the ranks of a process group (None: all ranks); collective, on ``device``."""
    if _single_rank(group):
        return sums
    values = {field.name: getattr(sums, field.name) for field in fields(sums)}
    nested = {name: value for name, value in values.items() if isinstance(value, ReducedSums)}
    # In the order of the fields, and maxima first: the same order on every rank, or collective calls would be mixed up.
    values |= {name: reduce_over_ranks(value, device, group) for name, value in nested.items()}
    for operation, is_maximum in ((torch.distributed.ReduceOp.MAX, True), (torch.distributed.ReduceOp.SUM, False)):
        names = [name for name in values if name not in nested and name.endswith("_max") == is_maximum]
        if names:
            packed = torch.stack([values[name] for name in names]).to(device)
            torch.distributed.all_reduce(packed, operation, group)
            values |= dict(zip(names, packed, strict=True))
    return replace(sums, **values)


def _single_rank(group: Any) -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1
