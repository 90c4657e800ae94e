"""A few rollouts to read: the best, the worst and the most stale of those that were trained."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from asyncrl_cli.buffer.queries import group_record
from asyncrl_cli.observe.decoding import Decoder
from asyncrl_cli.observe.tokens import TokenShown, prompt_text, tokens_of

EACH = 3
"""Rollouts of a kind."""
LOOKED_AT = 200
"""Rows read to find rollouts of different groups."""
TOKENS_SHOWN = 600

KINDS = {
    "best": "r.reward DESC, r.group_id DESC",
    "worst": "r.reward, r.group_id DESC",
    "most stale": "b.version - r.oldest DESC, r.group_id DESC",
}
"""Which they are, by the order in which they come first; among equals the newest."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout of its first sequence. ``left_out`` tokens are not shown; ``lag`` is in versions, ``step`` from 1."""

    kind: str
    rollout_id: str
    uid: str
    prompt: str
    reward: float
    tokens: int
    lag: int
    step: int
    shown: tuple[TokenShown, ...]
    left_out: int


def samples(connection: sqlite3.Connection, decoder: Decoder | None) -> list[Sample]:
    """Up to ``EACH`` of each kind, all of different groups within it."""
    return [
        _sample(connection, decoder, kind, *row) for kind, order in KINDS.items() for row in _chosen(connection, order)
    ]


def _chosen(connection: sqlite3.Connection, order: str) -> list[tuple[int, int, float, int, int]]:
    rows = connection.execute(
        "SELECT r.group_id, r.place, r.reward, b.version - r.oldest, g.step + 1 "
        "FROM rollouts r JOIN groups g ON g.id = r.group_id JOIN batches b ON b.step = g.step "
        f"WHERE r.reward IS NOT NULL AND r.oldest IS NOT NULL ORDER BY {order} LIMIT {LOOKED_AT}"
    )
    of_group: dict[int, tuple[int, int, float, int, int]] = {}
    for row in rows:
        of_group.setdefault(row[0], row)
    return list(of_group.values())[:EACH]


def _sample(
    connection: sqlite3.Connection,
    decoder: Decoder | None,
    kind: str,
    group_id: int,
    place: int,
    reward: float,
    lag: int,
    step: int,
) -> Sample:
    group = group_record(connection, group_id)
    rollout = next(one for one in group.rollouts if one.rollout_id.endswith(f"-{place}"))
    shown, left_out = tokens_of(rollout, decoder, TOKENS_SHOWN)
    return Sample(
        kind=kind,
        rollout_id=rollout.rollout_id,
        uid=group.row.uid,
        prompt=prompt_text(group.prompt),
        reward=reward,
        tokens=rollout.tokens,
        lag=lag,
        step=step,
        shown=shown,
        left_out=left_out,
    )
