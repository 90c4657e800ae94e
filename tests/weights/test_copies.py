"""Copies from and to the replica: on CPU as in a run, for CUDA with a stand-in for the driver.

`make gpu` makes the same calls to a real driver.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.weights import mapped as mapped_module
from asyncrl_cli.weights.layout import ByteRange, chunks_of, pages_of, plan_slots, size_of
from asyncrl_cli.weights.mapped import Copies, CudaCopies, MappedReplica, PinnedLoads, copies_of
from asyncrl_cli.weights.replica import Replica

SLOTS = plan_slots(
    [("one", torch.float32, (5000,)), ("two", torch.bfloat16, (3, 7)), ("three", torch.float32, (9000,))]
)
GPU = torch.device("cuda", 1)


class Answer(NamedTuple):
    """CUDA's return code."""

    value: int


class Driver:
    """The memory that the driver has pinned, by address. Like a real driver it refuses to pin memory twice."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.room = 10**9
        self.forgotten = self.synchronized = 0
        self.devices: list[torch.device] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Answer:
        assert self.devices[-1] == GPU
        assert flags == 0
        overlaps = any(address < other + of and other < address + size for other, of in self.pinned.items())
        if overlaps or size > self.room:
            return Answer(712 if overlaps else 2)
        self.pinned[address] = size
        return Answer(0)

    def cudaHostUnregister(self, address: int) -> Answer:
        return Answer(0 if self.pinned.pop(address, None) else 713)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.pop()

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU
        self.synchronized += 1

    def ones(self, _: int, device: torch.device) -> None:
        assert device == GPU
        self.forgotten += 1
        raise RuntimeError("CUDA error: out of memory")  # the error code of the failed call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for name, value in {
        "cudart": lambda: driver,
        "device": driver.device,
        "Stream": lambda device: None,
        "synchronize": driver.synchronize,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(mapped_module.torch, "ones", driver.ones)
    return driver


def published(replica: Replica, mapped: MappedReplica, version: int, value: float, on: Copies) -> dict[str, Any]:
    """A version's tensors, with ``value`` everywhere."""
    path = replica.begin(version)
    with mapped.open(path, version) as tensors:
        for tensor in tensors.values():
            on.copy(tensor, torch.full(tensor.shape, value))
    with mapped.open(path, version) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def test_on_cpu_a_copy_is_made_in_the_dtype_of_its_target() -> None:
    on = copies_of(torch.device("cpu"))
    assert type(on) is Copies
    with closing(Replica(SLOTS, 1)) as replica, closing(MappedReplica(SLOTS, on)) as mapped:
        tensors = published(replica, mapped, 1, 0.3, on)
    assert torch.equal(tensors["one"], torch.full((5000,), 0.3))
    assert torch.equal(tensors["two"], torch.full((3, 7), 0.3, dtype=torch.bfloat16))


def test_each_buffer_is_pinned_once_and_given_back(driver: Driver) -> None:
    on = copies_of(GPU)
    assert type(on) is CudaCopies
    with closing(Replica(SLOTS, 1)) as replica:
        mapped = MappedReplica(SLOTS, on)
        for version in range(4):
            # Tensors on CPU, like a rank's with ``offload: all``.
            tensors = published(replica, mapped, version, version, on)
            assert all(bool((tensor == version).all()) for tensor in tensors.values())
            assert driver.synchronized == 2 * (version + 1), "no copy is running when the memory is unpinned"
        sizes = list(driver.pinned.values())
        assert sizes == [sizes[0]] * len(sizes)
        assert sizes[0] >= size_of(SLOTS)
        assert len(sizes) in (1, 2)
        mapped.close()
    assert not driver.pinned
    assert not driver.forgotten


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_pins_the_pages_of_its_own_shards_alone(driver: Driver, ranks: int) -> None:
    for rank in range(ranks):
        own = pages_of(chunk for chunk in chunks_of(SLOTS, ranks) if chunk.rank == rank)
        on = CudaCopies(GPU)
        with (
            closing(Replica(SLOTS, ranks)) as replica,
            closing(MappedReplica(SLOTS, on, own)) as mapped,
            mapped.open(replica.begin(0), 0) as tensors,
        ):
            base = tensors["one"].data_ptr()
            pinned = {address - base: size for address, size in driver.pinned.items()}
            assert pinned == {start: stop - start for start, stop in own}
        assert not driver.pinned


def test_memory_that_cannot_be_pinned_is_used_all_the_same(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.room = 100
    on = CudaCopies(GPU)
    with closing(Replica(SLOTS, 1)) as replica, closing(MappedReplica(SLOTS, on)) as mapped:
        with caplog.at_level(logging.WARNING):
            tensors = published(replica, mapped, 1, 2.0, on)
        assert all(bool((tensor == 2).all()) for tensor in tensors.values())
    assert caplog.messages == [f"weights are copied slowly: {size_of(SLOTS) + 8} bytes cannot be pinned (CUDA error 2)"]
    assert driver.forgotten == 1, "otherwise the next kernel would fail with the stored error"


@st.composite
def parts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory, and a part of a tensor in it. Every dimension may be cut, and experts may be skipped."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    memory = torch.arange(7 + math.prod(shape), dtype=torch.float32)
    part = memory[7:].view(shape)
    for dim, size in enumerate(shape):
        first = draw(st.integers(0, size - 1))
        part = part.narrow(dim, first, draw(st.integers(1, size - first)))
    return memory, part[:: draw(st.integers(1, 2))]


@given(parts(), st.integers(1, 200), st.booleans())
def test_loaders_get_the_part_and_no_other_bytes_change(
    drawn: tuple[torch.Tensor, torch.Tensor], staged_bytes: int, pinned: bool
) -> None:
    memory, part = drawn
    before, around = memory.clone(), torch.full((2, *part.shape), -1.0)
    on = PinnedLoads(torch.device("cpu"), {memory.untyped_storage().data_ptr(): pinned})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_module, "STAGED_BYTES", staged_bytes)
        with on:
            around[0].copy_(part)
            other = torch.ones(2, 3).t().clone()
    assert torch.equal(around[0], part)
    assert torch.equal(around[1], torch.full(part.shape, -1.0)) and torch.equal(memory, before) and other.sum() == 6
    if part.is_contiguous() or not pinned:
        assert on.staged_bytes == 0
    if part.dim() == 3 and all(one.is_contiguous() for one in part):
        assert on.staged_bytes == 0, "experts that are one piece each"


def test_a_gpu_whose_memory_cannot_be_pinned_loads_as_torch_does(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = torch.zeros(5000, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8)
    driver.room, on = 1000, CudaCopies(GPU)
    on.pin(one, [ByteRange(0, 5000)])
    on.pin(two, [ByteRange(0, 500)])
    loads = on.loads()
    assert isinstance(loads, PinnedLoads)
    assert loads._memories == {one.data_ptr(): False, two.data_ptr(): True}
    assert len(caplog.messages) == 1
