"""A run's terminal: output neither delays nor ends the process that drives the run.

A terminal may be stopped (Ctrl-S) or hang up, a pipe's reader may stall or exit, a log's disk may be full. So during a
run only a thread writes to the real standard output and standard error. All other output of this process (Ray,
warnings, C libraries) goes to ``logs/driver.log`` in the run's folder (decision 0023).
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asyncrl_cli.core.background import Background
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.core.terminal import printable
from asyncrl_cli.system.logs import redirect_output

CLOSE_S = 3.0  # seconds that a run waits at its end for a stalled reader
LINES, FRAMES = 10_000, 100
"""Largest number of lines, or of a panel's frames, that wait for a reader."""


class Outlet:
    """Writes text to a descriptor in a thread.

    Invariant: ``write`` neither waits nor raises. Lines that cannot be written are dropped and counted.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._background = Background("output", LINES + FRAMES)
        self._dropped = 0  # lines that did not fit into the queue; changed by the threads that call `write`
        self._failed = 0  # lines that could not be written; changed by the thread that writes

    @property
    def lost_lines(self) -> int:
        return self._dropped + self._failed

    def write(self, text: str) -> None:
        """Queue ``text`` for writing, without secrets and control characters."""
        safe_text = printable(hide(text))
        self.draw(safe_text, line_count=safe_text.count("\n"))

    def draw(self, text: str, line_count: int = 0) -> None:
        """Queue a frame, which the next frame replaces. If it is dropped, ``line_count`` lines are lost."""
        limit = LINES if line_count else FRAMES
        if self._background.waiting >= limit or not self._background.submit(partial(self._write, text, line_count)):
            self._dropped += line_count

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    @property
    def size(self) -> tuple[int, int]:
        """The terminal's columns and lines; 80 by 25 if unknown."""
        try:
            size = os.get_terminal_size(self._descriptor)
        except OSError:
            return 80, 25
        return size.columns or 80, size.lines or 25

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Finish writing. Returns True if that took less than ``timeout_s`` seconds and the descriptor would take more
        without blocking."""
        if lost := self.lost_lines:
            notice = f"! {lost} lines of output are missing: they were not read in time\n"
            self._background.submit(partial(self._write, notice, 0))
        if not self._background.close(timeout_s):
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return [event for _, event in poll.poll(0)] == [select.POLLOUT]

    def _write(self, text: str, line_count: int) -> None:
        try:
            _write_all(self._descriptor, text.encode(errors="backslashreplace"))
        except OSError:
            # The reader is gone, the terminal hung up, or the disk is full. The run must continue, so only count the
            # lines.
            self._failed += line_count


def _write_all(descriptor: int, data: bytes) -> None:
    unwritten = memoryview(data)
    while unwritten:
        try:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
        except BlockingIOError:  # another process shares the descriptor and made it non-blocking
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
    """Open the terminal during a run, and direct descriptors 1 and 2 to ``driver.log`` in ``log_dir``.

    Afterwards each descriptor leads to the terminal again, unless writing would block: then it stays with the log,
    because any later output would keep the process from ending.
    """
    terminals = [os.dup(descriptor) for descriptor in (1, 2)]
    log_dir.mkdir(parents=True, exist_ok=True)
    redirect_output(str(log_dir), "driver")
    outlets = [Outlet(descriptor) for descriptor in terminals]
    try:
        yield Terminal(*outlets)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None if it was closed before Python started
                with suppress(OSError):  # the log's disk may be full
                    stream.flush()
        for descriptor, terminal, outlet in zip((1, 2), terminals, outlets, strict=True):
            if outlet.close():
                os.dup2(terminal, descriptor)
                os.close(terminal)
