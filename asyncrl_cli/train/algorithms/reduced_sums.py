"""Sums over micro-batches, added up over ranks.

Fields whose names end in ``_max`` are maxima; all others add.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sums:
    """Base of what adds up. Fields are float64 tensors without dimensions, detached, so that adding them waits for no
    device; or ``Sums`` themselves."""

    def __add__(self, other: Self) -> Self:
        return replace(
            self,
            **{
                part.name: torch.maximum(getattr(self, part.name), getattr(other, part.name))
                if part.name.endswith("_max")
                else getattr(self, part.name) + getattr(other, part.name)
                for part in fields(self)
            },
        )


SomeSums = TypeVar("SomeSums", bound=Sums)


def add_over_ranks(values: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place; collective."""
    if not _alone():
        torch.distributed.all_reduce(values)
    return values


def over_ranks(sums: SomeSums, device: torch.device) -> SomeSums:
    """The same with what all ranks have in theirs; collective."""
    if _alone():
        return sums
    leaves = dict(_leaves(sums))
    for operation, wanted in ((torch.distributed.ReduceOp.MAX, True), (torch.distributed.ReduceOp.SUM, False)):
        names = [name for name in leaves if name.endswith("_max") == wanted]
        if names:
            packed = torch.stack([leaves[name] for name in names]).to(device)
            torch.distributed.all_reduce(packed, operation)
            leaves |= dict(zip(names, packed, strict=True))
    return _rebuilt(sums, leaves)


def _alone() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def _leaves(sums: Sums, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for part in fields(sums):
        value = getattr(sums, part.name)
        if isinstance(value, Sums):
            yield from _leaves(value, f"{prefix}{part.name}.")
        else:
            yield prefix + part.name, value


def _rebuilt(sums: SomeSums, leaves: dict[str, Tensor], prefix: str = "") -> SomeSums:
    changed = {}
    for part in fields(sums):
        name, value = prefix + part.name, getattr(sums, part.name)
        changed[part.name] = _rebuilt(value, leaves, f"{name}.") if isinstance(value, Sums) else leaves[name]
    return replace(sums, **changed)
