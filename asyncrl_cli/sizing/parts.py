"""The records of an estimate: parts of memory, and the GPUs and hosts that they are on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

GB = 10**9
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
UNITS = {"": GB, "GB": GB, "GIB": 2**30, "MB": 10**6, "MIB": 2**20, "TB": 10**12, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes memory."""

    name: str
    bytes: int
    note: str = ""  # the reason for its size


class Role(StrEnum):
    TRAINER = "trainer"  # the GPU of a rank
    ENGINE = "engine"  # a GPU of an engine
    BOTH = "both"  # a GPU that they share, while both use it
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Device:
    """One of ``count`` equal GPUs or hosts of a run."""

    role: Role
    name: str
    count: int
    parts: tuple[Part, ...]
    capacity: int | None  # bytes that it has for the parts; None where that is not known
    gpu: int | None = None  # bytes of the GPU; more than the capacity if this is a share of a GPU

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)


def some(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts that are not empty."""
    return tuple(part for part in parts if part.bytes)


def memory_size(text: str) -> int:
    """Bytes of a size such as `80GB`, `79.6 GiB` or `80` (GB). Raises ``ValueError``."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is not a size such as 80GB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def shown(nbytes: int) -> str:
    """Bytes in GB, or MB where that is less than a tenth."""
    return f"{nbytes / GB:,.1f} GB" if nbytes >= GB / 10 else f"{nbytes / 10**6:,.1f} MB"
