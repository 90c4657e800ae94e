"""The task's result for a rollout: a reward, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scored:
    """A response's reward, and further metrics of its task. All numbers are finite.

    ``reward`` None: the task cannot score this response, so its rollout is masked (decision 0095).
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A response that has no reward. ``reason``, one line, names the function, the prompt and what went wrong;
    ``location`` is the line of the user's code where it went wrong, as ``file:line``, if it is known."""

    reason: str
    location: str = ""

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}" if self.location else self.reason
