"""Copies between the tensors of a trainer rank or an engine and the host's replica, which is CPU memory.

A GPU copies from and to pinned memory by itself, at the speed of its bus. All other memory goes through a small buffer
of the driver, several times slower, while the caller waits (decision 0056).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.weights.layout import ByteRange

log = logging.getLogger(__name__)


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


class CudaCopies(Copies):
    """On a GPU: copies out of it are made beside its computations, in a stream of their own."""

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
        """See ``Copies``. ``source`` may be freed at once."""
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

    def _forget_error(self) -> None:
        # CUDA keeps the error of such a call for the next kernel, which would fail with it: this one does.
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


def copies_of(device: torch.device) -> Copies:
    """The copies of a process that computes on ``device``."""
    return CudaCopies(device) if device.type == "cuda" else Copies()
