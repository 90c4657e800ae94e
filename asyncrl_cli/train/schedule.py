"""The learning rate over optimizer updates, as a factor of its peak."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["constant", "linear", "cosine"]


def factor(update: int, total_updates: int, warmup: int, kind: Kind, final_fraction: float) -> float:
    """Return one optimizer update's learning rate divided by the peak, in (0, 1].

    Warm-up: (update + 1) / warmup while update < warmup. Then, with p = (update − warmup) / (total_updates −
    warmup) and f = final_fraction: 1 (``constant``), 1 − (1 − f)·p (``linear``), or
    f + (1 − f)·(1 + cos πp) / 2 (``cosine``: Loshchilov and Hutter, arXiv 1608.03983, eq. 5, one cycle).

    Invariant: no update has a learning rate of zero. Warm-up starts at 1 / warmup, not at 0. The curve reaches the
    final fraction after its last update, and a run that continues keeps that update's rate (decision 0009).

    Args:
        update: updates done before this one, from 0.
        total_updates: updates in the whole schedule, at least 1.
        warmup: updates of linear warm-up; 0: none.
        kind: shape after warm-up.
        final_fraction: where ``linear`` and ``cosine`` end, in [0, 1].
    """
    if update < warmup:
        return (update + 1) / warmup
    if kind == "constant":
        return 1.0
    last = max(total_updates - 1, warmup)
    progress = (min(update, last) - warmup) / max(1, total_updates - warmup)
    remaining = 1.0 - progress if kind == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return final_fraction + (1.0 - final_fraction) * remaining
