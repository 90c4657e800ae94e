"""The layout of a weight version in a host's memory, and its chunks, which travel between hosts.

It depends only on the tensors and the number of trainer ranks, so every host computes the same layout. This module does
not import torch.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Bytes. Tensors start on cache-line boundaries."""
CHUNK_BYTES = 4 * 2**20
"""The largest chunk: small enough to fetch it again after a fault, large enough that a request costs little."""
PAGE = mmap.PAGESIZE
FIRST_EXPERT = ".experts.0."
"""Part of the checkpoint name of a tensor that belongs to a layer's first expert."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The position of one named tensor."""

    name: str
    dtype: str  # as torch names it
    shape: tuple[int, ...]
    offset: int  # bytes
    itemsize: int
    parts: tuple[TensorSlot, ...] = ()
    """The tensors that engines load from its bytes, if not the tensor itself. They cover it, and have no parts."""
    groups: int = 1
    """See ``share_of``."""

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class ByteRange(NamedTuple):
    """Bytes ``start`` to ``stop`` (exclusive) of a version's memory."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """At most ``CHUNK_BYTES`` bytes written by one trainer rank, in ascending ranges."""

    index: int
    rank: int
    ranges: tuple[ByteRange, ...]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def plan_slots(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[TensorSlot, ...]:
    """Place tensors one after another, each on an ``ALIGNMENT`` boundary."""
    slots, offset = [], 0
    for name, dtype, shape in tensors:
        slot = TensorSlot(
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            shape=tuple(shape),
            offset=offset,
            itemsize=dtype.itemsize,
        )
        slots.append(slot)
        offset = _aligned(offset + slot.nbytes)
    return tuple(slots)


def size_of(slots: tuple[TensorSlot, ...]) -> int:
    """Bytes of all tensors, up to the alignment boundary after the last one."""
    return _aligned(slots[-1].offset + slots[-1].nbytes) if slots else 0


def slot_from(fields: Mapping[str, Any]) -> TensorSlot:
    """The slot with these fields, which come from ``dataclasses.asdict``."""
    return TensorSlot(**{**fields, "parts": tuple(TensorSlot(**part_fields) for part_fields in fields["parts"])})


def first_expert_parts(slot: TensorSlot) -> tuple[TensorSlot, ...]:
    """The first expert's parts of ``slot`` [experts, rows, columns]; empty if its parts are not experts' matrices.

    Experts lie one after another. All have the same parts, with names that differ only in the expert's number.
    """
    matrices = slot.parts[: len(slot.parts) // slot.shape[0]] if len(slot.shape) == 3 else ()
    if not all(FIRST_EXPERT in matrix.name and len(matrix.shape) == 2 for matrix in matrices):
        return ()
    expected = [
        (matrix.name.replace(FIRST_EXPERT, f".experts.{expert}."), tuple(matrix.shape))
        for expert in range(slot.shape[0] if matrices else 0)
        for matrix in matrices
    ]
    return matrices if expected == [(matrix.name, tuple(matrix.shape)) for matrix in slot.parts] else ()


def share_of(rank: int, ranks: int, groups: int) -> int:
    """The index of the part that ``rank`` has, of a tensor in ``ranks`` equal parts, as DeepSpeed divides experts.

    The tensor has ``groups`` large parts. Neighbouring ranks have different large parts, and ranks with the same large
    part divide it. So with 4 ranks and 2 groups, ranks 0 to 3 have the parts 0, 2, 1 and 3.
    """
    return rank % groups * (ranks // groups) + rank // groups


def shard_of(numel: int, rank: int, ranks: int, groups: int = 1) -> tuple[int, int]:
    """The elements ``start`` to ``stop`` (exclusive) of a flat tensor that ``rank`` writes.

    This is DeepSpeed's ZeRO-3 partition, used for every ZeRO stage. If a tensor has fewer elements than ranks, some
    ranks write nothing. ``groups``: see ``share_of``.
    """
    share, index = -(-numel // ranks), share_of(rank, ranks, groups)
    return min(index * share, numel), min((index + 1) * share, numel)


@lru_cache(maxsize=4)
def chunks_of(slots: tuple[TensorSlot, ...], ranks: int) -> tuple[Chunk, ...]:
    """All chunks, rank by rank. Together they have every byte of every tensor once, and no other byte."""
    chunks: list[Chunk] = []
    for rank in range(ranks):
        ranges: list[ByteRange] = []
        room = CHUNK_BYTES
        for slot in slots:
            first_element, end_element = shard_of(slot.numel, rank=rank, ranks=ranks, groups=slot.groups)
            start, stop = slot.offset + first_element * slot.itemsize, slot.offset + end_element * slot.itemsize
            while start < stop:
                end = min(stop, start + room)
                if ranges and ranges[-1].stop == start:
                    ranges[-1] = ByteRange(ranges[-1].start, end)
                else:
                    ranges.append(ByteRange(start, end))
                room -= end - start
                start = end
                if room == 0:
                    chunks.append(Chunk(len(chunks), rank, tuple(ranges)))
                    ranges, room = [], CHUNK_BYTES
        if ranges:
            chunks.append(Chunk(len(chunks), rank, tuple(ranges)))
    return tuple(chunks)


def pages_of(chunks: Iterable[Chunk]) -> tuple[ByteRange, ...]:
    """The memory pages with bytes of the chunks. The last range may end after the end of the memory.

    Neighbouring pages share a range, because a copy of consecutive bytes must lie within one (``Copies.pin``).
    """
    pages: list[ByteRange] = []
    for byte_range in sorted(byte_range for chunk in chunks for byte_range in chunk.ranges):
        start, stop = byte_range.start // PAGE * PAGE, -(-byte_range.stop // PAGE) * PAGE
        if pages and start <= pages[-1].stop:
            start = pages.pop().start
        pages.append(ByteRange(start, stop))
    return tuple(pages)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
