"""Handles signals that ask a process to end: the work ends in an orderly way. A second Ctrl-C ends the process
immediately."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""
GROUP_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a closed terminal, or a batch system before its time limit (Slurm's ``--signal``), may send to the
driver's whole process group. Only the driver may react to them."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, *GROUP_SIGNALS)


class Interrupted(Exception):
    """The user stopped the run."""


class Stop:
    """A request to stop, by a signal."""

    def __init__(self) -> None:
        self.is_requested = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.event = asyncio.Event()
        """Set in the attached event loop after a signal."""

    def attach(self) -> None:
        """From now on, signals set ``event`` in the running event loop instead of raising ``KeyboardInterrupt``."""
        self._loop = asyncio.get_running_loop()
        if self.is_requested:
            self.event.set()

    def handle(self, signal_number: int, _: FrameType | None) -> None:
        """The signal handler."""
        if self.is_requested:
            if signal_number == signal.SIGINT:
                # An orderly exit would wait for threads, such as one that writes to a hanging disk. The reaper ends the
                # other processes.
                os._exit(INTERRUPTED)
            return
        self.is_requested = True
        if self._loop is None:
            raise KeyboardInterrupt
        if not self._loop.is_closed():  # after it, the work has its result or error, and the signal changes nothing
            self._loop.call_soon_threadsafe(self.event.set)


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Handle the signals within the block; after the first signal, until the process ends.

    Before an event loop is attached, a signal raises ``KeyboardInterrupt``. A signal that was ignored at the process's
    start (SIGHUP with nohup) is still ignored.
    """
    stop = Stop()
    handlers = {signal_number: signal.getsignal(signal_number) for signal_number in SIGNALS}
    handled_signals = [signal_number for signal_number, handler in handlers.items() if handler is not signal.SIG_IGN]
    for signal_number in handled_signals:
        signal.signal(signal_number, stop.handle)
    try:
        yield stop
    finally:
        if not stop.is_requested:
            for signal_number in handled_signals:
                signal.signal(signal_number, handlers[signal_number])
