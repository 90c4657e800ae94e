"""A run ends if the share of failures among its recent groups is too large, at any length of the run."""

from __future__ import annotations

from asyncrl_cli.orchestrator.rollout_scheduler import MIN_FAILURES, RECENT_GROUPS, RecentFailures
from asyncrl_cli.records.rewards import RewardFailure


def ended(failures: RecentFailures, groups: int, every: int) -> int | None:
    """The number of groups after which the run ends if one in ``every`` fails."""
    for number in range(1, groups + 1):
        failures.count_group(RewardFailure(f"group {number}") if number % every == 0 else None)
        if failures.too_many():
            return number
    return None


def test_rare_failures_end_no_run_however_long_it_is() -> None:
    assert ended(RecentFailures(0.25), 100_000, every=4) is None
    assert ended(RecentFailures(0.01), 100_000, every=100) is None


def test_a_cause_that_stays_ends_the_run_soon() -> None:
    assert ended(RecentFailures(0.25), 1_000, every=1) == MIN_FAILURES
    assert ended(RecentFailures(0.25), 1_000, every=2) == 2 * MIN_FAILURES
    failures = RecentFailures(0.25)
    assert ended(failures, 9_500, every=1_000) is None
    assert ended(failures, RECENT_GROUPS, every=1) == RECENT_GROUPS // 4 + 1, "after a long time without failures"
    assert failures.too_many() == "26 of the last 100 groups were lost; the first of them: group 1"


def test_none_and_all_may_be_allowed() -> None:
    assert ended(RecentFailures(0.0), 10, every=1) == 1
    assert ended(RecentFailures(0.0), 1_000, every=700) == 700
    assert ended(RecentFailures(1.0), 1_000, every=1) is None
