"""Online filtering: training prompts that are solved make room for others.

A prompt is retired once every rollout of its group was right in so many visits in a row. It keeps a share of its
turns, and comes back when it is not solved in one of them.

Invariant: what is retired follows from the visits' outcomes alone, which the journal has (``restore``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


class Pools:
    """Knows of every prompt in how many visits in a row, up to the newest, it was solved."""

    def __init__(self, retire_after: int, revisit: float, seed: int) -> None:
        self._retire_after = retire_after
        self._revisit = revisit
        self._seed = seed
        self._solved_in_a_row: dict[str, int] = {}

    @property
    def retired(self) -> int:
        """Prompts that are left out now."""
        return sum(visits >= self._retire_after for visits in self._solved_in_a_row.values())

    def restore(self, solved_in_a_row: Mapping[str, int]) -> None:
        """Forget everything but these outcomes, by uid."""
        self._solved_in_a_row = dict(solved_in_a_row)

    def visited(self, uid: str, solved: bool) -> None:
        """A visit has ended; it was ``solved`` when every rollout was right."""
        if solved:
            self._solved_in_a_row[uid] = self._solved_in_a_row.get(uid, 0) + 1
        else:
            self._solved_in_a_row.pop(uid, None)

    def leaves_out(self, uid: str, epoch: int) -> bool:
        """Whether a prompt's turn in an epoch goes to others."""
        if self._solved_in_a_row.get(uid, 0) < self._retire_after:
            return False
        digest = hashlib.blake2b(f"{self._seed}/{epoch}/{uid}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 >= self._revisit
