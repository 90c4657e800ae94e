"""Where the bytes of a weight version lie in a host's memory, and the chunks that travel between hosts.

Pure functions of the tensors and the number of trainer ranks: every host computes the same layout. Importing this
module does not import torch.
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
"""The largest chunk: small enough to ask another holder for soon, large enough that a request costs little."""
PAGE = mmap.PAGESIZE
FIRST_EXPERT = ".experts.0."
"""In the name of a tensor in a checkpoint: it belongs to a layer's first expert."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The position of one named tensor."""

    name: str
    dtype: str  # as torch names it
    shape: tuple[int, ...]
    offset: int  # bytes
    itemsize: int
    parts: tuple[TensorSlot, ...] = ()
    """The tensors that engines load from its bytes, if they are not the tensor itself: they cover it, without parts."""
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
    """At most ``CHUNK_BYTES`` that one trainer rank has written, in ranges of ascending position."""

    index: int
    rank: int
    ranges: tuple[ByteRange, ...]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def plan_slots(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[TensorSlot, ...]:
    """Lay tensors out one after another, each on an ``ALIGNMENT`` boundary."""
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
    """Bytes that the tensors need, up to the alignment boundary after the last one."""
    return _aligned(slots[-1].offset + slots[-1].nbytes) if slots else 0


def slot_from(fields: Mapping[str, Any]) -> TensorSlot:
    """The slot with these fields, as ``dataclasses.asdict`` gives them."""
    return TensorSlot(**{**fields, "parts": tuple(TensorSlot(**part) for part in fields["parts"])})


def of_first_expert(slot: TensorSlot) -> tuple[TensorSlot, ...]:
    """The first expert's parts of ``slot`` [experts, rows, columns]; none if its parts are not experts' matrices.

    All experts have the same parts, under names that differ by the expert's number alone, and lie one after another.
    """
    own = slot.parts[: len(slot.parts) // slot.shape[0]] if len(slot.shape) == 3 else ()
    expected = [
        (part.name.replace(FIRST_EXPERT, f".experts.{number}."), tuple(part.shape))
        for number in range(slot.shape[0] if own else 0)
        for part in own
    ]
    same = expected == [(part.name, tuple(part.shape)) for part in slot.parts]
    return own if same and all(FIRST_EXPERT in part.name and len(part.shape) == 2 for part in own) else ()


def share_of(rank: int, ranks: int, groups: int) -> int:
    """Which of ``ranks`` equal parts of a tensor ``rank`` has: as DeepSpeed divides experts.

    Neighbouring ranks have different ones of ``groups`` large parts. Each part is divided over the ranks that have it.
    So with 4 ranks and 2 groups, ranks 0 to 3 have the parts 0, 2, 1 and 3.
    """
    return rank % groups * (ranks // groups) + rank // groups


def shard_of(numel: int, rank: int, ranks: int, groups: int = 1) -> tuple[int, int]:
    """The elements ``start`` to ``stop`` (exclusive) of a flat tensor that ``rank`` of ``ranks`` writes.

    DeepSpeed's ZeRO-3 partition, used for every ZeRO stage. Of a tensor with fewer elements than ranks, some ranks have
    none. ``groups``: see ``share_of``.
    """
    share, index = -(-numel // ranks), share_of(rank, ranks, groups)
    return min(index * share, numel), min((index + 1) * share, numel)


@lru_cache(maxsize=4)
def chunks_of(slots: tuple[TensorSlot, ...], ranks: int) -> tuple[Chunk, ...]:
    """All chunks, rank by rank: together they have every byte of every tensor once, and no other byte."""
    chunks: list[Chunk] = []
    for rank in range(ranks):
        ranges: list[ByteRange] = []
        room = CHUNK_BYTES
        for slot in slots:
            first, last = shard_of(slot.numel, rank=rank, ranks=ranks, groups=slot.groups)
            start, stop = slot.offset + first * slot.itemsize, slot.offset + last * slot.itemsize
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
    """The memory pages that have bytes of the chunks. The last range may end behind the end of the memory.

    Neighbouring pages are in one range: a copy of bytes that follow each other lies within one.
    """
    found: list[ByteRange] = []
    for part in sorted(part for chunk in chunks for part in chunk.ranges):
        start, stop = part.start // PAGE * PAGE, -(-part.stop // PAGE) * PAGE
        if found and start <= found[-1].stop:
            start = found.pop().start
        found.append(ByteRange(start, stop))
    return tuple(found)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
