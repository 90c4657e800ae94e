"""The layout: offsets of tensors, and chunks that have every byte of every tensor once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from math import prod
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.weights import layout
from asyncrl_cli.weights.layout import (
    ALIGNMENT,
    ByteRange,
    TensorSlot,
    chunks_of,
    first_expert_parts,
    pages_of,
    plan_slots,
    shard_of,
    size_of,
    slot_from,
)

pytestmark = pytest.mark.slow

Tensors = list[tuple[str, torch.dtype, tuple[int, ...]]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.bool, torch.float8_e4m3fn]


SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
TENSORS: st.SearchStrategy[Tensors] = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=8).map(
    lambda rows: [(f"layer.{index}", dtype, shape) for index, (dtype, shape) in enumerate(rows)]
)


def bytes_of(ranges: tuple[ByteRange, ...]) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


@given(TENSORS)
def test_slots_are_aligned_in_order_and_never_overlap(tensors: Tensors) -> None:
    slots = plan_slots(tensors)
    assert [(slot.name, slot.torch_dtype, slot.shape) for slot in slots] == tensors
    end = 0
    for slot, (_, dtype, shape) in zip(slots, tensors, strict=True):
        assert slot.offset % ALIGNMENT == 0
        assert end <= slot.offset < end + ALIGNMENT
        assert slot.nbytes == torch.empty(shape, dtype=dtype).nbytes
        assert slot.numel == prod(shape)
        end = slot.offset + slot.nbytes
    assert end <= size_of(slots) < end + ALIGNMENT


@given(st.integers(0, 1000), st.integers(1, 40))
def test_shards_of_a_tensor_follow_one_another_and_are_those_of_zero_3(numel: int, ranks: int) -> None:
    shards = [shard_of(numel, rank, ranks) for rank in range(ranks)]
    assert [position for start, stop in shards for position in range(start, stop)] == list(range(numel))
    # DeepSpeed pads the tensor to a multiple of the number of ranks, and gives each rank an equal share.
    padded = numel + -numel % ranks
    for rank, (start, stop) in enumerate(shards):
        assert (start, stop) == (
            min(rank * padded // ranks, numel),
            min((rank + 1) * padded // ranks, numel),
        )


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 20))
def test_experts_are_divided_over_neighbours_before_they_are_sharded(groups: int, sharing: int, share: int) -> None:
    ranks, numel = groups * sharing, groups * sharing * share
    shards = [range(*shard_of(numel, rank, ranks, groups)) for rank in range(ranks)]
    assert sorted(position for shard in shards for position in shard) == list(range(numel))
    for rank, shard in enumerate(shards):
        # DeepSpeed's AutoEP: rank r has a share of part r % groups, like the ranks r + groups, r + 2 groups, …
        part = range(numel)[rank % groups * sharing * share :][: sharing * share]
        assert shard == part[rank // groups * share :][:share]


@given(TENSORS, st.integers(1, 9), st.integers(1, 300), st.sampled_from([16, 64, 128]))
@settings(deadline=None, max_examples=300)
def test_the_part_of_a_tensor_that_a_rank_writes_is_in_one_range_of_its_pages(
    tensors: Tensors, ranks: int, chunk_bytes: int, page: int
) -> None:
    slots = plan_slots(tensors)
    with patch.object(layout, "CHUNK_BYTES", chunk_bytes):
        chunks = chunks_of.__wrapped__(slots, ranks)
    for rank in range(ranks):
        with patch.object(layout, "PAGE", page):
            pages = pages_of(chunk for chunk in chunks if chunk.rank == rank)
        assert all(one.stop < other.start for one, other in pairwise(pages))
        assert all(start % page == stop % page == 0 for start, stop in pages)
        written = set[int]()
        for slot in slots:
            begin, end = (slot.offset + index * slot.itemsize for index in shard_of(slot.numel, rank, ranks))
            if begin < end:
                assert sum(start <= begin and end <= stop for start, stop in pages) == 1
                written.update(range(begin // page, -(-end // page)))
        assert written == {position // page for position in bytes_of(pages)}


@given(TENSORS, st.integers(1, 9), st.integers(1, 300))
@settings(deadline=None, max_examples=300)
def test_a_chunk_has_bytes_of_its_rank_alone_and_is_as_large_as_it_may_be(
    tensors: Tensors, ranks: int, chunk_bytes: int
) -> None:
    """Ranks' shards have every byte of every tensor once, so chunks have, too."""
    slots = plan_slots(tensors)
    with patch.object(layout, "CHUNK_BYTES", chunk_bytes):
        chunks = chunks_of.__wrapped__(slots, ranks)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert all(0 < chunk.nbytes <= chunk_bytes and chunk.rank in range(ranks) for chunk in chunks)
    for rank in range(ranks):
        shard_bytes: list[int] = []
        for slot in slots:
            start, stop = (slot.offset + element * slot.itemsize for element in shard_of(slot.numel, rank, ranks))
            shard_bytes += range(start, stop)
        of_rank = [chunk for chunk in chunks if chunk.rank == rank]
        assert [position for chunk in of_rank for position in bytes_of(chunk.ranges)] == shard_bytes
        assert all(chunk.nbytes == chunk_bytes for chunk in of_rank[:-1])
        # Adjacent ranges are joined, because each range needs an entry in a system call.
        for chunk in of_rank:
            assert all(one.stop < other.start for one, other in zip(chunk.ranges, chunk.ranges[1:], strict=False))


def test_an_agent_does_not_load_torch() -> None:
    code = "import sys, asyncrl_cli.weights.agent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def experts_slot(experts: int, rows: list[int], width: int) -> TensorSlot:
    """A layer's experts, like the result of ``with_checkpoint_parts``."""
    (whole,) = plan_slots([("mlp.experts.joined", torch.bfloat16, (experts, sum(rows), width))])
    parts, offset = [], whole.offset
    for number in range(experts):
        for index, count in enumerate(rows):
            name = f"mlp.experts.{number}.{index}.weight"
            parts.append(replace(whole, name=name, shape=(count, width), offset=offset))
            offset += parts[-1].nbytes
    return replace(whole, parts=tuple(parts))


@given(st.integers(1, 12), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5), st.data())
def test_experts_are_loaded_together_only_where_all_are_alike(
    experts: int, rows: list[int], width: int, data: st.DataObject
) -> None:
    slot = experts_slot(experts, rows, width)
    assert first_expert_parts(slot) == slot.parts[: len(rows)]
    assert slot_from(json.loads(json.dumps(asdict(slot)))).parts[0].name == slot.parts[0].name
    index = data.draw(st.integers(0, len(slot.parts) - 1))
    other = list(slot.parts)
    if experts == 1 or data.draw(st.booleans()):
        other[index] = replace(other[index], name="mlp.experts.other.weight")
    else:
        del other[index]
    assert first_expert_parts(replace(slot, parts=tuple(other))) == ()
    assert first_expert_parts(replace(slot, parts=())) == ()
