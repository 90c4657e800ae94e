"""Processor time of processes and of the host, as totals in seconds; only differences of totals are meaningful."""

from __future__ import annotations

import time
from typing import NamedTuple

import psutil

READ_S = 0.2
"""Smallest number of seconds between two reads: on a busy host each takes 0.1 ms per process."""


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
