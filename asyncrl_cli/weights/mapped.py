"""A version's tensors in a process of the host that has it: a trainer rank that writes, an engine that loads."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from asyncrl_cli.weights.copies import Copies
from asyncrl_cli.weights.layout import ByteRange, TensorSlot, size_of
from asyncrl_cli.weights.manifest import ReplicaGone
from asyncrl_cli.weights.replica import VERSION_BYTES


class MappedReplica:
    """Maps the two buffers of the host's replica, each once: mapping them again costs more than a copy."""

    def __init__(
        self, slots: tuple[TensorSlot, ...], copies: Copies | None = None, parts: Sequence[ByteRange] | None = None
    ) -> None:
        """``copies`` are made from and to this memory, from and to ``parts`` of it; by default to all of it, on CPU."""
        self._slots = slots
        self._nbytes = size_of(slots)
        self._copies = copies or Copies()
        self._parts = parts if parts is not None else (ByteRange(0, self._nbytes + VERSION_BYTES),)
        self._mapped: dict[int, tuple[int, torch.Tensor]] = {}  # by inode, with the descriptor that keeps it

    @contextmanager
    def open(self, path: str, version: int) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of ``version`` by name, as views of the shared memory. It is not used for another version before
        the context ends, which waits for all copies; a path that is outdated raises ``ReplicaGone``."""
        descriptor, memory = self._memory(path)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # the agent holds its own lock for microseconds (replica.py)
        try:
            found = int.from_bytes(bytes(memory[self._nbytes : self._nbytes + VERSION_BYTES].tolist()), "little")
            if found != version:
                raise ReplicaGone(
                    f"the memory of weight version {version} was reused for version {found}", location=path
                )
            try:
                yield {
                    slot.name: memory[slot.offset : slot.offset + slot.nbytes].view(slot.torch_dtype).view(slot.shape)
                    for slot in self._slots
                }
            finally:
                self._copies.wait()  # before the memory may be of another version
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the descriptors back; the memory goes with the last tensor."""
        while self._mapped:
            self._release(next(iter(self._mapped)))

    def _memory(self, path: str) -> tuple[int, torch.Tensor]:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ReplicaGone(f"the weights cannot be opened: {error.strerror}", location=path) from None
        status = os.fstat(descriptor)
        if status.st_ino in self._mapped:
            os.close(descriptor)
            return self._mapped[status.st_ino]
        needed = self._nbytes + VERSION_BYTES
        if status.st_size < needed:  # mapping it would make it larger
            os.close(descriptor)
            raise ReplicaGone(f"there are {status.st_size} bytes of weights, expected are {needed}", location=path)
        if len(self._mapped) == 2:  # the agent has replaced one, or is another process than before
            self._release(next(iter(self._mapped)))
        memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=needed, dtype=torch.uint8)
        self._copies.pin(memory, self._parts)
        self._mapped[status.st_ino] = descriptor, memory
        return self._mapped[status.st_ino]

    def _release(self, inode: int) -> None:
        descriptor, memory = self._mapped.pop(inode)
        self._copies.unpin(memory)
        os.close(descriptor)
