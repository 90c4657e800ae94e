"""Maps a version's tensors from the host's replica, for trainer ranks that write and engines that load."""

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
"""Bytes of whole rows that a GPU holds temporarily when it needs only some of their columns."""


class Copies:
    """Copies on a CPU: from any memory, and complete when the call returns."""

    def pin(self, memory: Tensor, ranges: Iterable[ByteRange]) -> None:
        """Prepare ``parts`` of ``memory`` [bytes, uint8] for copies until ``unpin``. Each copy lies within one part."""

    def unpin(self, memory: Tensor) -> None:
        """Undo ``pin``, before the memory is unmapped."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy ``source`` into ``target`` with the same shape and the dtype of ``target``.

        Neither may be written before ``wait`` returns.
        """
        target.copy_(source)

    def wait(self) -> None:
        """Wait until all copies are complete. Raises ``RuntimeError`` if one failed."""

    def loads(self) -> AbstractContextManager[object]:
        """Inside the block, vLLM's loaders copy from pinned memory at full speed; the copies may need ``wait``."""
        return nullcontext()


class CudaCopies(Copies):
    """Copies on a GPU. Copies to the host run in a separate stream during the GPU's computations."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._pinned: dict[int, list[int]] = {}  # addresses of pinned parts, by the address of their memory

    def pin(self, memory: Tensor, ranges: Iterable[ByteRange]) -> None:
        """See ``Copies``. If memory cannot be pinned, a warning says that copies are slow."""
        address = memory.data_ptr()
        pinned = self._pinned.setdefault(address, [])
        with torch.cuda.device(self._device):  # a thread's default is the first GPU, perhaps another engine's
            for start, stop in ranges:
                if error := self._cudart.cudaHostRegister(address + start, stop - start, 0).value:
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
        """See ``Copies``. Also waits for vLLM's own copies, which are in another stream."""
        torch.cuda.synchronize(self._device)

    def loads(self) -> AbstractContextManager[object]:
        """See ``Copies``."""
        return PinnedLoads(self._device, {address: bool(addresses) for address, addresses in self._pinned.items()})

    def _forget_error(self) -> None:
        # CUDA reports the error of such a call again at the next kernel, so let a kernel fail here.
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


class PinnedLoads(TorchDispatchMode):
    """Replaces ``Tensor.copy_`` from the replica to a device by faster copies.

    If a part is not contiguous, torch gathers it on one CPU thread, and copies it from memory that is not pinned. It is
    faster to copy all columns from pinned memory and select the part on the device (decision 0052).
    """

    def __init__(self, device: torch.device, memories: Mapping[int, bool]) -> None:
        """``memories``: True for pinned memory, by the address of the mapping."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._memories = device, memories
        self.staged_bytes = 0
        """Number of bytes copied with all columns, from which the device selected a part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            same = (target.device.type, target.dtype, target.shape) == (self._device.type, source.dtype, source.shape)
            if same and source.untyped_storage().data_ptr() in self._memories:
                self._load(target, source)
                return target
        return func(*args, **(kwargs or {}))

    def _load(self, target: Tensor, source: Tensor) -> None:
        if source.is_contiguous():
            target.copy_(source, non_blocking=True)
        elif source.dim() > 2:  # experts: the part of each expert may be contiguous
            for target_rows, source_rows in zip(target, source, strict=True):
                self._load(target_rows, source_rows)
        elif not self._memories[source.untyped_storage().data_ptr()]:
            target.copy_(source)
        else:  # some columns of all rows
            rows = max(1, STAGED_BYTES // max(1, source.stride(0) * source.element_size()))
            for row in range(0, source.shape[0], rows):
                target_rows, source_rows = target[row : row + rows], source[row : row + rows]
                shape, strides = source_rows.shape, source_rows.stride()
                span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
                staged = torch.empty(span, dtype=source.dtype, device=target.device)
                staged.copy_(source_rows.as_strided((span,), (1,)), non_blocking=True)
                self.staged_bytes += staged.nbytes
                target_rows.copy_(staged.as_strided(shape, strides, 0))


def copies_of(device: torch.device) -> Copies:
    """The copies for a process that computes on ``device``."""
    return CudaCopies(device) if device.type == "cuda" else Copies()


class MappedReplica:
    """Maps the two buffers of the host's replica, each only once: mapping costs more than a copy."""

    def __init__(
        self, slots: tuple[TensorSlot, ...], copies: Copies | None = None, pinned: Sequence[ByteRange] | None = None
    ) -> None:
        """``copies``: how to copy from and to the memory, by default on a CPU. ``pinned``: the bytes to pin for it, by
        default all."""
        self._slots = slots
        self._nbytes = size_of(slots)
        self._copies = copies or Copies()
        self._pinned = (ByteRange(0, self._nbytes + VERSION_BYTES),) if pinned is None else pinned
        self._mapped: dict[int, tuple[int, torch.Tensor]] = {}  # descriptor and memory, by inode

    @contextmanager
    def open(self, path: str, version: int) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of ``version`` by name, as views of the shared memory, which is not reused within the block. The
        block's end waits for all copies. Raises ``ReplicaGone`` if the path is outdated."""
        descriptor, memory = self._memory(path)
        # Keeps ``Buffer.begin`` from reusing the memory. The agent holds its own lock only for microseconds.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            current_version = int(memory[self._nbytes : self._nbytes + VERSION_BYTES].view(torch.int64))
            if current_version != version:
                message = f"the memory of weight version {version} was reused for version {current_version}"
                raise ReplicaGone(message, location=path)
            try:
                yield {
                    slot.name: memory[slot.offset : slot.offset + slot.nbytes].view(slot.torch_dtype).view(slot.shape)
                    for slot in self._slots
                }
            finally:
                self._copies.wait()  # before the lock is released
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def loads(self) -> AbstractContextManager[object]:
        """See ``Copies``: for loaders of these tensors."""
        return self._copies.loads()

    def close(self) -> None:
        """Close the descriptors. The memory is unmapped with the last tensor."""
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
        expected_bytes = self._nbytes + VERSION_BYTES
        if status.st_size < expected_bytes:  # mapping it would enlarge it
            os.close(descriptor)
            raise ReplicaGone(f"the memory has {status.st_size} bytes, expected {expected_bytes}", location=path)
        if len(self._mapped) == 2:  # the agent has replaced a buffer, or was restarted
            self._release(next(iter(self._mapped)))
        memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=expected_bytes, dtype=torch.uint8)
        self._copies.pin(memory, self._pinned)
        self._mapped[status.st_ino] = descriptor, memory
        return self._mapped[status.st_ino]

    def _release(self, inode: int) -> None:
        descriptor, memory = self._mapped.pop(inode)
        self._copies.unpin(memory)
        os.close(descriptor)
