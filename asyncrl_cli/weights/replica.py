"""The weights in one host's memory: two versions at most, one that is served and one that arrives.

The memory is anonymous (``memfd_create``), reached by other processes of the host as ``/proc/PID/fd/N``: it has no name
that could be left behind, and the kernel frees it with the last process that maps it, however that ended. The two
buffers get their pages once and are used in turn: to write to fresh pages takes several times as long as the copy. A
host has pages for its ranks' shards, and for whole versions once it fetches.
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
"""After the weights: the version of the memory. A reader recognizes an outdated path by it."""
GIB = 2**30


class Buffer:
    """The memory of one version, as the replica that owns it sees it."""

    def __init__(self, nbytes: int) -> None:
        """Map memory without any pages. Raises ``RunError`` when it cannot be mapped."""
        self.version: int | None = None  # None: nothing was written yet
        self.serial = 0  # of two buffers with the same version, the one with the higher number was begun later
        self.written_here = False  # by trainer ranks of this host, not by a pull
        self.digests: dict[int, str] = {}  # BLAKE3 (hex) of each chunk that is checked, by index
        self.pins = 0  # number of threads that read or write its bytes now
        self.allocated = frozenset[int]()  # the ranks with memory for their shards
        self._nbytes = nbytes
        self._descriptor = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC)
        size = nbytes + ALIGNMENT
        try:
            os.ftruncate(self._descriptor, size)
            mapped = mmap.mmap(self._descriptor, size)
        except OSError as error:
            os.close(self._descriptor)
            raise _no_memory(size, error) from None
        self._bytes = memoryview(mapped)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def order(self) -> tuple[int, int]:
        """Of two buffers the older one has the lower value."""
        return (-1 if self.version is None else self.version, self.serial)

    @property
    def being_written(self) -> bool:
        return self.written_here and not self.digests

    def begin(self, version: int, serial: int, written_here: bool) -> bool:
        """Become the memory of ``version``, without a checked chunk; False when its bytes are in use."""
        if self.pins:
            return False
        try:
            # Readers hold a shared lock while they load (mapped.py): their weights must not change.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.version, self.serial, self.written_here, self.digests = version, serial, written_here, {}
        self._bytes[self._nbytes : self._nbytes + VERSION_BYTES] = version.to_bytes(VERSION_BYTES, "little")
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def duplicate(self) -> int:
        """Another descriptor of the memory, which stays open when this buffer is closed. The caller closes it."""
        return os.dup(self._descriptor)

    def views(self, ranges: Iterable[ByteRange]) -> list[memoryview]:
        """A writable view of each range."""
        return [self._bytes[start:stop] for start, stop in ranges]

    def agreeing(self, manifest: Manifest) -> int:
        """How many chunks it has of the version that the manifest describes."""
        if self.version != manifest.version:
            return 0
        return sum(manifest.digests[index] == digest for index, digest in self.digests.items())

    def close(self) -> None:
        """Give the descriptor back; the memory stays with those who have it mapped."""
        os.close(self._descriptor)


class Replica:
    """Two buffers, and what is known of their bytes. Any thread may call any method."""

    def __init__(self, slots: tuple[TensorSlot, ...], ranks: int) -> None:
        """Map both buffers. Raises ``RunError`` when that is not possible."""
        self.slots = slots
        self.ranks = ranks
        self.chunks = chunks_of(slots, ranks)
        self._nbytes = size_of(slots)
        self._buffers = [Buffer(self._nbytes), Buffer(self._nbytes)]
        self._serial = 0
        self._lock = RLock()

    def begin(self, version: int, keep: Manifest | None = None, ranks: Collection[int] | None = None) -> str:
        """The path of a buffer into which ranks of this host (by default all) write their shards of ``version``.

        ``keep``: the version that engines serve. The buffer that has it, or this host's part of it, is not taken, also
        when it is of the same version. Raises ``RunError`` when the host does not have the memory.
        """
        with self._lock:
            kept = None if keep is None else self._of(keep)
            path = self._take([b for b in self._buffers if b is not kept], version, written_here=True).path
        self._allocate(range(self.ranks) if ranks is None else ranks)
        return path

    def digest(self, version: int, ranks: Collection[int], threads: ThreadPoolExecutor) -> dict[int, str]:
        """The digests of the chunks of these ranks, by index, once the ranks have written; from here on they are held.

        Raises ``RunError`` when the version was not begun here, or another one has begun in its place.
        """
        replaced = RunError(f"weight version {version} is not being written on this host", location="weights")
        with self._lock:
            begun = [b for b in self._buffers if b.version == version and b.written_here]
            buffer = max(begun, key=lambda b: b.serial, default=None)
            pin = self._pin(buffer)
        with pin:
            if buffer is None:
                raise replaced
            chunks = [chunk for chunk in self.chunks if chunk.rank in ranks]
            found = threads.map(lambda chunk: digest_of(buffer.views(chunk.ranges)), chunks)
            digests = {chunk.index: digest for chunk, digest in zip(chunks, found, strict=True)}
            with self._lock:
                if buffer not in self._buffers:
                    raise replaced
                buffer.digests |= digests
        return digests

    @contextmanager
    def receiving(self, manifest: Manifest) -> Iterator[Buffer]:
        """The buffer to complete the version in: the one that has some of its chunks already, or a free one.

        Chunks that it has with other bytes are forgotten. Those that the other buffer has with the same bytes are
        copied from there. Raises ``RunError`` when no buffer is free, or the host does not have the memory.
        """
        with self._lock:
            buffer = self._of(manifest) or self._take(self._free(manifest.version), manifest.version, False)
            held = {index for index, digest in buffer.digests.items() if digest == manifest.digests[index]}
            buffer.digests = {index: manifest.digests[index] for index in held}
            other = next(b for b in self._buffers if b is not buffer)
            same = [i for i, digest in other.digests.items() if digest == manifest.digests[i] and i not in held]
            pin, other_pin = self._pin(buffer), self._pin(other)
        with pin:
            self._allocate(range(self.ranks))
            with other_pin:
                for index in same:
                    ranges = self.chunks[index].ranges
                    for target, source in zip(buffer.views(ranges), other.views(ranges), strict=True):
                        target[:] = source
                    self.add(buffer, index, manifest.digests[index])
            yield buffer

    def add(self, buffer: Buffer, index: int, digest: str) -> None:
        """Note that the chunk's bytes are there, with this digest."""
        with self._lock:
            buffer.digests[index] = digest

    def path(self, manifest: Manifest) -> str | None:
        """The path of the version, if all of its chunks are here."""
        with self._lock:
            buffer = self._of(manifest)
            complete = buffer is not None and buffer.agreeing(manifest) == len(self.chunks)
            return buffer.path if buffer is not None and complete else None

    def held(self, version: int) -> bytes:
        """One byte for each chunk: 1 if it can be lent, else 0."""
        with self._lock:
            held = bytearray(len(self.chunks))
            for buffer in self._buffers:
                if buffer.version == version:
                    for index in buffer.digests:
                        held[index] = 1
            return bytes(held)

    @contextmanager
    def lent(self, version: int, index: int, digest: str) -> Iterator[list[memoryview] | None]:
        """The bytes of a chunk, which do not change in this context; None when it is not here with this digest."""
        with self._lock:
            having = (b for b in self._buffers if b.version == version and b.digests.get(index) == digest)
            buffer = next(having, None)
            pin = self._pin(buffer)
        with pin:
            yield None if buffer is None else buffer.views(self.chunks[index].ranges)

    def versions(self) -> dict[int, int]:
        """How many chunks there are of each version."""
        with self._lock:
            return {b.version: len(b.digests) for b in self._buffers if b.version is not None}

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            for buffer in self._buffers:
                buffer.close()

    def _of(self, manifest: Manifest) -> Buffer | None:
        """The buffer that has most of the version's chunks, if one has any."""
        best = max(self._buffers, key=lambda b: b.agreeing(manifest))
        return best if best.agreeing(manifest) else None

    def _free(self, version: int) -> list[Buffer]:
        """The buffers that a pull may overwrite: not the newest complete version, not one that ranks write."""
        complete = [b for b in self._buffers if len(b.digests) == len(self.chunks)]
        kept = max(complete, key=lambda b: b.order, default=None)
        free = [b for b in self._buffers if b is not kept and not b.being_written]
        if not free:
            raise RunError(
                f"the host has no free memory for weight version {version}: one buffer has a complete version, trainer "
                "ranks write into the other one",
                location="weights",
            )
        return free

    def _take(self, free: Iterable[Buffer], version: int, written_here: bool) -> Buffer:
        """One of the free buffers for ``version``: an incomplete one before a complete one, an older one before a newer
        one."""
        taken = min(free, key=lambda b: (len(b.digests) == len(self.chunks), b.order))
        self._serial += 1
        if taken.begin(version, self._serial, written_here):
            return taken
        # Its bytes are in use, by an engine that hangs while loading or a slow host that fetches, which keep them.
        fresh = Buffer(self._nbytes)
        fresh.begin(version, self._serial, written_here)
        self._buffers[self._buffers.index(taken)] = fresh
        taken.close()
        return fresh

    def _allocate(self, ranks: Collection[int]) -> None:
        """Have memory for the shards of these ranks in both buffers: the next version finds its pages there.

        Missing memory is an error here; later it would be a signal that kills the writer halfway. Not under the lock:
        for large weights this takes minutes, and others must be served.
        """
        size = self._nbytes + ALIGNMENT
        for buffer in list(self._buffers):
            with self._lock:
                wanted = buffer.allocated.union(ranks)
                if wanted == buffer.allocated or buffer not in self._buffers:
                    continue
                descriptor = buffer.duplicate()
            everything = len(wanted) == self.ranks
            shards = (chunk for chunk in self.chunks if chunk.rank in wanted)
            parts = [ByteRange(0, size)] if everything else pages_of(shards)
            try:
                for start, stop in parts:
                    os.posix_fallocate(descriptor, start, min(stop, size) - start)
            except OSError as error:
                raise _no_memory(sum(stop - start for start, stop in parts), error) from None
            finally:
                os.close(descriptor)
            with self._lock:
                buffer.allocated = wanted

    def _pin(self, buffer: Buffer | None) -> ExitStack:
        """Keeps the buffer's bytes from being overwritten until the context ends. Called with the lock held."""
        pin = ExitStack()
        if buffer is not None:
            buffer.pins += 1

            def unpin() -> None:
                with self._lock:
                    buffer.pins -= 1

            pin.callback(unpin)
        return pin


def digest_of(views: Iterable[memoryview]) -> str:
    """BLAKE3 (hex) of the views' bytes, one after another."""
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
