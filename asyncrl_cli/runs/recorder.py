"""Writes the files of a run that users and programs read, on a thread: a slow or full disk does not stop the run.

The run itself needs only the journal, and an error in writing the journal does end the run.
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
    """Writes to a run's folder in the order of the calls, which return at once.

    The first failure of each file is passed to ``warn``; ``failed`` has the files that are not complete, each with the
    last cause. A file that is replaced is complete again after the next success.
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
        """The newest state, whether or not it is on disk."""
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
        """Run ``call``, which must not raise, when everything submitted so far is on disk."""
        self._background.submit(call)

    def wait(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Wait for all pending writes."""
        self._background.wait(timeout_s)

    def close(self, timeout_s: float = WRITE_TIMEOUT_S) -> str:
        """Wait for all pending writes; returns a text that names the incomplete files, empty if there are none."""
        if not self._background.close(timeout_s):
            self.failed.setdefault(STATE, f"not written within {timeout_s:.0f} s")
        return "; ".join(f"{name} is not complete: {cause}" for name, cause in self.failed.items())

    def _submit(self, name: str, write: Callable[[], object], replaces: bool = False) -> None:
        self._submitted = number = self._submitted + 1

        def job() -> None:
            try:
                write()
            except OSError as error:
                self._note(name, number, error.strerror or str(error))
            except Exception as error:
                self._note(name, number, f"{type(error).__name__}: {error}")
            else:
                if replaces and self._failed_at.get(name, 0) < number:  # not when a later one was refused meanwhile
                    self.failed.pop(name, None)

        if not self._background.submit(job):
            self._note(name, number, "the disk is too slow")

    def _note(self, name: str, number: int, cause: str) -> None:
        self.failed[name], self._failed_at[name] = cause, number
        if name not in self._warned:
            self._warned.add(name)
            self._warn(f"{name} cannot be written: {cause}; the run continues, and its journal is complete")
