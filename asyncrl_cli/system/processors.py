"""Processors: the time that processes and the host have used, and their speed.

Times are totals in seconds; only differences of totals are meaningful. Rented machines change their speed within an
hour, and all times of a run on CPUs change with it. `train` and `plan --calibrate` record the speed in the manifest,
before any other process starts; `plan` measures it again and compares.
"""

from __future__ import annotations

import time
from threading import Thread
from typing import NamedTuple

import psutil

READ_S = 0.2
"""Smallest number of seconds between two reads: on a busy host each takes 0.1 ms per process."""
SECONDS = 2.0
"""Shorter measurements of the speed differ by several percent from one to the next."""
NUMBERS = 100_000
"""Sorting so many numbers uses the first two levels of cache, like most of a small model's work."""


class ProcessorTime:
    """Of this process and of all that it had started when this was made: user and system time of all their threads."""

    def __init__(self) -> None:
        own = psutil.Process()
        self._processes = [own, *own.children(recursive=True)]
        self._used = [0.0] * len(self._processes)
        self._read = self.total()
        self._read_at = time.monotonic()

    def total(self) -> float:
        """Their processor time since they began. For a process that has ended, the last value that was read counts."""
        for at, process in enumerate(self._processes):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            self._used[at] = times.user + times.system
        return sum(self._used)

    def read(self) -> float:
        """Their processor time since the last read; 0 if that was less than ``READ_S`` ago."""
        now = time.monotonic()
        if now < self._read_at + READ_S:
            return 0.0
        self._read_at = now
        before, self._read = self._read, self.total()
        return self._read - before


class HostTime(NamedTuple):
    """Processor time of a host, by all of its processes, in containers and out of them."""

    used_s: float
    idle_s: float


def host_time() -> HostTime:
    """Since the host's start. Both together grow by its number of processors every second."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests are counted as users, too.
    return HostTime(sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0), idle)


def processor_speed(seconds: float | None = None, beside_work: bool = False) -> float:
    """Return how often one core does a fixed computation in a second of processor time, measured for ``seconds``.

    Waiting for a core does not count, so other processes disturb the measurement little. As in a run, a second core is
    busy: unless this runs ``beside_work`` of another thread, one is started that does the same.
    """
    import numpy as np

    numbers = np.random.default_rng(0).random(NUMBERS)
    until = time.monotonic() + (SECONDS if seconds is None else seconds)

    def sorted_each_second() -> float:
        began, count = time.thread_time(), 0
        while time.monotonic() < until or not count:
            np.sort(numbers)  # other threads run meanwhile
            count += 1
        return count / (time.thread_time() - began)

    if not beside_work:
        Thread(target=sorted_each_second, name="processor speed", daemon=True).start()
    return sorted_each_second()
