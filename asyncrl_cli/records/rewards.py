"""The task's result for a rollout: a reward, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl_cli.core.errors import ConfigError

REWARD = "reward"
"""The task's own reward in ``algorithm.reward_parts``, where the other names are metrics."""


class Turn(NamedTuple):
    """One model reply in an environment's episode, with its reward (``Step.reward``).

    The reply's tokens end before token ``end`` of the rollout's sequence ``branch``.
    """

    reward: float
    branch: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """A response's reward and the task's further metrics, all finite.

    ``reward`` None: the task cannot score this response, so its rollout is masked (decision 0083).
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    """The turns of an environment's episode in order; ``reward`` is the sum of their rewards. Empty for other tasks."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A response without a reward. ``reason``: one line with the function, the prompt and the error. ``location``: the
    failing line of the user's code as ``file:line``, if known. ``counts``: False if nothing has failed, and the group
    does not count for ``rollout.max_failed_share``."""

    reason: str
    location: str = ""
    counts: bool = True

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}" if self.location else self.reason


def part_of_reward(name: str, reward: float | None, metrics: Mapping[str, float] | None) -> float | None:
    """The value of one of ``algorithm.reward_parts`` for a rollout; None if it is masked or lacks the part."""
    return reward if reward is None or name == REWARD else (metrics or {}).get(name)


def weighted_reward(weights: Mapping[str, float], scored: Scored) -> float:
    """The weighted sum of a rollout's reward parts; a missing part adds nothing."""
    return sum(w * (part_of_reward(name, scored.reward, scored.metrics) or 0.0) for name, w in weights.items())


def unknown_metric(name: str, reported: Iterable[str], nothing: str) -> ConfigError:
    """The error for a name in ``algorithm.reward_parts`` that is no metric. ``nothing``: the error's subject, such as
    "no rollout of the first batch"."""
    return ConfigError(
        f"{nothing} has the metric {name!r}; the task reports {', '.join((REWARD, *sorted(reported)))}",
        location=f"algorithm.reward_parts.{name}",
        hint="use one of these names, or have the task report it for every response: RewardResult(reward, metrics)",
    )
