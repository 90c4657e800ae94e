"""Optimizer updates that are finite, or are left out.

Invariant: an update changes weights and optimizer state of all ranks, or of none. It is left out where a loss of any
micro-batch on any rank, or the norm of the gradient over all ranks, is not finite. A loss that is not finite makes the
gradient of its micro-batch NaN, so nothing but the norm has to be looked at, and no rank waits for another to tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl_cli.core.errors import RunError


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What became of an update, the same on all ranks.

    Args:
        norm: the gradient's norm over all weights, before clipping; not finite when the update was skipped.
        skipped: whether it was left out.
    """

    norm: float
    skipped: bool


class SkipLimit:
    """Counts updates left out in a row, and stops the run when they are too many."""

    def __init__(self, most: int) -> None:
        """``most``: updates in a row that may be left out."""
        self._most = most
        self._in_a_row = 0

    def note(self, result: UpdateResult) -> None:
        """Count one update. Raises ``RunError`` when it was left out, and as many as may be before it."""
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        if self._in_a_row > self._most:
            raise RunError(
                f"the loss or its gradient was not finite in {self._in_a_row} updates in a row",
                location="trainer",
                hint="lower trainer.optimizer.learning_rate, or go on from an earlier checkpoint; "
                "trainer.max_skipped_updates says how many may be left out",
            )


def backward(engine: Any, loss: Tensor) -> None:
    """DeepSpeed's backward pass of a micro-batch; waits for no device. ``loss``: no dimensions."""
    engine.backward(loss * torch.where(loss.detach().isfinite(), 1.0, math.nan))


def step(engine: Any) -> UpdateResult:
    """DeepSpeed's step after the last backward pass of an update; collective.

    An update that is left out drops its gradients.
    """
    # Without ZeRO and in float32, DeepSpeed hands torch's optimizer whatever the gradient is, and does not measure it.
    if engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled():
        gradients = [each.grad for each in engine.module.parameters() if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if not math.isfinite(norm):
            engine.zero_grad()
            return UpdateResult(norm, skipped=True)
        engine.step()
        return UpdateResult(norm, skipped=False)
    engine.step()
    return UpdateResult(float(engine.get_global_grad_norm()), skipped=not engine.was_step_applied())
