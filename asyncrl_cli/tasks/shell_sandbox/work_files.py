"""Files of the work folder, by paths that cannot leave it.

Every folder on the way is opened in the one before it, and no link is followed: whatever is moved or linked meanwhile,
the file is one of the work folder's.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

MOST_BYTES = 2**28
"""Bytes of the largest file that is read or written; a file with holes may claim to be larger than any disk."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe must not wait for its other end


def parts_of(path: str) -> list[str]:
    """The names in a relative path. Raises ``OSError`` for one that is absolute, empty, or has ``..`` or NUL in it."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    if path.startswith("/") or not names or ".." in names or "\0" in path:
        raise OSError(errno.EINVAL, "not a path inside the work folder (give one that is relative to it)", path)
    return names


def write(root: str, path: str, data: bytes) -> None:
    """Write a file of ``root``, with its folders. Raises ``OSError``."""
    folder, name = _parent(root, path, make=True)
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | _FILE, 0o644, dir_fd=folder)
        try:
            _check(file, path)
            os.ftruncate(file, 0)
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
        finally:
            os.close(file)
    finally:
        os.close(folder)


def read(root: str, path: str) -> bytes:
    """The content of a file of ``root``. Raises ``OSError``."""
    folder, name = _parent(root, path, make=False)
    try:
        file = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
        try:
            _check(file, path)
            if os.fstat(file).st_size > MOST_BYTES:
                raise OSError(errno.EFBIG, f"larger than {MOST_BYTES >> 20} MiB", path)
            pieces = []
            while piece := os.read(file, 2**20):
                pieces.append(piece)
            return b"".join(pieces)
        finally:
            os.close(file)
    finally:
        os.close(folder)


def _parent(root: str, path: str, make: bool) -> tuple[int, str]:
    """The open folder of a file, and the file's name in it."""
    *folders, name = parts_of(path)
    opened = os.open(root, _FOLDER)
    for part in folders:
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=opened)
            below = os.open(part, _FOLDER, dir_fd=opened)
            is_link = not os.path.samestat(os.fstat(below), os.stat(part, dir_fd=opened, follow_symlinks=False))
        finally:
            os.close(opened)
        opened = below
        if is_link:  # gVisor follows a link to a folder
            os.close(opened)
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    return opened, name


def _check(file: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "not a file", path)
