"""Records of an estimate: parts of memory, and the GPUs and hosts that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

GB = 10**9
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One use of memory."""

    name: str
    bytes: int
    note: str = ""  # the reason for its size


class MemoryRole(StrEnum):
    TRAINER = "trainer"  # a trainer rank's GPU
    ENGINE = "engine"  # an engine's GPU
    BOTH = "both"  # a shared GPU, while both use it
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Device:
    """One of ``count`` equal GPUs or hosts of a run."""

    role: MemoryRole
    name: str
    count: int
    parts: tuple[MemoryUse, ...]
    capacity: int | None  # bytes available for the parts; None: unknown

    @property
    def total(self) -> int:
        return sum(use.bytes for use in self.parts)


def nonzero_uses(uses: Iterable[MemoryUse]) -> tuple[MemoryUse, ...]:
    """Drop empty parts."""
    return tuple(use for use in uses if use.bytes)


def size_text(nbytes: int) -> str:
    """Format bytes in GB, or in MB below 0.1 GB."""
    return f"{nbytes / GB:,.1f} GB" if nbytes >= GB / 10 else f"{nbytes / 10**6:,.1f} MB"
