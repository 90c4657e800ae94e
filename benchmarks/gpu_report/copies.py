"""The speed of copies of weights from a device to the memory of a replica and back, with the calls of a publish."""

from __future__ import annotations

import time
from contextlib import closing
from statistics import median
from typing import Any

NUMBERS = {"cuda": 2**29, "cpu": 2**24}
"""Numbers in bfloat16: 1 GiB on a GPU."""
ROUNDS = 5


def copy_speeds(device: str) -> dict[str, Any]:
    """GB/s in both directions with pinned and with pageable memory, and seconds to pin it. On CPU nothing is pinned.

    Raises ``RuntimeError`` if the bytes that come back differ.
    """
    import torch

    from asyncrl_cli.weights.layout import plan_slots
    from asyncrl_cli.weights.mapped import Copies, MappedReplica, copies_of
    from asyncrl_cli.weights.replica import Replica

    slots = plan_slots([("weights", torch.bfloat16, (NUMBERS[device],))])
    weights = torch.randn(NUMBERS[device], dtype=torch.bfloat16, device=device)
    back = torch.zeros_like(weights)  # including its pages
    figures: dict[str, Any] = {}
    for kind, copies in (("pinned", copies_of(weights.device)), ("not pinned", Copies())):
        with closing(Replica(slots, 1)) as replica, closing(MappedReplica(slots, copies)) as mapped:
            path = replica.begin(0)
            started = time.perf_counter()
            with mapped.open(path, 0):  # maps and pins it
                pass
            figures[f"mapping s, {kind}"] = time.perf_counter() - started
            seconds: dict[str, list[float]] = {"write": [], "load": []}
            for _ in range(ROUNDS):
                started = time.perf_counter()
                with mapped.open(path, 0) as tensors:
                    copies.copy(tensors["weights"], weights)
                seconds["write"].append(time.perf_counter() - started)
                started = time.perf_counter()
                with mapped.open(path, 0) as tensors:
                    back.copy_(tensors["weights"])
                seconds["load"].append(time.perf_counter() - started)
            if not torch.equal(back, weights):
                raise RuntimeError(f"different bytes came back from memory that is {kind}")
        for way, times in seconds.items():
            figures[f"{way} GB/s, {kind}"] = 2 * NUMBERS[device] / 1e9 / median(times)
    return figures
