"""Changes to the journal of a run that nothing drives. The caller holds the run's lock, so no buffer writes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from sqlite3 import Connection

from asyncrl_cli.journal.progress import ACCEPTED
from asyncrl_cli.journal.schema import FILE, explained, open_for_writing


def checkpoints_removed(run: Path, steps: Sequence[int]) -> None:
    """The checkpoints of these steps are removed from disk. Without a journal there is nothing to record."""
    if steps and (run / FILE).is_file():
        with _opened(run / FILE) as journal:
            journal.executemany(
                "UPDATE checkpoints SET removed_at = ? WHERE step = ?", [(time.time(), step) for step in steps]
            )


def forget_training(journal: Path, first: int) -> None:
    """The steps from ``first`` (from 0) on are trained again: what they reported is dropped, as it may differ now."""
    with _opened(journal) as connection:
        connection.execute(
            "UPDATE batches SET trained_at = NULL, digest = NULL, metrics = NULL WHERE step >= ?", (first,)
        )


def accept_data(journal: Path) -> None:
    """The prompts admitted so far are never compared with the data again."""
    with _opened(journal) as connection:
        connection.execute("INSERT OR REPLACE INTO meta SELECT ?, coalesce(max(serial), 0) FROM groups", (ACCEPTED,))


@contextmanager
def _opened(journal: Path) -> Iterator[Connection]:
    with explained(journal), closing(open_for_writing(journal)) as connection:
        yield connection
