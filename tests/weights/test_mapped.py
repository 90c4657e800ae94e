"""The tensors in other processes of the host have the same bytes, one version at a time, and no memory remains."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch

from asyncrl_cli.weights.layout import plan_slots
from asyncrl_cli.weights.manifest import Manifest, ReplicaGone
from asyncrl_cli.weights.mapped import MappedReplica
from asyncrl_cli.weights.replica import Replica

SHAPES = [
    ("embedding", torch.float32, (99, 5)),
    ("scale", torch.bfloat16, ()),
    ("nothing", torch.float32, (0, 3)),
    ("head", torch.bfloat16, (7, 3)),
]
SLOTS = plan_slots(SHAPES)


def read(messages: Connection) -> None:
    """An engine's process: answers each path and version with the tensors, and loads version 1 until it is told."""
    mapped = MappedReplica(SLOTS)
    while True:
        path, version = messages.recv()
        with mapped.open(path, version) as tensors:
            messages.send({name: tensor.double().flatten().tolist() for name, tensor in tensors.items()})
            if version == 1:
                messages.send(messages.recv())


def own(messages: Connection) -> None:
    """An agent's process: sends the path of version 3."""
    replica = Replica(SLOTS, 1)
    path = replica.begin(3)
    with MappedReplica(SLOTS).open(path, 3) as tensors:
        for tensor in tensors.values():
            tensor.fill_(3)
    messages.send(path)
    signal.pause()


@contextmanager
def forked(target: Callable[[Connection], None]) -> Iterator[tuple[ForkProcess, Connection]]:
    """Another process, and the connection to it."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    with ours:
        process = fork.Process(target=target, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        yield process, ours
        process.kill()
        process.join()


@pytest.fixture
def replica() -> Iterator[Replica]:
    with closing(Replica(SLOTS, 2)) as replica:
        yield replica


@pytest.fixture
def mapped() -> Iterator[MappedReplica]:
    with closing(MappedReplica(SLOTS)) as mapped:
        yield mapped


def publish(replica: Replica, mapped: MappedReplica, version: int, keep: Manifest | None = None) -> Manifest:
    with mapped.open(replica.begin(version, keep), version) as tensors:
        for tensor in tensors.values():
            tensor.fill_(version)
    with ThreadPoolExecutor(1) as threads:
        return Manifest.from_digests(version, SLOTS, 2, [replica.digest(version, {0, 1}, threads)])


def test_a_path_of_another_version_is_refused(replica: Replica, mapped: MappedReplica) -> None:
    old = publish(replica, mapped, 1)
    path = replica.path(old)
    assert path is not None
    publish(replica, mapped, 3, publish(replica, mapped, 2, old))
    with (
        pytest.raises(ReplicaGone, match="the memory of weight version 1 was reused for version 3"),
        mapped.open(path, 1),
    ):
        pass


def test_memory_that_is_too_small_is_refused_and_not_grown(mapped: MappedReplica) -> None:
    small = os.memfd_create("too-small")
    try:
        os.ftruncate(small, 10)
        with (
            pytest.raises(ReplicaGone, match="the memory has 10 bytes, expected "),
            mapped.open(f"/proc/{os.getpid()}/fd/{small}", 1),
        ):
            pass
        assert os.fstat(small).st_size == 10
    finally:
        os.close(small)


def test_each_memory_is_mapped_once_and_no_descriptor_is_lost(replica: Replica) -> None:
    with closing(MappedReplica(SLOTS)) as mapped:
        last: Manifest | None = None
        descriptors, pointers = set(), set()
        for version in range(6):
            last = publish(replica, mapped, version, last)
            with mapped.open(replica.path(last) or "", version) as tensors:
                pointers.add(tensors["head"].data_ptr())
            descriptors.add(len(os.listdir("/proc/self/fd")))
    assert len(pointers) == 2
    assert len(descriptors) == 2, "one descriptor with one mapping, one with two"


def test_another_process_reads_the_same_tensors_while_the_next_version_is_written(
    replica: Replica, mapped: MappedReplica
) -> None:
    def check(version: int) -> None:
        tensors = messages.recv()
        assert set(tensors) == {name for name, _, _ in SHAPES}
        assert all(value == version for values in tensors.values() for value in values)

    first = publish(replica, mapped, 1)
    with forked(read) as (_, messages):
        messages.send([replica.path(first), 1])
        check(1)
        # It still loads, so its version's memory is not reused.
        third = publish(replica, mapped, 3, publish(replica, mapped, 2, first))
        messages.send("it has loaded")
        assert messages.recv() == "it has loaded"
        messages.send([replica.path(third), 3])
        check(3)


def test_only_mapped_memory_survives_a_killed_agent() -> None:
    with forked(own) as (owner, messages), closing(MappedReplica(SLOTS)) as mapped:
        path = messages.recv()
        with mapped.open(path, 3) as tensors:
            owner.kill()
            owner.join()
            assert all(bool((tensor == 3).all()) for tensor in tensors.values())
        with pytest.raises(ReplicaGone, match="No such file"), mapped.open(path, 3):
            pass
    assert not list(Path("/dev/shm").glob("*asyncrl*"))
