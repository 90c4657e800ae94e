"""Skips optimizer updates that are not finite (decision 0019).

Invariant: an update changes weights and optimizer state on all ranks, or on none. It is skipped if the loss of any
micro-batch on any rank, or the gradient's norm over all ranks, is not finite. A loss that is not finite makes its
micro-batch's gradient NaN, so it is enough to check the norm, which DeepSpeed reduces over the ranks anyway.
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
    """An update's outcome, the same on all ranks."""

    norm: float  # the gradient's, over all weights and before clipping; not finite when the update was skipped
    skipped: bool


class SkipLimit:
    """Stops the run when too many updates in a row are skipped."""

    def __init__(self, max_skipped: int) -> None:
        """``max_skipped``: updates in a row that may be skipped."""
        self._max_skipped = max_skipped
        self._in_a_row = dict[str, int]()

    def note(self, result: UpdateResult, learning_rate: str = "trainer.optimizer.learning_rate") -> None:
        """Count one update of the network with this ``learning_rate``, a key of the spec. Raises ``RunError`` when too
        many in a row were skipped."""
        in_a_row = self._in_a_row[learning_rate] = self._in_a_row.get(learning_rate, 0) + 1 if result.skipped else 0
        if in_a_row > self._max_skipped:
            raise RunError(
                f"the loss or its gradient was not finite in {in_a_row} updates in a row",
                location="trainer",
                hint=f"lower {learning_rate}, or resume from an earlier checkpoint; "
                "trainer.max_skipped_updates is the number that may be skipped in a row",
            )


def backward(engine: Any, loss: Tensor) -> None:
    """Run DeepSpeed's backward pass of a micro-batch, without waiting for the device. ``loss``: no dimensions."""
    # Also for a loss that is not finite: a rank that left out its pass would leave the others waiting in theirs.
    engine.backward(loss * torch.where(loss.detach().isfinite(), 1.0, math.nan))


def step(engine: Any) -> UpdateResult:
    """Make DeepSpeed's step after an update's last backward pass; collective.

    A skipped update's gradients are dropped.
    """
    # Without ZeRO and in float32, DeepSpeed applies any gradient and does not measure it. The last backward pass has
    # reduced the gradients, so this norm is the same on all ranks, and all ranks decide alike.
    if engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled():
        gradients = [each.grad for each in engine.module.parameters() if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if not math.isfinite(norm):
            engine.zero_grad()  # otherwise the next update would add to these gradients
            return UpdateResult(norm, skipped=True)
        engine.step()
        return UpdateResult(norm, skipped=False)
    engine.step()
    return UpdateResult(float(engine.get_global_grad_norm()), skipped=not engine.was_step_applied())
