"""The mapping: tensors where they belong, the same bytes in every process, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.weights.mapping import ALIGNMENT, WeightMapping, plan_slots

Tensors = list[tuple[str, torch.dtype, tuple[int, ...]]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.bool]

READER = """
import json, sys
from asyncrl_cli.weights.mapping import WeightMapping
mapping = WeightMapping.open(**json.loads(sys.stdin.readline()))
tensors = {name: [str(tensor.dtype), list(tensor.shape), tensor.double().flatten().tolist()]
           for name, tensor in mapping.tensors()}
print(json.dumps([mapping.checksum(), tensors]), flush=True)
sys.stdin.readline()
print(json.dumps(mapping.checksum()), flush=True)
"""
OWNER = """
import json, signal, torch
from asyncrl_cli.weights.mapping import WeightMapping, plan_slots
mapping = WeightMapping.create(plan_slots([("w", torch.float32, (1000,))]))
dict(mapping.tensors())["w"].copy_(torch.arange(1000.0))
print(json.dumps([mapping.describe(), mapping.checksum()]), flush=True)
signal.pause()
"""


def tensors_strategy(min_size: int = 0) -> st.SearchStrategy[Tensors]:
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    entries = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=min_size, max_size=8)
    return entries.map(lambda rows: [(f"layer.{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)])


def fill(mapping: WeightMapping, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in mapping.tensors():
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))


@pytest.fixture
def mapping() -> Iterator[WeightMapping]:
    shapes: Tensors = [
        ("embedding", torch.float32, (99, 5)),
        ("scale", torch.bfloat16, ()),
        ("nothing", torch.float32, (0, 3)),
        ("head", torch.bfloat16, (7, 3)),
    ]
    mapping = WeightMapping.create(plan_slots(shapes))
    fill(mapping)
    yield mapping
    mapping.close()


@given(tensors_strategy())
@settings(deadline=None)
def test_slots_are_aligned_in_order_and_never_overlap(tensors: Tensors) -> None:
    slots = plan_slots(tensors)
    assert [(slot.name, slot.torch_dtype, slot.shape) for slot in slots] == tensors
    end = 0
    for slot, (_, dtype, shape) in zip(slots, tensors, strict=True):
        assert slot.offset % ALIGNMENT == 0
        assert end <= slot.offset < end + ALIGNMENT
        assert slot.nbytes == torch.empty(shape, dtype=dtype).nbytes
        end = slot.offset + slot.nbytes


@given(tensors_strategy(min_size=1), st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_a_second_mapping_has_the_same_tensors(tensors: Tensors, seed: int) -> None:
    mapping = WeightMapping.create(plan_slots(tensors))
    try:
        other = WeightMapping.open(**json.loads(json.dumps(mapping.describe())))
        fill(mapping, seed)
        assert other.checksum() == mapping.checksum()
        for (name, one), (same_name, same), (_, dtype, shape) in zip(
            mapping.tensors(), other.tensors(), tensors, strict=True
        ):
            assert (name, one.dtype, tuple(one.shape)) == (same_name, dtype, shape)
            assert torch.equal(one, same)
    finally:
        mapping.close()


@pytest.mark.slow
def test_another_process_reads_the_same_tensors(mapping: WeightMapping) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(json.dumps(mapping.describe()) + "\n")
        reader.stdin.flush()
        checksum, tensors = json.loads(reader.stdout.readline())
        assert checksum == mapping.checksum()
        expected = {
            name: [str(tensor.dtype), list(tensor.shape), tensor.double().flatten().tolist()]
            for name, tensor in mapping.tensors()
        }
        assert tensors == expected
        dict(mapping.tensors())["head"][6, 2] += 1
        reader.stdin.write("the next version\n")
        reader.stdin.flush()
        assert json.loads(reader.stdout.readline()) == mapping.checksum() != checksum


@pytest.mark.parametrize(("name", "index"), [("embedding", (0, 0)), ("scale", ()), ("head", (6, 2))])
def test_the_checksum_changes_with_a_single_element(mapping: WeightMapping, name: str, index: tuple[int, ...]) -> None:
    before = mapping.checksum()
    tensor = dict(mapping.tensors())[name]
    old = tensor[index].item()
    tensor[index] = old + 1
    assert mapping.checksum() != before
    tensor[index] = old
    assert mapping.checksum() == before


def test_nothing_has_a_name(mapping: WeightMapping) -> None:
    assert os.readlink(mapping.path).startswith("/memfd:asyncrl-weights")
    assert os.stat(mapping.path).st_dev != os.stat("/dev/shm").st_dev
    assert not list(Path("/dev/shm").glob("*asyncrl*"))


def test_close_gives_the_descriptor_back_and_keeps_the_memory(mapping: WeightMapping) -> None:
    other = WeightMapping.open(**mapping.describe())
    before = mapping.checksum()
    mapping.close()
    mapping.close()
    assert not Path(mapping.path).exists()
    assert mapping.checksum() == other.checksum() == before


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], str]]:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, *json.loads(process.stdout.readline())
        process.kill()


@pytest.mark.slow
def test_after_the_owner_died(owner: tuple[subprocess.Popen[str], dict[str, Any], str]) -> None:
    process, description, checksum = owner
    mapped = WeightMapping.open(**description)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert mapped.checksum() == checksum, "what is mapped stays"
    assert torch.equal(dict(mapped.tensors())["w"], torch.arange(1000.0))
    with pytest.raises(RuntimeError, match=f"{description['path']}.*No such file"):
        WeightMapping.open(**description)


def test_a_file_that_is_too_small_is_refused(mapping: WeightMapping) -> None:
    small = os.memfd_create("too-small")
    try:
        os.ftruncate(small, 10)
        with pytest.raises(RuntimeError):
            WeightMapping.open(f"/proc/{os.getpid()}/fd/{small}", mapping.describe()["slots"])
        assert os.fstat(small).st_size == 10
    finally:
        os.close(small)
