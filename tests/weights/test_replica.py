"""A host's replica has at most two versions, and lends only checked bytes."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.weights import layout
from asyncrl_cli.weights.layout import PAGE, chunks_of, plan_slots, size_of
from asyncrl_cli.weights.manifest import Manifest
from asyncrl_cli.weights.replica import Replica, digest_of

RANKS = 3
SLOTS = plan_slots([("a", torch.float32, (17, 3)), ("b", torch.bfloat16, ()), ("c", torch.int8, (100,))])
THREADS = ThreadPoolExecutor(2)


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    with patch.object(layout, "CHUNK_BYTES", 40):
        chunks_of.cache_clear()
        yield
    chunks_of.cache_clear()


@cache
def content(version: int) -> bytes:
    """A version's bytes. The second half of the tensors changes only with every third version."""
    half = size_of(SLOTS) // 2
    return bytes((version * 31 + i) % 256 for i in range(half)) + bytes(
        (version // 3 * 7 + i) % 256 for i in range(size_of(SLOTS) - half)
    )


def manifest(version: int) -> Manifest:
    chunks = chunks_of(SLOTS, RANKS)
    whole = memoryview(content(version))
    digests = (digest_of(whole[start:stop] for start, stop in chunk.ranges) for chunk in chunks)
    return Manifest(version, SLOTS, RANKS, tuple(digests))


def write(path: str, version: int, ranks: set[int]) -> None:
    descriptor = os.open(path, os.O_RDWR)
    for chunk in chunks_of(SLOTS, RANKS):
        if chunk.rank in ranks:
            for start, stop in chunk.ranges:
                os.pwrite(descriptor, content(version)[start:stop], start)
    os.close(descriptor)


def has_bytes_of(memory: bytes, version: int) -> bool:
    return all(
        memory[slot.offset : slot.offset + slot.nbytes] == content(version)[slot.offset : slot.offset + slot.nbytes]
        for slot in SLOTS
    )


@dataclass
class Reader:
    """An engine that loads: it holds the shared lock."""

    descriptor: int
    version: int


class ReplicaMachine(RuleBasedStateMachine):
    """A host with some trainer ranks, engines that load at any time, and other hosts that fetch from it."""

    def __init__(self) -> None:
        super().__init__()
        self.replica = Replica(SLOTS, RANKS)
        self.local: set[int] = set()
        self.published = -1
        self.readers: list[Reader] = []
        self.loans: list[tuple[ExitStack, list[memoryview], bytes]] = []

    @initialize(local=st.sets(st.integers(0, RANKS - 1)))
    def place(self, local: set[int]) -> None:
        self.local = local

    def current(self) -> Manifest | None:
        return manifest(self.published) if self.published >= 0 else None

    def kept(self) -> bytes:
        return self.replica.available_chunks(self.published) if self.published >= 0 else b""

    @precondition(lambda self: self.local)
    @rule()
    def write_and_fail(self) -> None:
        before, version = self.kept(), self.published + 1
        write(self.replica.begin(version, self.current()), version + 100, self.local)
        assert self.kept() == before, "versions that engines may load are not overwritten"
        assert not any(self.replica.available_chunks(version))

    @precondition(lambda self: self.local)
    @rule()
    def write_the_same_version_again(self) -> None:
        if self.published >= 0:
            before = self.kept()
            write(self.replica.begin(self.published, self.current()), self.published + 100, self.local)
            assert self.kept() == before

    @rule()
    def publish(self) -> None:
        before, version = self.kept(), self.published + 1
        if self.local:
            write(self.replica.begin(version, self.current()), version, self.local)
            found = self.replica.digest(version, self.local, THREADS)
            wanted = {c.index: manifest(version).digests[c.index] for c in self.replica.chunks if c.rank in self.local}
            assert found == wanted
        assert self.kept() == before
        self.published = version

    @precondition(lambda self: self.published >= 0)
    @rule(back=st.integers(0, 1), share=st.floats(0, 1))
    def fetch(self, back: int, share: float) -> None:
        wanted = manifest(max(0, self.published - back))
        complete = {v for v in range(self.published + 1) if self.replica.path(manifest(v))}
        held = {v: self.replica.available_chunks(v) for v in (wanted.version, self.published)}
        try:
            with self.replica.receiving(wanted) as buffer:
                missing = [i for i in range(len(wanted.digests)) if i not in buffer.digests]
                for index in missing[: round(share * len(missing))]:
                    ranges = self.replica.chunks[index].ranges
                    for view, (start, stop) in zip(buffer.views(ranges), ranges, strict=True):
                        view[:] = content(wanted.version)[start:stop]
                    self.replica.add(buffer, index, wanted.digests[index])
        except RunError as error:
            assert "no free memory" in error.message
            assert not any(held[wanted.version]), "a version whose transfer has begun has its memory"
            return
        if share == 1:
            assert self.replica.path(wanted) is not None
        assert all(
            new >= old
            for new, old in zip(self.replica.available_chunks(wanted.version), held[wanted.version], strict=True)
        )
        if complete:
            assert self.replica.path(manifest(max(complete))), "the newest complete version is kept"

    @precondition(lambda self: self.published >= 0)
    @rule()
    def an_engine_begins_to_load(self) -> None:
        path = self.replica.path(manifest(self.published))
        if path is not None and len(self.readers) < 3:
            descriptor = os.open(path, os.O_RDWR)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self.readers.append(Reader(descriptor, self.published))

    @precondition(lambda self: self.readers)
    @rule()
    def an_engine_has_loaded(self) -> None:
        os.close(self.readers.pop(0).descriptor)

    @precondition(lambda self: self.published >= 0)
    @rule(index=st.integers(0, 99))
    def a_host_begins_to_fetch(self, index: int) -> None:
        digests = manifest(self.published).digests
        index, digest = index % len(digests), digests[index % len(digests)]
        context = ExitStack()
        views = context.enter_context(self.replica.lent(self.published, index, digest))
        assert (views is not None) == bool(self.kept()[index])
        if views is not None:
            self.loans.append((context, views, b"".join(views)))

    @precondition(lambda self: self.loans)
    @rule()
    def a_host_has_fetched(self) -> None:
        context, _, _ = self.loans.pop(0)
        context.close()

    @invariant()
    def there_are_two_versions_at_most(self) -> None:
        assert len(self.replica.versions()) <= 2

    @invariant()
    def a_path_has_the_whole_version(self) -> None:
        for version in range(self.published + 1):
            path = self.replica.path(manifest(version))
            assert (path is not None) == all(self.replica.available_chunks(version))
            if path is not None:
                memory = Path(path).read_bytes()
                assert has_bytes_of(memory, version)
                assert int.from_bytes(memory[size_of(SLOTS) :][:8], "little") == version

    @invariant()
    def what_is_lent_has_its_digest(self) -> None:
        for version in range(max(0, self.published - 2), self.published + 1):
            for index, digest in enumerate(manifest(version).digests):
                with self.replica.lent(version, index, digest) as views:
                    assert views is None or digest_of(views) == digest
                with self.replica.lent(version, index, "0" * 64) as views:
                    assert views is None

    @invariant()
    def what_is_in_use_does_not_change(self) -> None:
        for reader in self.readers:
            assert has_bytes_of(os.pread(reader.descriptor, size_of(SLOTS), 0), reader.version)
        for _, views, before in self.loans:
            assert b"".join(views) == before

    def teardown(self) -> None:
        for reader in self.readers:
            os.close(reader.descriptor)
        for context, _, _ in self.loans:
            context.close()
        self.replica.close()


TestReplica = ReplicaMachine.TestCase
TestReplica.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.fixture
def replica() -> Iterator[Replica]:
    replica = Replica(SLOTS, RANKS)
    yield replica
    replica.close()


def everything(replica: Replica, version: int, keep: Manifest | None = None) -> str:
    path = replica.begin(version, keep)
    write(path, version, {0, 1, 2})
    replica.digest(version, {0, 1, 2}, THREADS)
    return path


def test_an_engine_that_hangs_while_it_loads_keeps_its_memory(replica: Replica) -> None:
    path = everything(replica, 0)
    inode = os.stat(path).st_ino
    reader = os.open(path, os.O_RDWR)
    fcntl.flock(reader, fcntl.LOCK_SH)
    everything(replica, 1, manifest(0))
    everything(replica, 2, manifest(1))
    assert has_bytes_of(os.pread(reader, size_of(SLOTS), 0), 0)
    os.close(reader)
    assert inode not in {os.stat(entry.path).st_ino for entry in os.scandir("/proc/self/fd") if os.path.exists(entry)}


def fetch(replica: Replica, version: int) -> None:
    with replica.receiving(manifest(version)) as buffer:
        for index, digest in enumerate(manifest(version).digests):
            ranges = replica.chunks[index].ranges
            for view, (start, stop) in zip(buffer.views(ranges), ranges, strict=True):
                view[:] = content(version)[start:stop]
            replica.add(buffer, index, digest)


def test_an_older_version_that_was_fetched_later_goes_first(replica: Replica) -> None:
    for version in (2, 1, 3):
        fetch(replica, version)
    assert set(replica.versions()) == {2, 3}


def test_a_version_written_again_with_other_bytes_is_not_the_first_one(replica: Replica) -> None:
    everything(replica, 5)
    first = manifest(5)
    path = replica.begin(5, first)
    write(path, 6, {0, 1, 2})
    again = Manifest.from_digests(5, SLOTS, RANKS, [replica.digest(5, {0, 1, 2}, THREADS)])
    assert replica.path(first) not in (None, path)
    assert replica.path(again) == path
    assert again.digests == manifest(6).digests


def test_memory_that_the_host_does_not_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with closing(Replica(SLOTS, RANKS)) as replica:
        gc.collect()  # closes files of earlier tests
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, "posix_fallocate", full)
        for use in (lambda: replica.begin(0), lambda: fetch(replica, 0)):
            with pytest.raises(RunError, match="cannot be allocated: No space left on device"):
                use()
        assert len(os.listdir("/proc/self/fd")) == before
        monkeypatch.undo()
        everything(replica, 1)
        assert replica.path(manifest(1)), "it can be used when there is memory again"


def test_a_host_has_memory_for_the_shards_of_its_ranks_and_all_once_it_fetches() -> None:
    shard = 16 * PAGE
    slots = plan_slots([("weight", torch.uint8, (RANKS, shard))])

    def memory(path: str) -> int:
        return os.stat(path).st_blocks * 512

    with patch.object(layout, "CHUNK_BYTES", PAGE), closing(Replica(slots, RANKS)) as replica:
        first = replica.begin(0, ranks=[1])
        replica.digest(0, [1], THREADS)
        other = replica.begin(1, ranks=[1])
        assert first != other
        for path in (first, other):
            # A separate page contains the version's number.
            assert shard <= memory(path) <= shard + 2 * PAGE
        whole = Manifest(2, slots, RANKS, ("",) * len(replica.chunks))
        with replica.receiving(whole) as buffer:
            assert memory(buffer.path) >= RANKS * shard
