"""What the observers are told beside metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EvaluationKind = Literal["greedy", "sampled"]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One evaluation. ``oldest`` and ``newest`` are the weight versions that its tokens came from.

    ``accuracy`` is the share of responses whose reward is at least 1; ``mean_length`` is in tokens.
    """

    kind: EvaluationKind
    step: int
    accuracy: float
    mean_reward: float
    mean_length: float
    prompts: int
    oldest: int
    newest: int
