"""Read and write files by paths that cannot leave the work folder.

Each folder on the path is opened relative to the one before it, and no link is followed. So the file is inside the work
folder, even if a process moves or links folders at the same time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

MAX_BYTES = 2**28
"""Bytes of the largest file that is read or written. A sparse file can be larger than any disk."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: opening a named pipe must not wait for a peer


def path_names(path: str) -> list[str]:
    """Split a relative path. Raises ``OSError`` if it is absolute or empty, or contains ``..`` or NUL."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    if path.startswith("/") or not names or ".." in names or "\0" in path:
        raise OSError(errno.EINVAL, "not a path inside the work folder (give a path relative to it)", path)
    return names


def write(root: str, path: str, data: bytes) -> None:
    """Write a file below ``root`` and make its folders. Raises ``OSError``."""
    with _opened(root, path, os.O_WRONLY | os.O_CREAT) as file:
        os.ftruncate(file, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]


def read(root: str, path: str) -> bytes:
    """Read a file below ``root``. Raises ``OSError``."""
    with _opened(root, path, os.O_RDONLY) as file:
        if os.fstat(file).st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_BYTES >> 20} MiB", path)
        chunks = []
        while chunk := os.read(file, 2**20):
            chunks.append(chunk)
        return b"".join(chunks)


@contextmanager
def _opened(root: str, path: str, flags: int) -> Iterator[int]:
    """Open a file below ``root``; with ``O_CREAT`` make its folders, too."""
    *folders, name = path_names(path)
    with ExitStack() as stack:

        def open_below(name: str, flags: int, parent: int | None) -> int:
            descriptor = os.open(name, flags, 0o644, dir_fd=parent)
            stack.callback(os.close, descriptor)
            return descriptor

        folder = open_below(root, _FOLDER, None)
        for folder_name in folders:
            if flags & os.O_CREAT:
                with suppress(FileExistsError):
                    os.mkdir(folder_name, 0o755, dir_fd=folder)
            folder = open_below(folder_name, _FOLDER, folder)
        file = open_below(name, flags | _FILE, folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a file", path)
        yield file
