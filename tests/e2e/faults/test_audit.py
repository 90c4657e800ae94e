"""The checks of the campaign themselves: an intact journal passes, and every kind of damage is found."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import open_for_reading
from asyncrl_cli.orchestrator.metrics import batch_digest
from tests.e2e.faults.audit import Audit, audit
from tests.e2e.faults.evidence import Evidence
from tests.journal.recorded_run import RecordedRun, settings

STEPS = 6
WITHOUT_CHECKSUMS = (
    "UPDATE groups SET crc = NULL",
    "UPDATE rollouts SET crc = NULL",
    "UPDATE segments SET key_crc = NULL",
)
"""Damage as if by the writer, not by the disk: with checksums, readers would refuse the batch before the audit."""


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete run that was resumed once; some of its rollouts have tokens of two versions."""
    path = tmp_path / "journal.db"
    run = RecordedRun(path, monkeypatch, settings(total_steps=STEPS), lambda group: 9.0 if group == 3 else 3.0)
    for step in range(STEPS):
        run.step()
        if step == 2:
            run.crash(10.0)
    run.book.journal.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        for step in range(STEPS):
            digest = batch_digest(read_batch(connection, step))
            connection.execute("UPDATE batches SET digest = ? WHERE step = ?", (digest, step))
    return path


def audited(path: Path) -> Audit:
    with closing(open_for_reading(path)) as connection:
        return audit(connection, STEPS, lambda serial: f"p{serial}")


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def test_a_sound_journal_passes(journal: Path) -> None:
    found = audited(journal)
    assert found.violations == ()
    assert (found.groups, found.rollouts, found.staleness) == (2 * STEPS, 4 * STEPS, 1)
    assert found.mixed_rollouts > 0


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("DELETE FROM batches WHERE step = 3", "without [3]"),
        ("UPDATE batches SET trained_at = NULL WHERE step = 5", "never reported as trained"),
        ("DELETE FROM publishes WHERE version = 2", "without [2]"),
        ("UPDATE groups SET step = 1 WHERE step = 2", "has 4 groups"),
        ("UPDATE groups SET version = 0 WHERE step = 4", "a group of staleness 4"),
        ("UPDATE groups SET version = version + 1 WHERE step = 4", "tokens of versions"),
        ("UPDATE groups SET serial = serial + 1, uid = 'p' || (serial + 1) WHERE serial > 4", "where 5 comes next"),
        ("UPDATE groups SET uid = 'p1' WHERE serial = 7", "where p7 comes next"),
        ("UPDATE groups SET state = 'finished', step = NULL WHERE id = 2", "still finished"),
        ("UPDATE groups SET state = 'requeued', step = NULL WHERE id = 2", "requeued are"),
        ("UPDATE rollouts SET reward = NULL WHERE group_id = 1 AND rollout_index = 0", "1 of its 2 rewards"),
        ("UPDATE rollouts SET finish_reason = NULL WHERE group_id = 1 AND rollout_index = 0", "unfinished rollout"),
        ("DELETE FROM rollouts WHERE group_id = 1 AND rollout_index = 0", "1 of its 2 rewards"),
        ("DELETE FROM segments WHERE group_id = 1 AND rollout_index = 0 AND start = 0", "other segments than"),
        ("UPDATE segments SET version = -1 WHERE start > 0", "2 of its 4 tokens"),
        ("UPDATE segments SET logprobs = zeroblob(length(logprobs)) WHERE group_id = 1", "cannot be read"),
    ],
)
def test_damage_is_named(journal: Path, statement: str, named: str) -> None:
    change(journal, statement, *WITHOUT_CHECKSUMS)
    assert named in "\n".join(audited(journal).violations)


def test_a_masked_rollout_needs_no_reward(journal: Path) -> None:
    masked = "UPDATE rollouts SET reward = NULL, masked = 1 WHERE group_id = 1 AND rollout_index = 0"
    change(journal, masked, *WITHOUT_CHECKSUMS)
    assert audited(journal).violations == ()


def test_tokens_that_were_not_trained_on_are_named(journal: Path) -> None:
    change(journal, "UPDATE batches SET digest = (SELECT digest FROM batches WHERE step = 0) WHERE step = 1")
    assert audited(journal).violations == ("step 1 trained on other tokens than are recorded",)


def two_snapshots(path: Path, alter: Callable[[Path], None]) -> Evidence:
    """Two snapshots of a journal, altered in between."""
    evidence = Evidence()
    evidence.take_snapshot(path)
    alter(path)
    evidence.take_snapshot(path)
    return evidence


def test_an_active_run_contradicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.db"
    run = RecordedRun(path, monkeypatch, settings(total_steps=STEPS), lambda group: 3.0 + group)
    evidence = Evidence()
    evidence.take_snapshot(tmp_path / "nothing.db")
    for _ in range(STEPS):
        run.step()
        evidence.take_snapshot(path)
    assert evidence.contradictions == []
    assert evidence.snapshots == STEPS
    assert evidence.seen.finished == 4 * STEPS


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("DELETE FROM rollouts WHERE group_id = 3 AND rollout_index = 1", "rollout (3, 1) is lost"),
        ("UPDATE rollouts SET reward = 0.5 WHERE group_id = 3 AND rollout_index = 1", "rollout (3, 1) was stop"),
        ("UPDATE segments SET tokens = zeroblob(length(tokens)) WHERE group_id = 3", "rollout (3, 0) was stop"),
        ("UPDATE segments SET logprobs = zeroblob(length(logprobs)) WHERE group_id = 3", "rollout (3, 0) was stop"),
        ("UPDATE segments SET version = version + 1 WHERE group_id = 3", "rollout (3, 0) was stop"),
        ("UPDATE groups SET step = step + 1 WHERE step = 5", "batches: that of 5"),
        ("UPDATE batches SET digest = 'other' WHERE step = 5", "digests: that of 5"),
        ("UPDATE publishes SET checksum = 'other' WHERE version = 5", "checksums: that of 5"),
        ("UPDATE groups SET uid = 'other' WHERE id = 5", "uids: that of 5"),
    ],
)
def test_what_changes_afterwards_is_named(journal: Path, statement: str, named: str) -> None:
    found = two_snapshots(journal, lambda path: change(path, statement))
    assert named in "\n".join(found.contradictions)


def test_an_unfinished_rollout_may_continue_and_may_not_restart(journal: Path) -> None:
    change(journal, "UPDATE rollouts SET finish_reason = NULL, reward = NULL WHERE group_id = 3")

    def continue_rollout(path: Path) -> None:
        change(
            path,
            "INSERT INTO segments (group_id, rollout_index, branch, start, version, tokens, logprobs, crc) "
            "VALUES (3, 0, 0, 4, 9, x'07000000', x'00000000', 0)",
        )

    def begin_turn(path: Path) -> None:
        change(
            path,
            "INSERT INTO segments (group_id, rollout_index, branch, start, version, tokens, logprobs, crc) "
            "VALUES (3, 0, 0, 5, -1, x'08000000', x'00000000', 0)",
        )

    def end_turn_without_reply(path: Path) -> None:
        change(path, "DELETE FROM segments WHERE version = -1")

    def restart_rollout(path: Path) -> None:
        change(path, "DELETE FROM segments WHERE group_id = 3 AND rollout_index = 0 AND start > 0")

    for later_state in (continue_rollout, begin_turn, end_turn_without_reply):
        assert two_snapshots(journal, later_state).contradictions == []
    found = two_snapshots(journal, restart_rollout)
    assert found.prefixes_seen == 4  # two rollouts in each of two snapshots
    assert "rollout (3, 0) was unfinished" in found.contradictions[0]
