"""Writing a file that a user has named."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def is_replaceable(path: Path) -> bool:
    """Whether a path may get a new file: nothing is there, or a regular file. A device, a pipe and what a link points
    to (`/dev/stdout`) have to be written to as they are."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, with its folder made. A regular file appears whole or not at all, so that no reader sees half
    of it. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_replaceable(path):
        with path.open("wb") as file:
            yield file
        return
    aside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with aside.open("xb") as file:
            yield file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
