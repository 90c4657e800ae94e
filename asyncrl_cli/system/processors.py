"""Measures processor time. Times are totals in seconds; only their differences are meaningful."""

from __future__ import annotations

import time

import psutil

READ_S = 0.2
"""Shortest time between two reads: on a busy host each read takes 0.1 ms per process."""


class ProcessorTime:
    """User and system time of this process and of the descendants that it has at construction."""

    def __init__(self) -> None:
        this_process = psutil.Process()
        self._processes = [this_process, *this_process.children(recursive=True)]
        self._used = [0.0] * len(self._processes)
        self._last_total = self.total()
        self._last_time_s = time.monotonic()

    def total(self) -> float:
        """Their processor time since they started. For an ended process, the last value that was read counts."""
        for index, process in enumerate(self._processes):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            self._used[index] = times.user + times.system
        return sum(self._used)

    def read(self) -> float:
        """Their processor time since the last read; 0 if the last read was less than ``READ_S`` seconds ago."""
        now_s = time.monotonic()
        if now_s < self._last_time_s + READ_S:
            return 0.0
        self._last_time_s = now_s
        previous_total, self._last_total = self._last_total, self.total()
        return self._last_total - previous_total
