"""What the observers are told beside metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EvaluationKind = str
"""``greedy`` and ``sampled`` of the held-out prompts; ``<set>:greedy`` or ``<set>:sampled`` of a further set."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One evaluation. ``oldest`` and ``newest`` are the weight versions that its tokens came from.

    ``accuracy`` is the share of responses whose reward is at least 1; ``mean_length`` is in tokens that were sampled.
    With several ``samples`` per prompt, ``pass_at`` has pass@1 and so on up to pass@``samples``. ``metrics`` are means
    of what the task measured.
    """

    kind: EvaluationKind
    step: int
    accuracy: float
    mean_reward: float
    mean_length: float
    prompts: int
    oldest: int
    newest: int
    samples: int = 1
    pass_at: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
