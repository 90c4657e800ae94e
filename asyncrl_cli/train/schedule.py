"""The learning rate over optimizer updates, as a factor of its peak."""

from __future__ import annotations

import math

from asyncrl_cli.spec.inputs import RateSchedule


def factor(update: int, total_updates: int, schedule: RateSchedule) -> float:
    """Return one optimizer update's learning rate divided by the peak, in (0, 1].

    With w = warmup_updates: (update + 1) / w while update < w. Then, with p = (update − w) / (total_updates − w) and
    f = final_fraction: 1 (``constant``), 1 − (1 − f)·p (``linear``), or
    f + (1 − f)·(1 + cos πp) / 2 (``cosine``: Loshchilov and Hutter, arXiv 1608.03983, eq. 5, one cycle).

    Invariant: no update has a learning rate of zero. Warm-up starts at 1 / w, not at 0. The curve reaches the
    final fraction after its last update, and a run that continues keeps that update's rate (decision 0009).

    ``update``: updates before this one; ``total_updates``: updates in the whole schedule, at least 1.
    """
    warmup = schedule.warmup_updates
    if update < warmup:
        return (update + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    last_update = max(total_updates - 1, warmup)
    progress = (min(update, last_update) - warmup) / max(1, total_updates - warmup)
    remaining = 1.0 - progress if schedule.kind == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return schedule.final_fraction + (1.0 - schedule.final_fraction) * remaining
