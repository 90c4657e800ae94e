"""Muon for the warm start: momentum whose matrices are made orthogonal, in float32 (decision 0076)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (Jordan, 2024: https://kellerjordan.github.io/posts/muon/)."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices with the singular vectors of ``matrices`` and singular values of about 1, by Newton and Schulz's
    iteration with ``COEFFICIENTS``.

    ``matrices``: float32, [count, rows, columns]; so is what is returned.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum made orthogonal, with decoupled weight decay.

    A matrix with more rows than columns takes a larger step, by the root of their ratio, as in Jordan's own code.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        """``matrices``: float32 parameters of two dimensions."""
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            # One call for all matrices of a shape: a call costs more than the arithmetic of a small model's.
            for matrices in by_shape.values():
                self._update(group, matrices)
        return None

    def _update(self, group: dict[str, Any], matrices: list[torch.nn.Parameter]) -> None:
        directions = []
        for matrix in matrices:
            assert matrix.grad is not None
            state = self.state[matrix]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(matrix)
            average = state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
            directions.append(matrix.grad.lerp(average, group["momentum"]))
        rows, columns = matrices[0].shape
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        for matrix, update in zip(matrices, orthogonalized(torch.stack(directions)), strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(update, alpha=-rate)
