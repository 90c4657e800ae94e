"""Lengths of rollouts, in recorded groups.

A group stays together, because the lengths of a prompt's rollouts are correlated. Lengths are in tokens. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean


@dataclass(frozen=True, slots=True)
class RolloutLength:
    """One rollout: its prompt, its sampled tokens, and the seconds that it spends outside engines (environments)."""

    prompt: int
    response: int
    outside_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """A group's rollouts. ``rejected``: the group is dropped after they have ended."""

    rollouts: tuple[RolloutLength, ...]
    rejected: bool = False

    @property
    def tokens(self) -> int:
        """Prompts and responses of all rollouts."""
        return sum(rollout.prompt + rollout.response for rollout in self.rollouts)


Groups = Sequence[GroupLengths]
"""A run's groups in the order of their admission. A simulation that needs more starts again with the first."""


def truncated(groups: Groups, max_tokens: int) -> tuple[GroupLengths, ...]:
    """Return the groups with responses of at most ``max_tokens``."""
    return tuple(
        replace(
            group,
            rollouts=tuple(replace(rollout, response=min(max_tokens, rollout.response)) for rollout in group.rollouts),
        )
        for group in groups
    )


def describe(groups: Groups, max_tokens: int) -> dict[str, float]:
    """Return statistics of the response lengths.

    ``at_limit`` is the share that reaches ``max_tokens``.
    """
    lengths = sorted(rollout.response for group in groups for rollout in group.rollouts)
    return {
        "mean": fmean(lengths),
        "p99": lengths[int(0.99 * (len(lengths) - 1))],
        "longest": lengths[-1],
        "at_limit": sum(length >= max_tokens for length in lengths) / len(lengths),
    }
