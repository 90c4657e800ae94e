"""Checks that several hosts see the same folder: each host finds the driver's file, and the driver finds a file from
each host. Equal paths prove nothing, because every host may have its own disk there. The files are in a new folder with
a random name, so they cannot come from an earlier check.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncrl_cli.core.errors import ConfigError

VISIBLE_S = 10.0
"""Time limit, in seconds, for one host's file to appear on another. Network file systems cache a folder's contents for
some seconds."""
PAUSE_S = 0.1


@contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """Make a new folder with the driver's file inside ``folder``, and remove everything created at the end.

    Creates ``folder`` if it is missing. Raises ``ConfigError`` if it cannot be written.
    """
    folder = folder.absolute()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    mark = folder / f".asyncrl-shared-{secrets.token_hex(16)}"
    try:
        try:
            mark.mkdir(parents=True)
            _write(mark / "driver")
        except OSError as error:
            hint = "name a folder that every host can write, on a shared file system"
            raise ConfigError(f"{folder}: {error.strerror}", location="runs_dir", hint=hint) from None
        yield mark
    finally:
        shutil.rmtree(mark, ignore_errors=True)
        for path in made:
            with suppress(OSError):  # another process has put something there
                path.rmdir()


def answer(mark: Path, name: str, limit_s: float = VISIBLE_S) -> str:
    """On another host: find the driver's file, and write a file ``name``. Returns the problem, or empty text."""
    folder = mark.parent
    if not _appears(mark / "driver", limit_s):
        return f"does not see the driver's files in {folder}" if folder.is_dir() else f"has no folder {folder}"
    try:
        _write(mark / name)
    except OSError as error:
        return f"cannot write into {folder}: {error.strerror}"
    return ""


def missing_answer(mark: Path, name: str, limit_s: float = VISIBLE_S) -> str:
    """On the driver's host: find the file that ``answer`` wrote on another host. Returns the problem, or empty text."""
    return "" if _appears(mark / name, limit_s) else f"writes into another folder {mark.parent} than the driver's"


def _write(path: Path) -> None:
    with path.open("w") as file:
        file.write("asyncrl")
        file.flush()
        os.fsync(file.fileno())


def _appears(path: Path, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not path.is_file():
        if time.monotonic() >= deadline:
            return False
        time.sleep(PAUSE_S)
    return True
