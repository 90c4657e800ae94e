"""The temporary folder of a worker process, which is removed even when its owner is killed.

A run that starts Ray itself has one folder for all temporary files, and the reaper removes it. In a cluster that a run
has joined, the next worker process on the same host removes the folders of those whose owner is gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX, UNLOCKED = "asyncrl-work-", "asyncrl-new-"
"""How names of folders begin, and those of folders that are not locked yet."""


class WorkerFolder:
    """A new folder. The kernel unlocks it when this process ends, however it does."""

    def __init__(self) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        new = Path(tempfile.mkdtemp(prefix=UNLOCKED))
        self._lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed when it is locked: another process would take an unlocked one for abandoned.
        self.path = new.rename(new.with_name(PREFIX + new.name.removeprefix(UNLOCKED)))

    def remove(self) -> None:
        """Remove the folder with its contents, as far as that is possible."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's worker folders in ``parent`` whose owner is gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, locked, or removed meanwhile
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
