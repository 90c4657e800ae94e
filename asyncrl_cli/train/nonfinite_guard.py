"""Optimizer updates that are finite, or are skipped (decision 0019).

Invariant: an update changes weights and optimizer state of all ranks, or of none. It is skipped where a loss of any
micro-batch on any rank, or the norm of the gradient over all ranks, is not finite. A loss that is not finite makes the
gradient of its micro-batch NaN, so only the norm, which DeepSpeed reduces over the ranks anyway, has to be checked.
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
    """The outcome of an update, the same on all ranks."""

    norm: float  # of the gradient over all weights, before clipping; not finite when the update was skipped
    skipped: bool


class SkipLimit:
    """Counts updates skipped in a row, and stops the run when they are too many."""

    def __init__(self, most: int) -> None:
        """``most``: updates in a row that may be skipped."""
        self._most = most
        self._in_a_row = 0

    def note(self, result: UpdateResult) -> None:
        """Count one update. Raises ``RunError`` when more in a row were skipped than may be."""
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        if self._in_a_row > self._most:
            raise RunError(
                f"the loss or its gradient was not finite in {self._in_a_row} updates in a row",
                location="trainer",
                hint="lower trainer.optimizer.learning_rate, or resume from an earlier checkpoint; "
                "trainer.max_skipped_updates is the number that may be skipped in a row",
            )


def backward(engine: Any, loss: Tensor) -> None:
    """DeepSpeed's backward pass of a micro-batch; waits for no device. ``loss``: no dimensions."""
    # Run also for a loss that is not finite: a rank that left its pass out would leave the others waiting in theirs.
    engine.backward(loss * torch.where(loss.detach().isfinite(), 1.0, math.nan))


def step(engine: Any) -> UpdateResult:
    """DeepSpeed's step after the last backward pass of an update; collective.

    The gradients of a skipped update are dropped.
    """
    # Without ZeRO and in float32, DeepSpeed applies any gradient, and does not measure it. Gradients are reduced by the
    # last backward pass, so this norm is the same on all ranks and all of them decide alike.
    if engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled():
        gradients = [each.grad for each in engine.module.parameters() if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if not math.isfinite(norm):
            engine.zero_grad()  # else the next update would add to these gradients
            return UpdateResult(norm, skipped=True)
        engine.step()
        return UpdateResult(norm, skipped=False)
    engine.step()
    return UpdateResult(float(engine.get_global_grad_norm()), skipped=not engine.was_step_applied())
