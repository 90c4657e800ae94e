"""Writes files and folders atomically: they appear complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from asyncrl_cli.core.errors import ConfigError

POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of a file that Git LFS leaves in place of a large one until `git lfs pull`."""
LFS_HINT = "run `git lfs pull` in its repository"


def lfs_pointer(path: Path) -> Path | None:
    """Return the first Git LFS pointer: the file itself, or one in the folder or its folders; None without one."""
    files = sorted([*path.glob("*"), *path.glob("*/*")]) if path.is_dir() else [path]
    return next((file for file in files if file.is_file() and is_pointer(file)), None)


def is_pointer(file: Path) -> bool:
    """Return True if a file is a Git LFS pointer."""
    with file.open("rb") as opened:
        return opened.read(len(POINTER)) == POINTER


def require_folder(path: str | Path, location: str) -> None:
    """Raise ``ConfigError`` with this host's name if a folder does not exist here. ``location``: the spec's key."""
    if not os.path.isdir(path):
        raise ConfigError(
            f"{socket.gethostname()} has no folder {path}",
            location=location,
            hint="every host of the run needs it at the same path: put it on a file system that they share, or copy it",
        )


def read_regular(path: str | Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises ``OSError`` without reading anything
    else: a pipe would block, and a device or a sparse file may have no end."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than {limit:,}", str(path))
        return file.read(limit)


@contextmanager
def atomic_write(path: Path, *, private: bool = False, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which replaces ``path``, also a link, when the block ends without an error.

    ``private``: only the owner can read it. ``durable``: it is on disk when the block has ended. Raises ``OSError``.
    """
    unfinished = _unfinished(path)
    try:
        mode = 0o600 if private else 0o666
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        # Sync before the rename: after a power cut, the name must not lead to an empty file.
        os.replace(unfinished, path)
        if durable:
            sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)  # frees the space on a full disk


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill. It is renamed to ``path`` when the block ends without an error, and otherwise removed.

    It is on disk when the block has ended. Parent folders are created. Unfinished folders that killed processes left
    for the same ``path`` are removed. Raises ``OSError``, also if ``path`` is a folder that is not empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}-*"):
        if re.fullmatch("[0-9a-f]{8}", leftover.name.removeprefix(f".{path.name}-")):
            _remove_unlocked(leftover)
    unfinished = _unfinished(path)
    unlocked = unfinished.with_name(f"{unfinished.name}.new")
    unlocked.mkdir()
    lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems cannot lock folders; leftovers stay there
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(unlocked, unfinished)  # after the lock: another process removes an unlocked folder of this name
        yield unfinished
        for filled in (*unfinished.rglob("*"), unfinished):
            sync(filled)
        os.rename(unfinished, path)
        sync(path.parent)
    finally:
        os.close(lock)
        for folder in (unlocked, unfinished):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unlocked(folder: Path) -> None:
    with suppress(OSError):  # it is a file, or the process that fills it has locked it
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder within its folder; the new name is on disk when this returns."""
    os.rename(source, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Sync a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unfinished(path: Path) -> Path:
    """A hidden name on the same file system; random, because several processes may write ``path``."""
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")
