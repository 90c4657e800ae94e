"""Changes to the journal of a run without a driver. The caller holds the run's lock, so no buffer writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from asyncrl_cli.journal.progress import ACCEPTED
from asyncrl_cli.journal.schema import FILE, explained, open_for_writing


def checkpoints_removed(run: Path, steps: Sequence[int]) -> None:
    """Record that the checkpoints of these steps are removed from disk, unless the run has no journal."""
    journal = run / FILE
    if steps and journal.is_file():
        with explained(journal), closing(open_for_writing(journal)) as connection:
            connection.executemany(
                "UPDATE checkpoints SET removed_at = ? WHERE step = ?", [(time.time(), step) for step in steps]
            )


def prepare_resume(journal: Path, retrain_from: int | None, accept_data: bool) -> None:
    """Bring an older journal up to date, and record what a resume changes.

    The reports of the steps from ``retrain_from`` (counted from 0) on are dropped, because with other settings, or on
    another machine, they may differ now. With ``accept_data`` the prompts admitted so far are never compared with the
    data again.
    """
    with explained(journal), closing(open_for_writing(journal)) as connection:
        if retrain_from is not None:
            connection.execute(
                "UPDATE batches SET trained_at = NULL, digest = NULL, metrics = NULL WHERE step >= ?", (retrain_from,)
            )
        if accept_data:
            connection.execute(
                "INSERT OR REPLACE INTO meta SELECT ?, coalesce(max(serial), 0) FROM groups", (ACCEPTED,)
            )
