"""How many groups may be lost to failed rollouts: a share of those that ended lately.

A count over a whole run would end long runs for what short ones bear.
"""

from __future__ import annotations

from collections import deque

WINDOW = 100
"""Groups that the share is of: the last ones that ended."""
LEAST = 8
"""Fewer failures among them end no run, unless none is allowed."""


class RecentFailures:
    """The last groups, by whether they failed."""

    def __init__(self, max_share: float) -> None:
        """``max_share``: 0 allows no failure at all, 1 any number."""
        self._max_share = max_share
        self._recent: deque[str] = deque(maxlen=WINDOW)

    @property
    def reasons(self) -> list[str]:
        """Why the groups among them failed that did, the oldest first."""
        return list(filter(None, self._recent))

    def finished(self) -> None:
        """A group ended without a failed rollout."""
        self._recent.append("")

    def failed(self, reason: str) -> None:
        """A group was lost."""
        self._recent.append(reason or "unknown")

    def too_many(self) -> str:
        """How many failed of how many, and why the first of them did; "" while they may."""
        reasons = self.reasons
        if len(reasons) <= self._max_share * len(self._recent) or (self._max_share and len(reasons) < LEAST):
            return ""
        return (
            f"{len(reasons)} of the last {len(self._recent)} groups were lost to failed rollouts; "
            f"the first of them: {reasons[0]}"
        )
