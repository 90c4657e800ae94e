"""Whether several hosts see one and the same folder: each reads what the driver wrote there, and the driver reads what
each of them wrote. Equal paths prove nothing: every host may have its own disk there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl_cli.core.errors import ConfigError

VISIBLE_S = 10.0
"""Seconds that a file of one host may take to appear on another. Network file systems cache the contents of a
folder for some seconds."""
PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Mark:
    """The files that the driver wrote to be found: a new folder that contains a secret."""

    folder: Path
    secret: str


@contextmanager
def marked(folder: Path) -> Iterator[Mark]:
    """A context with a mark in ``folder``, which is created if it is missing. At the end all that was created is
    removed.

    Raises ``ConfigError`` when the folder cannot be written.
    """
    folder = folder.absolute()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    mark = Mark(folder / f".asyncrl-shared-{secrets.token_hex(8)}", secrets.token_hex(16))
    try:
        try:
            mark.folder.mkdir(parents=True)
            (mark.folder / "driver").write_text(mark.secret)
        except OSError as error:
            hint = "name a folder that every host can write, on a shared file system"
            raise ConfigError(f"{folder}: {error.strerror}", location="runs_dir", hint=hint) from None
        yield mark
    finally:
        shutil.rmtree(mark.folder, ignore_errors=True)
        for path in made:
            with suppress(OSError):  # another process has put something there
                path.rmdir()


def answer(mark: Mark, name: str, limit_s: float = VISIBLE_S) -> str:
    """On another host: read the driver's file and write one of this ``name``. Returns the problem, or an empty text."""
    folder = mark.folder.parent
    if not _appears(mark.folder / "driver", mark.secret, limit_s):
        return f"does not see what the driver writes into {folder}" if folder.is_dir() else f"has no folder {folder}"
    try:
        _write(mark.folder / name, mark.secret)
    except OSError as error:
        return f"cannot write into {folder}: {error.strerror}"
    return ""


def missing_answer(mark: Mark, name: str, limit_s: float = VISIBLE_S) -> str:
    """On the driver's host: the problem with the file that ``answer`` wrote on another host, or an empty text."""
    if not _appears(mark.folder / name, mark.secret, limit_s):
        return f"writes into another folder {mark.folder.parent} than the driver's"
    return ""


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _appears(path: Path, text: str, limit_s: float) -> bool:
    """Whether there is a file with this text within ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while True:
        with suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(PAUSE_S)
