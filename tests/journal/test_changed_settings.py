"""A resume changes `pipeline.on_stale`, and the steps before and after are verified with their own settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from buffer_stand_ins import SETTINGS, commit, fill, finish, opened, publish_record

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.queries import snapshot
from asyncrl_cli.journal.schema import JournalError
from asyncrl_cli.journal.staleness import Report, staleness_report
from asyncrl_cli.records.groups import BufferSettings, OnStale


def by(on_stale: OnStale, max_staleness: int = 1) -> BufferSettings:
    return replace(SETTINGS, on_stale=on_stale, max_staleness=max_staleness)


def step(book: DurableLedger) -> None:
    """Finish and train the newest groups; older groups keep running."""
    at = book.ledger.step
    fill(book)
    while book.take(at) is not None:
        finish(book, book.ledger.running[-1])
    book.publish(publish_record(at + 1, at + 1))
    commit(book)


def step_with_all(book: DurableLedger) -> None:
    """Finish all groups, and train the oldest ones."""
    at = book.ledger.step
    fill(book)
    finish(book, *book.ledger.running)
    assert book.take(at) is None
    book.publish(publish_record(at + 1, at + 1))
    commit(book)


def report_of(path: Path) -> Report:
    with snapshot(path) as connection:
        return staleness_report(connection)


def late_run(path: Path) -> DurableLedger:
    """A run with `train`; its first groups are late."""
    book = opened(path, by("train"), "resume")
    for _ in range(4):
        step(book)
    assert book.ledger.version - book.ledger.entry(book.ledger.running[0]).version > 1
    return book


@pytest.mark.parametrize("policy", ["wait", "requeue"])
def test_a_strict_policy_is_refused_while_groups_are_late(path: Path, policy: OnStale) -> None:
    late_run(path).journal.close()
    with pytest.raises(JournalError, match=f"cannot change from train to {policy} now: [0-9]+ of the groups") as caught:
        DurableLedger(path, by(policy))
    assert "resume without this change" in caught.value.hint
    assert DurableLedger(path, by("train")).ledger.settings.on_stale == "train", "as before"


def test_each_step_is_checked_against_the_settings_at_its_time(path: Path) -> None:
    book = late_run(path)
    for _ in range(6):  # late groups come first now
        step_with_all(book)
    late = book.ledger.counts().late
    assert late
    book.journal.close()

    book = opened(path, by("wait", max_staleness=2), "resume")
    for _ in range(2):
        step_with_all(book)
    report = report_of(path)
    assert (report.late, report.violations) == (late, ())

    book.journal._connection.execute("UPDATE groups SET version = version - 3 WHERE step IN (9, 11)")
    assert {violation.step for violation in report_of(path).violations} == {12}, "step 9 was taken under `train`"
