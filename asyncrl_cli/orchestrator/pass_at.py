"""pass@k: how often one of k responses is right."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at(k: int, samples: int, correct: int) -> float:
    """The share of choices of ``k`` among ``samples`` responses that hold one of the ``correct`` ones.

    That is the unbiased estimate of pass@k from n ≥ k samples: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    arXiv:2107.03374).
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def mean_pass_at(samples: int, correct: Sequence[int]) -> tuple[float, ...]:
    """pass@1, ..., pass@``samples``, means over prompts of which so many responses were right each."""
    return tuple(sum(pass_at(k, samples, c) for c in correct) / len(correct) for k in range(1, samples + 1))
