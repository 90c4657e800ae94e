"""Query trained rollouts: the best, worst, stalest and longest ones, and the rollouts of a step."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Literal, NamedTuple

Extreme = Literal["best", "worst", "stalest", "longest"]
_ORDER: dict[Extreme, str] = {
    "best": "r.reward DESC",
    "worst": "r.reward",
    "stalest": "b.version - r.oldest DESC",
    "longest": "r.tokens DESC",
}


class TrainedRollout(NamedTuple):
    """A trained rollout with the versions of its oldest and newest token; ``staleness`` is the oldest token's; ``step``
    counts from 0."""

    group_id: int
    rollout_index: int
    reward: float
    staleness: int
    step: int
    oldest: int
    newest: int


_TRAINED_ROLLOUTS = (
    "SELECT r.group_id, r.rollout_index, r.reward, b.version - r.oldest, g.step, r.oldest, r.newest "
    "FROM rollouts r JOIN groups g ON g.id = r.group_id JOIN batches b ON b.step = g.step "
    "WHERE r.reward IS NOT NULL AND r.oldest IS NOT NULL"
)


def trained_steps(connection: sqlite3.Connection) -> tuple[int, int] | None:
    """Return the first and the last step with groups; None without one."""
    query = "SELECT min(step), max(step) FROM groups WHERE step IS NOT NULL"
    first_step, last_step = connection.execute(query).fetchone()
    return None if first_step is None else (first_step, last_step)


def extreme_rollouts(
    connection: sqlite3.Connection, extreme: Extreme, steps: range, count: int
) -> Iterator[TrainedRollout]:
    """Yield the best, worst, stalest or longest rewarded rollouts of some steps; among equals, the newest first."""
    rows = connection.execute(
        f"{_TRAINED_ROLLOUTS} AND g.step >= ? AND g.step < ? ORDER BY {_ORDER[extreme]}, r.group_id DESC LIMIT ?",
        (steps.start, steps.stop, count),
    )
    return map(TrainedRollout._make, rows)


def rewarded_rollouts(connection: sqlite3.Connection, step: int, count: int) -> Iterator[TrainedRollout]:
    """Yield rewarded rollouts of a step (from 0), first one of each group."""
    rows = connection.execute(
        f"{_TRAINED_ROLLOUTS} AND g.step = ? ORDER BY r.rollout_index, r.group_id LIMIT ?", (step, count)
    )
    return map(TrainedRollout._make, rows)
