"""Writes the files that users and programs read, on a thread: no disk stops the run (decision 0023).

The run itself depends only on the journal, and an error there ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncrl_cli.core.background import Background
from asyncrl_cli.runs.directory import STATE, RunDirectory, RunState

WRITE_TIMEOUT_S = 10.0
"""Seconds that a run waits for these files at its end."""


class Recorder:
    """Writes to a run's folder in the order of the calls, which do not wait.

    ``warn`` gets the first failure of each file; ``failed`` has the incomplete files, each with its last cause. A file
    that is written as a whole is complete again after the next success.
    """

    def __init__(self, run: RunDirectory, warn: Callable[[str], None]) -> None:
        self.run = run
        self.failed: dict[str, str] = {}
        self._warn = warn
        self._warned: set[str] = set()
        self._submitted = 0
        self._failed_at: dict[str, int] = {}
        self._background = Background("recorder")

    @property
    def state(self) -> RunState:
        """The newest state, perhaps not on disk yet."""
        return self.run.state

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Add one line to a JSON Lines file."""
        self._submit(name, partial(self.run.append, name, row))

    def write_text(self, name: str, text: str) -> None:
        """Replace a text file."""
        self._submit(name, partial(self.run.write_text, name, text), replaces=True)

    def update(self, **changes: Any) -> None:
        """Change the run's state."""
        self._submit(STATE, partial(self.run.write_state, self.run.change(**changes)), replaces=True)

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call``, which must not raise, after all writes submitted so far."""
        self._background.submit(call)

    def wait(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Wait for all pending writes."""
        self._background.wait(timeout_s)

    def close(self, timeout_s: float = WRITE_TIMEOUT_S) -> str:
        """Wait for all pending writes; returns a text about the incomplete files, empty if there are none."""
        if not self._background.close(timeout_s):
            self.failed.setdefault(STATE, f"not written within {timeout_s:.0f} s")
        return "; ".join(f"{name} is not complete: {cause}" for name, cause in self.failed.items())

    def _submit(self, name: str, write: Callable[[], object], replaces: bool = False) -> None:
        self._submitted = write_id = self._submitted + 1

        def job() -> None:
            try:
                write()
            except OSError as error:
                self._note(name, write_id, error.strerror or str(error))
            except Exception as error:
                self._note(name, write_id, f"{type(error).__name__}: {error}")
            else:
                if replaces and self._failed_at.get(name, 0) < write_id:  # otherwise a later write was refused
                    self.failed.pop(name, None)

        if not self._background.submit(job):
            self._note(name, write_id, "the disk is too slow")

    def _note(self, name: str, write_id: int, cause: str) -> None:
        self.failed[name], self._failed_at[name] = cause, write_id
        if name not in self._warned:
            self._warned.add(name)
            self._warn(f"{name} cannot be written: {cause}; the run continues, and its journal is complete")
