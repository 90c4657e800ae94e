"""The journal's file: its contents, its readers at every moment, and the errors when it fails."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from buffer_stand_ins import (
    SETTINGS,
    batch_in,
    candidates,
    commit,
    content,
    contents,
    fill,
    finish,
    one_step,
    opened,
    pieces,
    prune,
    publish_record,
    rollout,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.journal import file as journal_file
from asyncrl_cli.journal import schema
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.history import engine_requests, pauses_since
from asyncrl_cli.journal.progress import ledger_state, newest_serial
from asyncrl_cli.journal.rollout_rows import read_batch
from asyncrl_cli.journal.schema import DAMAGED, FILE, SCHEMA, JournalError, open_for_reading, open_for_writing
from asyncrl_cli.records.generation import EngineRequest
from asyncrl_cli.records.groups import Outcome, PublishRecord
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored
from tests.conftest import not_writable

pytestmark = pytest.mark.slow


def book_with_steps(path: Path, steps: int) -> DurableLedger:
    """A ledger with some taken steps, a finished group, and a group with a finished and an unfinished rollout."""
    book = opened(path)
    for _ in range(steps):
        one_step(book)
    fill(book)
    running = book.ledger.running
    finish(book, running[1])
    book.record([rollout(f"{running[0]}-0")])
    book.grown(pieces(rollout(f"{running[0]}-1")))
    commit(book)
    return book


def count(connection: sqlite3.Connection, table: str) -> int:
    (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(rows)


SINGLE = replace(SETTINGS, group_size=1, reject_uniform=False, max_staleness=2, earlier_results=True)


@settings(max_examples=30)
@given(data=st.data())
def test_a_group_of_one_has_the_results_of_its_prompt_in_earlier_batches(data: st.DataObject) -> None:
    """Groups finish in any order, and a batch may have the same prompt several times."""
    names = st.sampled_from("abc")
    trained: list[tuple[int, str, Scored]] = []  # group, uid, result
    with TemporaryDirectory() as folder, patch("asyncrl_cli.journal.rollout_rows.MOST_VISITS", 3):
        path = Path(folder) / FILE
        book = opened(path, SINGLE)
        batches = []
        for step in range(data.draw(st.integers(1, 7))):
            while book.take(step) is not None:
                admitted = candidates(book.journal.read(newest_serial) + 1, book.ledger.room())
                book.admit([replace(one, prompt=Prompt(data.draw(names), "")) for one in admitted])
                commit(book)
                group_id = data.draw(st.sampled_from(book.ledger.running))
                result = Scored(data.draw(st.floats(-1, 1)), {"format": 1.0})
                book.record([rollout(f"{group_id}-0")], [Outcome(f"{group_id}-0", result)])
            book.publish(publish_record(step + 1, step + 1))
            commit(book)
            batches.append(content(book.batch(step)))
        for step, batch in enumerate(batches):  # when later batches are there, and after a restart
            found = batch_in(path, step, earlier=True).groups
            assert content(batch_in(path, step, earlier=True)) == batch
            for group in found:
                known = [one for one in sorted(trained, reverse=True, key=itemgetter(0)) if one[1] == group.uid]
                assert group.earlier == tuple(result for *_, result in known[:3])
            trained += [(one.group_id, one.uid, Scored(one.rewards[0], one.metrics[0])) for one in found]
        book.journal.close()


# -- commits


def test_a_lock_of_another_program_is_reported_and_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LOCK_PATIENCE_S", 0.01)
    book = book_with_steps(path, 1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        finish(book, book.ledger.running[0])
        noted = book.journal.noted()
        for act in (lambda: book.journal.commit(noted), lambda: book.journal.prune(1)):
            with pytest.raises(JournalError, match="locked") as caught:
                act()
            assert "another program holds its lock" in caught.value.hint
        other.execute("COMMIT")
    book.journal.commit(noted)
    book.journal.close()
    assert DurableLedger(path, SETTINGS).ledger.snapshot() == book.ledger.snapshot()


# -- pruning


def test_pruning_keeps_what_is_still_needed(path: Path) -> None:
    book = book_with_steps(path, 4)
    batches = [content(book.journal.batch(step)) for step in range(4)]
    snapshot = book.ledger.snapshot()
    prune(book, 2)
    for step in (0, 1):
        with pytest.raises(LookupError, match=f"the tokens of step {step} are pruned"):
            book.journal.batch(step)
    assert [content(book.journal.batch(step)) for step in (2, 3)] == batches[2:]
    book.journal.close()
    book = DurableLedger(path, SETTINGS)
    assert book.ledger.snapshot() == snapshot
    (half, *_) = book.opening().groups
    name = f"{half.group_id}-0"
    assert contents(half.unscored[0]) == contents(rollout(name))
    assert half.prefixes.keys() == {1}
    prune(book, 100)
    with pytest.raises(LookupError, match="the tokens of step 3 are pruned"):
        book.journal.batch(3)
    finish(book, half.group_id)
    assert book.take(4) is None
    commit(book)
    assert contents(book.journal.batch(4).groups[0].rollouts[0]) == contents(rollout(name))
    assert len(book.journal.batch(4).groups) == 2, "running and finished groups were kept"


def test_pruning_takes_small_commits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "PRUNED_AT_ONCE", 2)
    book = book_with_steps(path, 4)
    assert prune(book, 3) == 4, "six groups, two at a time, and a last call that finds none"
    assert prune(book, 3) == 1
    assert book.journal.batch(3).step == 3


def test_a_rejected_group_is_pruned_with_its_neighbours(path: Path) -> None:
    book = book_with_steps(path, 1)
    book.score([Outcome(f"{book.ledger.running[0]}-1", RewardFailure("the engine refused"))])
    commit(book)
    rows = "SELECT DISTINCT group_id FROM segments ORDER BY group_id"
    assert [g for (g,) in book.journal._connection.execute(rows)] == [0, 1, 2, 3]
    prune(book, 1)
    assert [g for (g,) in book.journal._connection.execute(rows)] == [3]
    assert count(book.journal._connection, "rollouts") == 8, "their states are still known"


@pytest.mark.parametrize(
    "question",
    [
        lambda book: book.opening(),
        lambda book: book.fallback(0),
        lambda book: book.journal.read(ledger_state),
        lambda book: book.journal.prune(1),
        lambda book: book.journal.batch(0),
    ],
)
def test_no_query_reads_every_group(path: Path, question: Callable[[DurableLedger], object]) -> None:
    book = book_with_steps(path, 1)
    connection = book.journal._connection
    asked: list[str] = []
    connection.set_trace_callback(asked.append)
    question(book)
    connection.set_trace_callback(None)
    queries = [sql for sql in asked if sql.lstrip().startswith(("SELECT", "DELETE"))]
    assert queries
    for sql in queries:
        plan = [row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")]
        slow = [line for line in plan if line.split()[1] in ("groups", "rollouts", "segments") and "USING" not in line]
        assert not slow or "LIMIT 1" in sql or "max(id)" in sql, f"{slow}: {sql}"


# -- readers


def test_a_reader_sees_each_commit_and_delays_none(path: Path) -> None:
    book = book_with_steps(path, 1)
    with closing(open_for_reading(path)) as looking, closing(open_for_reading(path)) as watching:
        looking.execute("BEGIN")
        assert count(looking, "batches") == 1
        finish(book, book.ledger.running[0])
        assert book.take(1) is None
        assert count(watching, "batches") == 1, "noted events are not committed yet"
        commit(book)
        assert count(watching, "batches") == 2
        assert count(looking, "batches") == 1, "a snapshot shows one moment"
        assert content(read_batch(watching, 1)) == content(book.journal.batch(1))
        looking.execute("COMMIT")
        assert count(looking, "batches") == 2


def test_a_reader_cannot_write(path: Path) -> None:
    book_with_steps(path, 1)
    with closing(open_for_reading(path)) as connection, pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM groups")


def test_a_finished_run_can_be_read_where_nothing_may_be_written(archive: Path) -> None:
    book = book_with_steps(archive / FILE, 2)
    batches = [content(book.journal.batch(step)) for step in range(2)]
    book.journal.close()
    with not_writable(archive):
        with pytest.raises(PermissionError):
            (archive / "new").touch()
        assert [content(batch_in(archive / FILE, step)) for step in range(2)] == batches
        with pytest.raises(JournalError):
            open_for_writing(archive / FILE)


def test_a_killed_run_is_never_read_without_its_last_commits(archive: Path, path: Path) -> None:
    book = book_with_steps(path, 2)
    for end in ("", "-wal"):
        shutil.copyfile(f"{path}{end}", archive / f"{FILE}{end}")
    with not_writable(archive), pytest.raises(JournalError, match=f"{FILE}-wal") as caught:
        open_for_reading(archive / FILE)
    assert "copy the folder" in caught.value.hint
    assert content(batch_in(archive / FILE, 1)) == content(book.journal.batch(1))


# -- files that are not journals


def test_a_missing_journal_is_an_error_with_its_path(path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal") as caught:
        open_for_reading(path)
    assert caught.value.location == str(path)
    assert not path.exists()
    with pytest.raises(JournalError, match="unable to open"):
        open_for_writing(path.parent / "missing" / FILE)


@pytest.mark.parametrize("use", [open_for_reading, open_for_writing])
@pytest.mark.parametrize("number", [SCHEMA - 1, 8])
def test_another_schema_is_refused_and_not_changed(
    path: Path, number: int, use: Callable[[Path], sqlite3.Connection]
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {number}")
    before = path.read_bytes()
    with pytest.raises(JournalError, match=f"schema {number}, and this asyncrl reads only schema {SCHEMA}") as caught:
        use(path)
    assert caught.value.hint == "use the asyncrl that wrote it; manifest.json next to it has the version"
    assert caught.value.location == str(path)
    assert path.read_bytes() == before


REQUESTS = [
    EngineRequest("0-0", "engine-0", 1.0, 5.0, "aborted", 7, 12, 4, 2.0, 4.5),
    EngineRequest("eval:0:greedy:3", "engine-0", 2.0, 6.0, "stop", 9, 12, 0, 2.5, 5.5),
    EngineRequest("0-0", "engine-1", 6.0, 7.0, "cancelled", 0, 19),
]


def test_engine_requests_and_publish_waits_are_recorded(path: Path) -> None:
    book, pauses = book_with_steps(path, 1), {"engine-0": (1.5, 2.0), "engine-1": (1.25, 1.5)}
    for one in REQUESTS:
        book.journal.requested(one)
    book.journal.published(
        PublishRecord(2, 2, "sum", 1.0, 0.5, 0.0, 0.0, write_s=0.25, transfer_s=0.125, waited_s=3.0, pauses=pauses)
    )
    commit(book)
    book.journal.close()
    with closing(open_for_reading(path)) as connection:
        assert list(engine_requests(connection)) == REQUESTS
        row = connection.execute("SELECT write_s, transfer_s, waited_s FROM publishes WHERE version = 2").fetchone()
        assert row == (0.25, 0.125, 3.0)
        assert pauses_since(connection, 0.0) == {name: [pause] for name, pause in pauses.items()}


def read_all(path: Path) -> None:
    book = DurableLedger(path, SETTINGS)
    book.opening()
    book.journal.batch(0)


def not_a_database(data: bytes) -> bytes:
    return b"{}\n" * 10_000


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def with_a_torn_page(data: bytes) -> bytes:
    return data[:16384] + bytes(16384) + data[2 * 16384 :]


def with_flipped_bits(data: bytes) -> bytes:
    """Flip bits in the tokens of step 0, which SQLite does not notice."""
    at = data.index(rollout("0-0").ids.tobytes())
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", [not_a_database, truncated, with_a_torn_page, with_flipped_bits])
def test_a_damaged_journal_is_an_error_with_a_hint(path: Path, damage: Callable[[bytes], bytes]) -> None:
    book_with_steps(path, 2).journal.close()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(JournalError) as caught:
        read_all(path)
    assert caught.value.location == str(path)
    assert caught.value.hint == DAMAGED
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE meta SET value = '{' WHERE key = 'base'",
        "UPDATE groups SET fields = '{' WHERE state = 'running'",
        "UPDATE groups SET prompt_ids = x'00' WHERE state = 'running'",
        "UPDATE publishes SET version = 1000",
        "UPDATE groups SET version = 1000 WHERE id = 2",
    ],
)
def test_inconsistent_values_are_damage(path: Path, sql: str) -> None:
    book = book_with_steps(path, 1)
    book.journal._connection.execute(sql)
    book.journal.close()
    with pytest.raises(JournalError, match=r"the journal (is inconsistent|failed: malformed)") as caught:
        DurableLedger(path, SETTINGS).opening()
    assert caught.value.hint == DAMAGED
