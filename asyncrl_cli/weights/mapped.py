"""A version's tensors in a process of the host that has it: a trainer rank that writes, an engine that loads."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl_cli.weights.layout import ByteRange, TensorSlot, size_of
from asyncrl_cli.weights.manifest import ReplicaGone
from asyncrl_cli.weights.replica import VERSION_BYTES

log = logging.getLogger(__name__)

STAGED_BYTES = 64 * 2**20
"""Bytes of whole rows that a GPU holds at a time where it keeps a part of them."""


class Copies:
    """On CPU: any memory will do, and a copy is made when the call returns."""

    def pin(self, memory: Tensor, parts: Iterable[ByteRange]) -> None:
        """Prepare these bytes of ``memory`` [bytes, uint8] for copies, until ``unpin``. A copy lies within one part."""

    def unpin(self, memory: Tensor) -> None:
        """Undo ``pin``, before the memory is unmapped."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy ``source`` into ``target``, which has its shape, in the dtype of ``target``.

        Neither may be written before ``wait`` returns.
        """
        target.copy_(source)

    def wait(self) -> None:
        """Return when all copies are made. Raises ``RuntimeError`` when one has failed."""

    def loads(self) -> AbstractContextManager[object]:
        """Inside the block vLLM's loaders copy out of pinned memory at its speed, and may return before ``wait``."""
        return nullcontext()


class CudaCopies(Copies):
    """On a GPU: copies out of it are made during its computations, in a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._pinned: dict[int, list[int]] = {}  # addresses of pinned parts, by the address of their memory

    def pin(self, memory: Tensor, parts: Iterable[ByteRange]) -> None:
        """See ``Copies``. Memory that cannot be pinned is copied more slowly, and a warning says so."""
        address = memory.data_ptr()
        pinned = self._pinned.setdefault(address, [])
        with torch.cuda.device(self._device):  # else a thread uses the first GPU, which may be another engine's
            for start, stop in parts:
                error = self._cudart.cudaHostRegister(address + start, stop - start, 0).value
                if error:
                    log.warning(
                        "weights are copied slowly: %d bytes cannot be pinned (CUDA error %d)", stop - start, error
                    )
                    self._forget_error()
                    return
                pinned.append(address + start)

    def unpin(self, memory: Tensor) -> None:
        """See ``Copies``."""
        with torch.cuda.device(self._device):
            for address in self._pinned.pop(memory.data_ptr(), []):
                if error := self._cudart.cudaHostUnregister(address).value:
                    log.warning("memory of weights stays pinned (CUDA error %d)", error)
                    self._forget_error()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See ``Copies``. ``source`` may be freed immediately."""
        if not source.is_cuda:  # a weight that its rank keeps in CPU memory (``trainer.offload``)
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def wait(self) -> None:
        """See ``Copies``. Waits for vLLM's own copies, too, which are in another stream."""
        torch.cuda.synchronize(self._device)

    def loads(self) -> AbstractContextManager[object]:
        """See ``Copies``."""
        return PinnedLoads(self._device, {address: bool(parts) for address, parts in self._pinned.items()})

    def _forget_error(self) -> None:
        # CUDA keeps the error of such a call for the next kernel, which would fail with it: this one does.
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


class PinnedLoads(TorchDispatchMode):
    """Copies parts of the replica to a device, wherever ``Tensor.copy_`` is asked to.

    Torch gathers a part that is not one piece on one CPU thread, and copies it from memory that is not pinned. That is
    slower than to copy all columns from pinned memory and to keep the part on the device (decision 0109).
    """

    def __init__(self, device: torch.device, memories: Mapping[int, bool]) -> None:
        """``memories``: addresses of mapped memory, and whether it could be pinned."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._memories = device, memories
        self.staged_bytes = 0
        """Bytes that went to the device as more than the part, and were divided there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._is_load(args[0], args[1]):
            self._load(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _is_load(self, target: Tensor, source: Tensor) -> bool:
        same = target.device.type == self._device.type and (target.dtype, target.shape) == (source.dtype, source.shape)
        return same and source.untyped_storage().data_ptr() in self._memories

    def _load(self, target: Tensor, source: Tensor) -> None:
        if source.is_contiguous():
            target.copy_(source, non_blocking=True)
        elif source.dim() > 2:  # experts: a part of each may be one piece
            for own, part in zip(target, source, strict=True):
                self._load(own, part)
        elif not self._memories[source.untyped_storage().data_ptr()]:
            target.copy_(source)
        else:  # some columns of all rows
            rows = max(1, STAGED_BYTES // max(1, source.stride(0) * source.element_size()))
            for first in range(0, source.shape[0], rows):
                own, part = target[first : first + rows], source[first : first + rows]
                span = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
                piece = torch.empty(span, dtype=part.dtype, device=own.device)
                piece.copy_(part.as_strided((span,), (1,)), non_blocking=True)
                self.staged_bytes += piece.nbytes
                own.copy_(piece.as_strided(part.shape, part.stride(), 0))


def copies_of(device: torch.device) -> Copies:
    """The copies of a process that computes on ``device``."""
    return CudaCopies(device) if device.type == "cuda" else Copies()


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

    def loads(self) -> AbstractContextManager[object]:
        """See ``Copies``: for loaders of these tensors."""
        return self._copies.loads()

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
