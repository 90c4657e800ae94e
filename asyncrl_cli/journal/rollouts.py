"""Query rollouts: one after another, the best, worst, stalest and longest rollouts, and the distributions of lengths
and rewards over ranges of steps, counted in SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from asyncrl_cli.records.training import CORRECT

COLUMNS = 60
"""Largest number of step ranges."""
BINS = 30
"""Approximate number of value ranges."""
FEW_REWARDS = 8
"""Largest number of different rewards for which the share of each reward is shown."""

GROUP_NAMES = ("all equal, none correct", "different", "all correct")
"""Kinds of groups by their rewards; only ``different`` groups give a gradient."""

Quantity = Literal["tokens", "reward"]


class Histogram(NamedTuple):
    """``shares[bin][column]`` is the share of a step range's rollouts with a value in a bin; each column sums to 1.

    ``values`` are the bins' middles, ``steps`` the ranges' last steps, from 1.
    """

    values: Sequence[float]
    steps: tuple[int, ...]
    shares: Sequence[Sequence[float]]


class Shares(NamedTuple):
    """Shares by name over step ranges, as in ``Histogram``. The shares in a range sum to 1."""

    steps: tuple[int, ...]
    shares: Mapping[str, Sequence[float]]


_TRAINED = "groups g JOIN rollouts r ON r.group_id = g.id WHERE g.step IS NOT NULL"
_FINITE = "BETWEEN -1e300 AND 1e300"  # also: not NULL


def distributions(connection: sqlite3.Connection) -> dict[str, Histogram | Shares]:
    """Return the distributions of trained rollouts and groups by title, without empty ones."""
    rewards: Histogram | Shares | None = reward_shares(connection)
    if rewards is None:
        rewards = histogram(connection, "reward")
    by_title = {
        "Rollouts by reward" if isinstance(rewards, Shares) else "Rewards": rewards,
        "Groups by their rewards": group_shares(connection),
        "Length of responses (tokens)": histogram(connection, "tokens"),
    }
    return {title: distribution for title, distribution in by_title.items() if distribution is not None}


def histogram(connection: sqlite3.Connection, quantity: Quantity) -> Histogram | None:
    """Return the distribution of a quantity; None if no rollout has it."""
    value = f"r.{quantity}"
    lowest, highest, first_step, last_step = connection.execute(
        f"SELECT min({value}), max({value}), min(g.step), max(g.step) FROM {_TRAINED} AND {value} {_FINITE}"
    ).fetchone()
    if lowest is None:
        return None
    is_whole = quantity == "tokens"
    width = -(-(highest - lowest + 1) // BINS) if is_whole else (highest - lowest) / (BINS - 1) or 1.0
    origin = lowest if is_whole else lowest - width / 2
    bin_count = int((highest - origin) / width) + 1
    size, steps = _ranges(first_step, last_step)
    counts = [[0] * len(steps) for _ in range(bin_count)]
    for column, bin_index, count in connection.execute(
        f"SELECT (g.step - :first) / :size, CAST(({value} - :origin) / :width AS INTEGER), count(*) "
        f"FROM {_TRAINED} AND {value} {_FINITE} GROUP BY 1, 2",
        {"first": first_step, "size": size, "origin": origin, "width": width},
    ):
        counts[min(bin_index, bin_count - 1)][column] += count
    middle = (width - 1) / 2 if is_whole else width / 2
    return Histogram(tuple(origin + width * index + middle for index in range(bin_count)), steps, _normalized(counts))


def reward_shares(connection: sqlite3.Connection) -> Shares | None:
    """Return the share of rollouts with each reward; None without rewards, or with more than ``FEW_REWARDS``."""
    rewards = f"SELECT g.step, r.reward AS name FROM {_TRAINED} AND r.reward {_FINITE}"
    limited = f"SELECT count(*) FROM (SELECT DISTINCT name FROM ({rewards}) LIMIT {FEW_REWARDS + 1})"
    if connection.execute(limited).fetchone()[0] > FEW_REWARDS:
        return None
    return _shares(connection, rewards, lambda name: f"{name:g}")


def group_shares(connection: sqlite3.Connection) -> Shares | None:
    """Return the shares of groups by ``GROUP_NAMES``; None without groups. Groups with one rollout do not count."""
    return _shares(
        connection,
        f"SELECT g.step, CASE WHEN min(r.reward) >= {CORRECT} THEN 2 WHEN min(r.reward) < max(r.reward) THEN 1 "
        f"ELSE 0 END AS name FROM {_TRAINED} AND r.reward {_FINITE} GROUP BY g.id HAVING count(*) > 1",
        lambda name: GROUP_NAMES[int(name)],
    )


def _shares(connection: sqlite3.Connection, rows: str, name_of: Callable[[float], str]) -> Shares | None:
    """The share of each number in ``rows``, a query for steps and numbers."""
    first_step, last_step = connection.execute(f"SELECT min(step), max(step) FROM ({rows})").fetchone()
    if first_step is None:
        return None
    size, steps = _ranges(first_step, last_step)
    counts: dict[float, list[int]] = {}
    for column, name, count in connection.execute(
        f"SELECT (step - {first_step}) / {size}, name, count(*) FROM ({rows}) GROUP BY 1, 2 ORDER BY 2"
    ):
        counts.setdefault(name, [0] * len(steps))[column] = count
    return Shares(steps, dict(zip(map(name_of, counts), _normalized(counts.values()), strict=True)))


def _ranges(first_step: int, last_step: int) -> tuple[int, tuple[int, ...]]:
    """Divide steps (from 0) into at most ``COLUMNS`` ranges. Returns the number of steps in a range, and each range's
    last step (from 1)."""
    size = -(-(last_step - first_step + 1) // COLUMNS)
    ends = range(first_step + size, last_step + 1 + size, size)
    return size, tuple(min(end, last_step + 1) for end in ends)


def _normalized(counts: Collection[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
    """Each count divided by its column's sum; 0 in a column of zeros."""
    totals = [sum(column) or 1 for column in zip(*counts, strict=True)]
    return tuple(tuple(count / total for count, total in zip(row, totals, strict=True)) for row in counts)


# -- rollouts, one by one

RolloutIndex = tuple[int, int]
"""A group's id and a rollout's index in it."""
RewardRange = tuple[float, float]
"""Lower bound (inclusive) and upper bound (exclusive)."""
SEARCHED = 10_000
"""Number of rollouts to search for a wanted reward."""


def next_rollout(
    connection: sqlite3.Connection, start: RolloutIndex | None, older: bool, rewards: RewardRange | None = None
) -> RolloutIndex | None:
    """Find the next older or newer ended rollout with a wanted reward; the newest if ``start`` is None.

    Returns None if there is none among the next ``SEARCHED``.
    """
    beyond = "<" if older and start else ">"
    group_id, index = start or (-1, -1)
    low, high = rewards or (0.0, 0.0)
    ordered = "ORDER BY group_id {0}, rollout_index {0}".format("DESC" if older or start is None else "ASC")
    index_pair: RolloutIndex | None = connection.execute(
        f"SELECT group_id, rollout_index FROM (SELECT group_id, rollout_index, reward FROM rollouts "
        f"WHERE (group_id, rollout_index) {beyond} (:group, :index) AND finish_reason IS NOT NULL {ordered} "
        f"LIMIT :searched) WHERE {'reward >= :low AND reward < :high' if rewards else '1'} {ordered} LIMIT 1",
        {"low": low, "high": high, "group": group_id, "index": index, "searched": SEARCHED if rewards else 1},
    ).fetchone()
    return index_pair


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
