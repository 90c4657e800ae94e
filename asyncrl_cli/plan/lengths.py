"""Lengths of rollouts, in recorded groups.

A group stays together, because the lengths of a prompt's rollouts are correlated. Lengths are in tokens. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean, pstdev


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


def scaled(groups: Groups, factor: float, max_tokens: int) -> tuple[GroupLengths, ...]:
    """Return the groups with responses ``factor`` times as long, but at most ``max_tokens``."""
    return tuple(
        replace(
            group,
            rollouts=tuple(
                replace(rollout, response=max(1, min(max_tokens, round(factor * rollout.response))))
                if rollout.response
                else rollout
                for rollout in group.rollouts
            ),
        )
        for group in groups
    )


def resized(groups: Groups, group_size: int) -> tuple[GroupLengths, ...]:
    """Return the groups with ``group_size`` rollouts each: the first rollouts, or all of them repeatedly."""
    return tuple(
        replace(group, rollouts=tuple(group.rollouts[index % len(group.rollouts)] for index in range(group_size)))
        for group in groups
    )


def describe(groups: Groups, max_tokens: int) -> dict[str, float]:
    """Return statistics of the response lengths.

    ``sigma`` is the standard deviation of their logarithms, ``at_limit`` the share that reaches ``longest``.
    """
    lengths = sorted(rollout.response for group in groups for rollout in group.rollouts)
    return {
        "rollouts": len(lengths),
        "mean": fmean(lengths),
        "sigma": pstdev(log(max(1, length)) for length in lengths),
        "p99": lengths[int(0.99 * (len(lengths) - 1))],
        "longest": lengths[-1],
        "at_limit": sum(length >= max_tokens for length in lengths) / len(lengths),
    }
