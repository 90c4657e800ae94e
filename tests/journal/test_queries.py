"""The inspection commands' queries on a journal that the buffer wrote."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl_cli.journal import queries
from asyncrl_cli.journal.history import history
from asyncrl_cli.journal.queries import GroupState, group_record, list_groups, overview
from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import JournalError, open_for_writing
from asyncrl_cli.journal.staleness import StepStaleness, in_ranges, staleness_report
from asyncrl_cli.records.generation import CONTEXT
from asyncrl_cli.records.groups import Outcome
from asyncrl_cli.records.rewards import RewardFailure, Scored
from tests.journal.recorded_run import EpisodeRun, RecordedRun, settings

pytestmark = pytest.mark.slow


@pytest.fixture
def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """A run with three trained steps, a fourth batch taken, a finished group and running groups. Groups last 3, 7, 11,
    3, ... s."""
    run = RecordedRun(path, monkeypatch, settings(max_staleness=2), lambda g: 3.0 + 4 * (g % 3), concurrency=4)
    for _ in range(3):
        run.step()
    run.take()
    return run


@pytest.fixture
def journal(run: RecordedRun, path: Path) -> Iterator[sqlite3.Connection]:
    with queries.snapshot(path) as connection:
        yield connection


def ids(rows: list[queries.GroupRow]) -> list[int]:
    return [row.group_id for row in rows]


# -- the whole buffer


def test_overview_shows_ages_tokens_and_deadlines(run: RecordedRun, path: Path) -> None:
    ledger = run.book.ledger
    open_group = ledger.running[0]
    growing = run.rollout(open_group, 0)
    run.book.grown(growing.segments(growing.rollout_id)[:1])
    run.commit()
    with queries.snapshot(path) as connection:
        found = overview(connection, time_s=run.now + 60)
    running, finished, taken = found.states[:3]
    assert (running.rollouts, running.tokens) == (0, 2), "the tokens so far"
    assert (finished.rollouts, finished.tokens) == (2 * finished.groups, 8 * finished.groups)
    assert taken.oldest_s == taken.age_s == 60
    assert finished.oldest_s is not None
    assert finished.oldest_s >= 60
    assert running.oldest_s is not None
    assert running.oldest_s > 60
    assert (found.progress.step, found.progress.version) == (4, 3)
    outstanding = [*ledger.running, *ledger.finished]
    assert sum(due.running for due in found.due) == len(ledger.running)
    assert sum(due.finished for due in found.due) == len(ledger.finished)
    assert {(due.version, due.deadline) for due in found.due} == {
        (ledger.entry(group_id).version, ledger.entry(group_id).deadline) for group_id in outstanding
    }
    assert all(due.staleness == 3 - due.version for due in found.due)


def test_rejected_groups_are_counted_by_reason_and_requeued_groups_separately(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = settings(on_stale="requeue", reject_uniform=True)
    # Group 0 takes so long that its prompt is requeued.
    run = RecordedRun(path, monkeypatch, of, lambda g: 1000.0 if g == 0 else 3.0, concurrency=4)
    run.step()
    run.step()
    failed, uniform = [group for group in run.book.ledger.running if group != 0][:2]
    run.book.score([Outcome(f"{failed}-0", RewardFailure("the reward raised KeyError: 'x'"))])
    run.book.score([Outcome(f"{uniform}-0", Scored(1.0)), Outcome(f"{uniform}-1", Scored(1.0))])
    run.commit()
    with queries.snapshot(path) as connection:
        found = overview(connection)
        requeued = list_groups(connection, "requeued", 10)
        assert [row.reason for row in list_groups(connection, "rejected", 10)] == ["uniform", "failed"]
        record = group_record(connection, failed)
    assert found.rejected == {"failed": 1, "uniform": 1}
    assert ids(requeued) == [0]
    assert requeued[0].staleness is None
    assert record.rollouts[0].failure == "the reward raised KeyError: 'x'"


def test_an_empty_journal_is_refused(path: Path) -> None:
    open_for_writing(path).close()
    with (
        pytest.raises(JournalError, match=r"the journal is empty \(wait until the run has started"),
        queries.snapshot(path),
    ):
        pass


def test_all_queries_of_a_snapshot_see_one_moment(run: RecordedRun, path: Path) -> None:
    with queries.snapshot(path) as connection:
        before = overview(connection, time_s=0)
        run.pass_time(20)
        assert overview(connection, time_s=0) == before
    with queries.snapshot(path) as connection:
        assert overview(connection, time_s=0) != before


def test_the_overview_reads_neither_tokens_nor_the_entire_history(journal: sqlite3.Connection) -> None:
    statements: list[str] = []
    journal.set_trace_callback(statements.append)
    overview(journal)
    journal.set_trace_callback(None)
    assert len(statements) > 5
    for statement in statements:
        plan = [row[3] for row in journal.execute(f"EXPLAIN QUERY PLAN {statement}")]
        for table in ("segments", "rollouts", "r", "groups", "g"):
            full = [line for line in plan if line == f"SCAN {table}" or line.startswith(f"SCAN {table} USING INTEGER")]
            assert not full, (statement, plan)


# -- groups


@pytest.mark.parametrize("state", queries.STATES)
def test_listing_by_state(state: GroupState, journal: sqlite3.Connection) -> None:
    rows = list_groups(journal, state, 100)
    count = next(count for count in overview(journal).states if count.state == state)
    assert len(rows) == count.groups
    assert all(row.state == state for row in rows)
    assert ids(rows) == sorted(ids(rows), reverse=True)
    everything = list_groups(journal, None, 100)
    assert rows == [row for row in everything if row.state == state]
    assert list_groups(journal, None, 3) == everything[:3]


@pytest.fixture
def episodes(path: Path, monkeypatch: pytest.MonkeyPatch) -> EpisodeRun:
    """The same run with episodes."""
    run = EpisodeRun(path, monkeypatch, settings(max_staleness=2), lambda g: 3.0 + 4 * (g % 3), concurrency=4)
    for _ in range(3):
        run.step()
    return run


def test_context_tokens_of_episodes_are_not_counted(episodes: EpisodeRun, path: Path) -> None:
    with queries.snapshot(path) as connection:
        report = staleness_report(connection)
        crossed = next(row for row in list_groups(connection, "trained", 100) if row.staleness)
        record = group_record(connection, crossed.group_id)
        batches = [read_batch(connection, step.first_step - 1) for step in report.steps]
    assert crossed.tokens == 16, "two calls and a branch for each of two rollouts"
    assert report.violations == ()
    for step, batch in zip(report.steps, batches, strict=True):
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        versions = [version for rollout in rollouts for version in rollout.sampled_versions.tolist()]
        assert sorted(step.tokens.elements()) == sorted(batch.version - version for version in versions)
        assert step.crossed == sum(len(set(rollout.sampled_versions.tolist())) == 2 for rollout in rollouts)
    first = record.rollouts[0]
    assert (first.tokens, first.metrics) == (8, {"turns": 3.0, "seconds": 0.5})
    parts = [(segment.rollout_id, segment.start, segment.version == CONTEXT) for segment in first.segments]
    name = first.rollout_id
    assert parts == [
        *((name, 0, True), (name, 3, False), (name, 5, True), (name, 7, False)),
        *((f"{name}.1", 0, True), (f"{name}.1", 3, False)),
    ]


def damage(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        assert connection.execute(sql).rowcount > 0
    connection.close()


# -- staleness


def test_staleness_report_matches_the_rows(run: RecordedRun, journal: sqlite3.Connection) -> None:
    report = staleness_report(journal)
    assert report.violations == ()
    assert (report.late, report.groups) == (0, 8)
    assert [step.first_step for step in report.steps] == [1, 2, 3, 4]
    for step in report.steps:
        batch = run.book.journal.batch(step.first_step - 1)
        found = [int(batch.version - version) for g in batch.groups for r in g.rollouts for version in r.versions]
        assert sorted(step.tokens.elements()) == sorted(found)
        assert sorted(step.groups.elements()) == sorted(batch.version - group.version for group in batch.groups)
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        assert (step.rollouts, step.crossed) == (4, sum(r.versions[0] != r.versions[-1] for r in rollouts))
    assert max(staleness for step in report.steps for staleness in step.groups) > 0
    assert any(step.crossed for step in report.steps)


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        (
            "UPDATE groups SET version = 0 WHERE step = 3",
            "admitted at version 0, trained at version 3: 3 versions later",
        ),
        ("UPDATE groups SET version = 4 WHERE step = 3", "trained at version 3: before this version existed"),
        (
            "UPDATE segments SET version = -1 WHERE group_id = 1 AND rollout_index = 1 AND start = 0",
            "older than its group",
        ),
        (
            "UPDATE segments SET version = 9 WHERE group_id = 1 AND rollout_index = 1 AND start = 0",
            "newer than its batch",
        ),
        ("UPDATE batches SET version = 1 WHERE step = 2", "its step belongs to version 2"),
        ("UPDATE groups SET step = 77 WHERE id = 1", "there is no such batch"),
        ("UPDATE segments SET version = -1 WHERE group_id = (SELECT max(group_id) FROM segments)", "older than its"),
    ],
)
def test_a_violation_of_the_guarantee_is_found(run: RecordedRun, path: Path, sql: str, what: str) -> None:
    damage(path, sql)
    with queries.snapshot(path) as connection:
        violations = staleness_report(connection).violations
    assert any(what in violation.what for violation in violations), violations


def test_dropped_tokens_are_reported(run: RecordedRun, path: Path) -> None:
    damage(path, "DELETE FROM segments WHERE group_id IN (SELECT id FROM groups WHERE step = 0)")
    with queries.snapshot(path) as connection:
        report = staleness_report(connection)
    assert [step.dropped for step in report.steps] == [True, False, False, False]
    assert report.steps[0].tokens.total() == 0
    assert report.steps[0].groups.total() == 2
    assert report.violations == ()


def test_tokens_are_counted_by_the_index(journal: sqlite3.Connection) -> None:
    statements: list[str] = []
    journal.set_trace_callback(statements.append)
    staleness_report(journal)
    journal.set_trace_callback(None)
    (counting,) = [statement for statement in statements if "length(tokens)" in statement]
    assert "segments_sizes" in str([row[3] for row in journal.execute(f"EXPLAIN QUERY PLAN {counting}")])


def test_steps_are_combined_into_ranges() -> None:
    steps = tuple(StepStaleness(step, step) for step in range(95))
    assert in_ranges(steps[:20], 20) == steps[:20]
    assert [(r.first_step, r.last_step) for r in in_ranges(steps[:21], 20)][-2:] == [(18, 19), (20, 20)]
    assert [(r.first_step, r.last_step) for r in in_ranges(steps, 20)][-2:] == [(85, 89), (90, 94)]
    assert in_ranges((), 20) == ()


# -- history


def test_history_lists_the_last_failures_and_counts_all(run: RecordedRun, path: Path) -> None:
    for number in range(12):
        run.book.journal.failed("killed", "engine-0", f"message {number}")
    run.commit()
    with queries.snapshot(path) as connection:
        listed = history(connection)
    assert [failure.message for failure in listed.failures] == [f"message {number}" for number in range(2, 12)]
    assert listed.failures_by_kind == {"killed": 12}
