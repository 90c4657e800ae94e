"""Measures the speed of this machine's processors.

Rented machines change their speed within an hour, and all times of a run on CPUs change with it. `train` and `plan
--calibrate` record the speed in the manifest, before any other process starts; `plan` measures it again and compares.
"""

from __future__ import annotations

import time

SECONDS = 2.0
"""Shorter measurements differ by several percent from one to the next."""
NUMBERS = 100_000
"""Sorting so many numbers uses the first two levels of cache, like most of a small model's work."""


def processor_speed(seconds: float | None = None) -> float:
    """Return how often one core does a fixed computation in a second of processor time, measured for ``seconds``.

    Waiting for a core does not count, so other processes disturb the measurement little.
    """
    import numpy as np

    numbers = np.random.default_rng(0).random(NUMBERS)
    until = time.monotonic() + (SECONDS if seconds is None else seconds)
    began, count = time.thread_time(), 0
    while time.monotonic() < until or not count:
        np.sort(numbers)
        count += 1
    return count / (time.thread_time() - began)
