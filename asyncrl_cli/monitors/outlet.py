"""The terminal of a run: its output can neither delay nor end the process that drives the run.

A terminal can be stopped (Ctrl-S) or hang up, the reader of a pipe can stall or exit, the disk of a log can be full.
So during a run only a thread writes to the real standard output and standard error. All other output of this process
(Ray, warnings, C libraries) goes to ``logs/driver.log`` in the run's folder (decision 0023).
"""

from __future__ import annotations

import os
import select
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

from asyncrl_cli.core.background import Background
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.terminal import printable
from asyncrl_cli.system.logs import redirect_output

PATIENCE_S = 3.0
"""Seconds that a run waits at its end for a reader that does not read."""
LINES, FRAMES = 10_000, 100
"""Largest number of lines, or frames of a panel, that wait for a reader."""
STANDARD = (1, 2)
"""Standard output and standard error."""


class Outlet:
    """Writes text to a descriptor, on a thread.

    Invariant: ``write`` neither waits nor raises. Lines that cannot be written are dropped and counted.
    """

    def __init__(self, descriptor: int, notices: bool = True) -> None:
        """``notices``: say in the output how many lines are missing, as soon as it can be written again; otherwise at
        its end."""
        self._descriptor = descriptor
        self._notices = notices
        self._background = Background("output", LINES + FRAMES)
        self._drawing = Lock()
        self._waiting: deque[str] = deque()
        self._lost_text: deque[str] = deque(maxlen=LINES)
        self._dropped = 0  # by the threads that call `write`
        self._failed = 0  # by the thread that writes
        self._noticed = 0

    @property
    def lost(self) -> int:
        return self._dropped + self._failed

    def write(self, text: str) -> None:
        """Have ``text`` written without secrets and control characters."""
        shown = printable(hide(text))
        self.draw(shown, shown)

    def draw(self, text: str, lines: str = "") -> None:
        """``write`` for a frame that the next one replaces: only ``lines`` are counted when it is dropped."""
        limit = LINES if lines else FRAMES
        with self._drawing:
            self._waiting.append(lines)
            if self._background.waiting >= limit or not self._background.submit(partial(self._write, text, lines)):
                self._waiting.pop()
                self._lost_text.append(lines)
                self._dropped += lines.count("\n")

    @property
    def unwritten(self) -> str:
        """The newest of the lines that were lost or still wait."""
        return "".join((*self._lost_text, *self._waiting))

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal; 80 by 25 if they are not known."""
        try:
            size = os.get_terminal_size(self._descriptor)
        except OSError:
            return 80, 25
        return size.columns or 80, size.lines or 25

    def close(self, patience_s: float = PATIENCE_S) -> bool:
        """Whether everything was written within ``patience_s`` seconds and the descriptor would take more at once."""
        self._notices = True
        self.draw("")  # the notice
        if not self._background.close(patience_s):
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return [event for _, event in poll.poll(0)] == [select.POLLOUT]

    def _write(self, text: str, lines: str) -> None:
        missing = self.lost - self._noticed if self._notices else 0
        notice = f"! {missing} lines of output are missing here: they were not read in time\n" if missing else ""
        try:
            _write_all(self._descriptor, (notice + text).encode(errors="backslashreplace"))
        except OSError:
            # The reader is gone, the terminal hung up, or the disk is full. Nothing can be shown here, and the run
            # must continue; the lines are counted.
            self._failed += lines.count("\n")
            self._lost_text.append(lines)
        else:
            self._noticed += missing
        self._waiting.popleft()


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process that shares the descriptor made it non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


@dataclass(frozen=True, slots=True)
class Terminal:
    """The real standard output and standard error."""

    out: Outlet
    err: Outlet


@contextmanager
def run_terminal(log_dir: Path) -> Iterator[Terminal]:
    """The terminal, for the length of a run; meanwhile descriptors 1 and 2 lead to ``driver.log`` in ``log_dir``.

    Afterwards each leads to the terminal again, unless that would block: then it stays with the log, so that nothing
    that is still printed can keep the process from ending. Lines that could not be written are in the log, too.
    """
    real = [os.dup(number) for number in STANDARD]
    log_dir.mkdir(parents=True, exist_ok=True)
    redirect_output(str(log_dir), "driver")
    # A terminal gets no notices: the panel is drawn over itself, so the next frame replaces missing ones.
    outlets = [Outlet(descriptor, notices=not os.isatty(descriptor)) for descriptor in real]
    try:
        yield Terminal(*outlets)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None: it was closed before Python started
                with suppress(OSError):  # the log's disk is full
                    stream.flush()
        for number, descriptor, outlet in zip(STANDARD, real, outlets, strict=True):
            free = outlet.close()
            with suppress(OSError):
                _write_all(number, outlet.unwritten.encode(errors="backslashreplace"))
            if free:
                os.dup2(descriptor, number)
                os.close(descriptor)
