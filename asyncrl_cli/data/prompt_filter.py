"""Online filtering: training prompts that are solved are excluded, so that others have their turns.

A prompt is excluded once every rollout of its group was right in ``solved_streak`` visits in a row. It keeps a fraction
of its turns, and returns when it is not solved in one of them.

Invariant: what is excluded follows from the visits' outcomes alone, which the journal has (``restore``).
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl_cli.core.seeds import derive_fraction


class PromptFilter:
    """Knows of every prompt in how many visits in a row, up to the newest, it was solved."""

    def __init__(self, solved_streak: int, revisit_fraction: float, seed: int) -> None:
        self._solved_streak = solved_streak
        self._revisit_fraction = revisit_fraction
        self._seed = seed
        self._streaks: dict[str, int] = {}

    @property
    def filtered(self) -> int:
        """Prompts that are excluded now."""
        return sum(streak >= self._solved_streak for streak in self._streaks.values())

    def restore(self, streaks: Mapping[str, int]) -> None:
        """Forget everything but these streaks, by uid."""
        self._streaks = dict(streaks)

    def visited(self, uid: str, solved: bool) -> None:
        """A visit has ended; it was ``solved`` when every rollout was right."""
        if solved:
            self._streaks[uid] = self._streaks.get(uid, 0) + 1
        else:
            self._streaks.pop(uid, None)

    def excludes(self, uid: str, epoch: int) -> bool:
        """Whether a prompt's turn in an epoch goes to others."""
        if self._streaks.get(uid, 0) < self._solved_streak:
            return False
        return derive_fraction(self._seed, epoch, uid) >= self._revisit_fraction
