"""Reading much of a journal for somebody who may take it slowly.

SQLite cannot empty the journal's `-wal` while a snapshot is open, so a pager that stands still must not hold one.
"""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import TypeVar

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.journal.queries import snapshot

T = TypeVar("T")

IN_MEMORY_BYTES = 2**25
"""What is read goes to a temporary file beyond this size."""


def spooled(path: Path, read: Callable[[sqlite3.Connection], Iterable[T]]) -> Iterator[T]:
    """What ``read`` gives of one snapshot of the journal, handed out after that is closed.

    Raises ``JournalError``, and ``UserError`` when there is no room for the temporary file.
    """
    with SpooledTemporaryFile(IN_MEMORY_BYTES) as spool:
        try:
            with snapshot(path) as connection:
                for item in read(connection):
                    pickle.dump(item, spool, pickle.HIGHEST_PROTOCOL)
        except OSError as error:
            raise UserError(
                f"there is no room for a temporary file: {error.strerror}",
                location=str(path),
                hint="free space, or set TMPDIR to a folder with more of it",
            ) from error
        end = spool.tell()
        spool.seek(0)
        while spool.tell() < end:
            yield pickle.load(spool)
