"""Computes checksums of files while they are written, so that they need not be read again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Digest:
    """The size and the BLAKE3 checksum of a file."""

    bytes: int
    blake3: str


class DigestedFile:
    """A new file that is written sequentially; when it is closed, it is synced to disk."""

    def __init__(self, path: str | Path) -> None:
        from blake3 import blake3

        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._hash = blake3(max_threads=blake3.AUTO)
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``."""
        self._hash.update(data)
        self._bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Does nothing; writers of files expect this method."""
        self._file.flush()

    @property
    def digest(self) -> Digest:
        """The digest of everything written so far."""
        return Digest(self._bytes, self._hash.hexdigest())
