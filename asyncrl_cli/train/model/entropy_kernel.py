"""Entropies on GPUs: each log-probability is read once, and no tensor of their size is made. Imported only there."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Log-probabilities that a program reads at a time."""


def row_entropies(logs: Tensor) -> Tensor:
    """Return −Σ p log p of each row, float32, nats, [rows]. ``logs``: float32, contiguous, [rows, vocabulary].

    A row's sum has a fixed order, so its bits repeat.
    """
    entropies = torch.empty(len(logs), dtype=torch.float32, device=logs.device)
    _sum_row[(len(logs),)](logs, entropies, logs.shape[1], BLOCK=BLOCK)
    return entropies


@triton.jit  # type: ignore[untyped-decorator]
def _sum_row(logs: Any, entropies: Any, width: Any, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        log = tl.load(logs + row * width + start + columns, mask=start + columns < width, other=0.0)
        sums += tl.exp(log) * log
    tl.store(entropies + row, -tl.sum(sums, axis=0))
