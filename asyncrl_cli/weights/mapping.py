"""One memory mapping that carries the weights from the trainer to every engine of a host.

The mapping is anonymous memory (``memfd_create``), reached by other processes as ``/proc/PID/fd/N``. No name
exists in /dev/shm, so nothing can be left behind: the kernel frees the pages when the last process that
maps them is gone, however it went.

Writer and readers take turns: the trainer writes version v only after every engine has finished loading
version v - 1, which the orchestrator enforces by publishing one version at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes. Tensors start on cache-line boundaries."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The position of one named tensor in the mapping; ``offset`` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


def plan_slots(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[TensorSlot, ...]:
    """Lay tensors out one after another, each on an ``ALIGNMENT`` boundary."""
    slots, offset = [], 0
    for name, dtype, shape in tensors:
        slot = TensorSlot(name, str(dtype).removeprefix("torch."), tuple(shape), offset)
        slots.append(slot)
        offset += -(-slot.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(slots)


class WeightMapping:
    """The mapped bytes and the tensors laid over them."""

    def __init__(self, path: str, slots: tuple[TensorSlot, ...], descriptor: int | None = None) -> None:
        """Map ``path``; raises ``RuntimeError`` when it is gone or smaller than the slots need."""
        self.path = path
        self.slots = slots
        self._descriptor = descriptor
        self._nbytes = slots[-1].offset + slots[-1].nbytes if slots else 0
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise RuntimeError(f"the weights at {path} are gone: {error.strerror}") from None
        if size < self._nbytes:  # mapping it would make it larger
            raise RuntimeError(f"the weights at {path} have {size} bytes, expected are {self._nbytes}")
        self._bytes = torch.from_file(path, shared=True, size=self._nbytes, dtype=torch.uint8)

    @classmethod
    def create(cls, slots: tuple[TensorSlot, ...]) -> WeightMapping:
        """Allocate the memory in this process, which must outlive the readers' calls of ``open``."""
        descriptor = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, slots[-1].offset + slots[-1].nbytes)
        return cls(f"/proc/{os.getpid()}/fd/{descriptor}", slots, descriptor)

    @classmethod
    def open(cls, path: str, slots: Iterable[dict[str, Any]]) -> WeightMapping:
        """Map what another process described by ``describe``."""
        return cls(path, tuple(TensorSlot(s["name"], s["dtype"], tuple(s["shape"]), s["offset"]) for s in slots))

    def describe(self) -> dict[str, Any]:
        """The arguments of ``open``, as plain values."""
        return {"path": self.path, "slots": [asdict(slot) for slot in self.slots]}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, as views of the mapped memory."""
        for slot in self.slots:
            raw = self._bytes[slot.offset : slot.offset + slot.nbytes]
            yield slot.name, raw.view(slot.torch_dtype).view(slot.shape)

    def checksum(self) -> str:
        """BLAKE3 over all mapped bytes, in hex."""
        from blake3 import blake3

        return str(blake3(self._bytes.numpy().data).hexdigest())

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last mapping of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
