"""The weights in one host's memory: at most two versions, one in use and one that arrives (decision 0038).

The memory is anonymous (``memfd_create``), and other processes of the host open it as ``/proc/PID/fd/N``. So no name
can be left behind, and the kernel frees the memory with the last process that maps it, even if that is killed. The two
buffers are used in turn and keep their pages, because a write to fresh pages takes several times as long as the copy. A
host has pages for its ranks' shards, and for whole versions as soon as it fetches.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import RLock

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.weights.layout import ALIGNMENT, ByteRange, TensorSlot, chunks_of, pages_of, size_of
from asyncrl_cli.weights.manifest import Manifest

VERSION_BYTES = 8
"""Size of the version number that follows the weights. It shows a reader that a path is outdated."""
GIB = 2**30


class Buffer:
    """The memory of one version."""

    def __init__(self, nbytes: int) -> None:
        """Map memory without pages. Raises ``RunError`` if it cannot be mapped."""
        self.version: int | None = None  # None: nothing is written yet
        self.serial = 0  # among buffers with the same version, the newer one has the higher number
        self.is_local_write = False  # True if trainer ranks of this host write it, False for a pull
        self.digests: dict[int, str] = {}  # BLAKE3 (hex) of each checked chunk, by index
        self.pins = 0  # number of threads that read or write its bytes now
        self.allocated = frozenset[int]()  # the ranks with memory for their shards
        self._nbytes = nbytes
        self.descriptor = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC)
        size = nbytes + ALIGNMENT
        try:
            os.ftruncate(self.descriptor, size)
            mapped = mmap.mmap(self.descriptor, size)
        except OSError as error:
            os.close(self.descriptor)
            raise _no_memory(size, error) from None
        self._bytes = memoryview(mapped)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: older buffers first."""
        return (-1 if self.version is None else self.version, self.serial)

    def begin(self, version: int, serial: int, is_local_write: bool) -> bool:
        """Become the memory of ``version``, without checked chunks. False if its bytes are in use."""
        if self.pins:
            return False
        try:
            # Engines hold a shared lock while they load (mapped.py): the bytes must not change under them.
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.version, self.serial, self.is_local_write, self.digests = version, serial, is_local_write, {}
        self._bytes[self._nbytes : self._nbytes + VERSION_BYTES] = version.to_bytes(VERSION_BYTES, "little")
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return True

    def views(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        """A writable view of each range."""
        return [self._bytes[start:stop] for start, stop in ranges]

    def agreeing(self, manifest: Manifest) -> int:
        """Number of chunks of the manifest's version that it has."""
        if self.version != manifest.version:
            return 0
        return sum(manifest.digests[index] == digest for index, digest in self.digests.items())

    def close(self) -> None:
        """Close the descriptor. Processes that have mapped the memory keep it."""
        os.close(self.descriptor)


class Replica:
    """Two buffers and the state of their chunks. Any thread may call any method."""

    def __init__(self, slots: tuple[TensorSlot, ...], ranks: int) -> None:
        """Map both buffers. Raises ``RunError`` if they cannot be mapped."""
        self.slots = slots
        self.ranks = ranks
        self.chunks = chunks_of(slots, ranks)
        self._nbytes = size_of(slots)
        self._buffers = [Buffer(self._nbytes), Buffer(self._nbytes)]
        self._serial = 0
        self._lock = RLock()

    def begin(self, version: int, keep: Manifest | None = None, ranks: Collection[int] | None = None) -> str:
        """Take a buffer for ``version``; returns its path, to which ``ranks`` (by default all) write their shards.

        ``keep``: the version that engines serve. A buffer with chunks of it is not taken, even for the same version.
        Raises ``RunError`` if the host lacks the memory.
        """
        with self._lock:
            kept_buffer = None if keep is None else self._buffer_of(keep)
            path = self._take([b for b in self._buffers if b is not kept_buffer], version, is_local_write=True).path
        self._allocate(range(self.ranks) if ranks is None else ranks)
        return path

    def digest(self, version: int, ranks: Collection[int], threads: ThreadPoolExecutor) -> dict[int, str]:
        """Compute the digests of these ranks' chunks, by index, after the ranks have written. From then on the host can
        lend the chunks.

        Raises ``RunError`` if the version was not begun here, or another version has taken its place.
        """
        replaced = RunError(f"weight version {version} is not being written on this host", location="weights")
        with self._lock:
            candidates = [b for b in self._buffers if b.version == version and b.is_local_write]
            buffer = max(candidates, key=lambda b: b.serial, default=None)
            pin = self._pin(buffer)
        with pin:
            if buffer is None:
                raise replaced
            chunks = [chunk for chunk in self.chunks if chunk.rank in ranks]
            chunk_digests = threads.map(lambda chunk: digest_of(buffer.views(chunk.ranges)), chunks)
            digests = {chunk.index: digest for chunk, digest in zip(chunks, chunk_digests, strict=True)}
            with self._lock:
                if buffer not in self._buffers:
                    raise replaced
                buffer.digests |= digests
        return digests

    @contextmanager
    def receiving(self, manifest: Manifest) -> Iterator[Buffer]:
        """The buffer in which to complete the version: a buffer with some of its chunks, or else a free buffer.

        Its chunks with other bytes are forgotten. Raises ``RunError`` if no buffer is free, or the host lacks the
        memory.
        """
        with self._lock:
            buffer = self._buffer_of(manifest) or self._take(self._free(manifest.version), manifest.version, False)
            valid_chunks = {index for index, digest in buffer.digests.items() if digest == manifest.digests[index]}
            buffer.digests = {index: manifest.digests[index] for index in valid_chunks}
            pin = self._pin(buffer)
        with pin:
            self._allocate(range(self.ranks))
            yield buffer

    def add(self, buffer: Buffer, index: int, digest: str) -> None:
        """Record that the buffer has a chunk's bytes with this digest."""
        with self._lock:
            buffer.digests[index] = digest

    def path(self, manifest: Manifest) -> str | None:
        """The version's path if all its chunks are here."""
        with self._lock:
            buffer = self._buffer_of(manifest)
            complete = buffer is not None and buffer.agreeing(manifest) == len(self.chunks)
            return buffer.path if buffer is not None and complete else None

    def available_chunks(self, version: int) -> bytes:
        """One byte for each chunk: 1 if it can be lent, otherwise 0."""
        with self._lock:
            flags = bytearray(len(self.chunks))
            for buffer in self._buffers:
                if buffer.version == version:
                    for index in buffer.digests:
                        flags[index] = 1
            return bytes(flags)

    @contextmanager
    def lent(self, version: int, index: int, digest: str) -> Iterator[list[memoryview] | None]:
        """A chunk's bytes, which do not change within the block; None if it is not here with this digest."""
        with self._lock:
            having = (b for b in self._buffers if b.version == version and b.digests.get(index) == digest)
            buffer = next(having, None)
            pin = self._pin(buffer)
        with pin:
            yield None if buffer is None else buffer.views(self.chunks[index].ranges)

    def versions(self) -> dict[int, int]:
        """Number of chunks by version."""
        with self._lock:
            return {b.version: len(b.digests) for b in self._buffers if b.version is not None}

    def close(self) -> None:
        """Close both buffers."""
        with self._lock:
            for buffer in self._buffers:
                buffer.close()

    def _buffer_of(self, manifest: Manifest) -> Buffer | None:
        """The buffer with the most chunks of the version; None if neither has any."""
        best = max(self._buffers, key=lambda b: b.agreeing(manifest))
        return best if best.agreeing(manifest) else None

    def _free(self, version: int) -> list[Buffer]:
        """The buffers that a pull may overwrite: not the newest complete version, not one that ranks write."""
        complete = [b for b in self._buffers if len(b.digests) == len(self.chunks)]
        newest_complete = max(complete, key=lambda b: b.order, default=None)
        free = [b for b in self._buffers if b is not newest_complete and not (b.is_local_write and not b.digests)]
        if not free:
            raise RunError(
                f"the host has no free memory for weight version {version}: one buffer has a complete version, trainer "
                "ranks write into the other one",
                location="weights",
            )
        return free

    def _take(self, free: Iterable[Buffer], version: int, is_local_write: bool) -> Buffer:
        """Take one of the free buffers for ``version``: incomplete before complete, older before newer."""
        buffer = min(free, key=lambda b: (len(b.digests) == len(self.chunks), b.order))
        self._serial += 1
        if buffer.begin(version, self._serial, is_local_write):
            return buffer
        # An engine that hangs while loading, or a slow host that fetches, still uses its bytes, and keeps them.
        fresh = Buffer(self._nbytes)
        fresh.begin(version, self._serial, is_local_write)
        self._buffers[self._buffers.index(buffer)] = fresh
        buffer.close()
        return fresh

    def _allocate(self, ranks: Collection[int]) -> None:
        """Allocate memory for these ranks' shards in both buffers, so the next version has its pages, too.

        If the memory is missing, this raises an error; a later write would be killed by a signal. For large weights it
        takes minutes, so the lock is not held: other hosts must be served.
        """
        size = self._nbytes + ALIGNMENT
        for buffer in list(self._buffers):
            with self._lock:
                allocated_ranks = buffer.allocated.union(ranks)
                if allocated_ranks == buffer.allocated or buffer not in self._buffers:
                    continue
                descriptor = os.dup(buffer.descriptor)  # it stays open when the buffer is closed
            everything = len(allocated_ranks) == self.ranks
            shards = (chunk for chunk in self.chunks if chunk.rank in allocated_ranks)
            ranges = [ByteRange(0, size)] if everything else pages_of(shards)
            try:
                for start, stop in ranges:
                    os.posix_fallocate(descriptor, start, min(stop, size) - start)
            except OSError as error:
                raise _no_memory(sum(stop - start for start, stop in ranges), error) from None
            finally:
                os.close(descriptor)
            with self._lock:
                buffer.allocated = allocated_ranks

    def _pin(self, buffer: Buffer | None) -> ExitStack:
        """Keep the buffer's bytes from being overwritten until the stack is closed. Call it with the lock held."""
        pin = ExitStack()
        if buffer is not None:
            buffer.pins += 1
            pin.callback(self._unpin, buffer)
        return pin

    def _unpin(self, buffer: Buffer) -> None:
        with self._lock:
            buffer.pins -= 1


def digest_of(views: Iterable[memoryview]) -> str:
    """BLAKE3 (hex) of the views' bytes in order."""
    from blake3 import blake3

    hasher = blake3()
    for view in views:
        hasher.update(view)
    return str(hasher.hexdigest())


def _no_memory(nbytes: int, error: OSError) -> RunError:
    return RunError(
        f"{nbytes / GIB:.2f} GiB of memory for weights cannot be allocated: {error.strerror}",
        location="weights",
        hint="a host keeps two versions of the weights in memory, or of the shards of its trainer ranks",
    )
