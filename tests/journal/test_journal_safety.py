"""The journal stays correct: one writer, storable values, checksums, and checkpoints that match the disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from buffer_stand_ins import (
    SETTINGS,
    candidates,
    commit,
    fill,
    finish,
    one_step,
    opened,
    prune,
    publish_record,
    rollout,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl_cli.journal import progress, queries, schema
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.history import history
from asyncrl_cli.journal.progress import ledger_state
from asyncrl_cli.journal.rollout_rows import read_group, read_rollouts
from asyncrl_cli.journal.schema import DAMAGED, FILE, JournalError, check
from asyncrl_cli.records.groups import Candidate, LedgerState, Outcome
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored

pytestmark = pytest.mark.slow

HALF_A_PAIR = "caf\ud83d"


# -- one writer


def test_of_two_writers_that_start_together_one_is_refused(path: Path) -> None:
    one_step(opened(path))
    first, second = (DurableLedger(path, SETTINGS) for _ in range(2))
    for book in (first, second):
        book.start("resume", "")
    commit(first)
    with pytest.raises(JournalError, match="another process writes"):
        commit(second)
    one_step(first)


def test_an_earlier_writer_cannot_commit_while_a_new_writer_starts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LOCK_PATIENCE_S", 0.0)
    old = opened(path)
    one_step(old)
    finish(old, *old.ledger.running[:2])
    assert old.take(1) is None
    refused = []

    def while_reading(connection: sqlite3.Connection) -> LedgerState:
        with pytest.raises(JournalError, match="locked") as caught:
            commit(old)
        refused.append(caught)
        return ledger_state(connection)

    monkeypatch.setattr(progress, "ledger_state", while_reading)
    new = DurableLedger.begin(path, SETTINGS, "resume", "")
    assert refused
    assert new.ledger.step == new.journal.read(ledger_state).step == 1
    old.journal.failed("engine", "engine-0", "a message")
    with pytest.raises(JournalError, match="another process writes"):
        commit(old)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=4, max_size=30))
def test_after_any_actions_of_two_writers_the_journal_is_the_newer_ones(
    tmp_path_factory: pytest.TempPathFactory, turns: list[int]
) -> None:
    path = tmp_path_factory.mktemp("journal") / FILE
    books = [opened(path)]
    one_step(books[0])
    books.append(opened(path, kind="resume"))
    old = books[0]
    for turn in turns:
        if turn:
            one_step(books[1])
            continue
        old.journal.failed("engine", "engine-0", "a message")
        with pytest.raises(JournalError, match="another process writes"):
            commit(old)
    books[1].journal.close()
    with queries.snapshot(path) as connection:
        assert not history(connection).failures
    assert DurableLedger(path, SETTINGS).ledger.snapshot() == books[1].ledger.snapshot()


# -- files that are deleted, replaced or truncated


def files(path: Path, *endings: str) -> list[Path]:
    return [Path(f"{path}{ending}") for ending in endings]


@pytest.mark.parametrize("deleted", [("", "-wal", "-shm"), ("",), ("-wal",), ("-shm",), ("-wal", "-shm")], ids="+".join)
def test_deleted_files_end_the_run_and_lose_nothing_acknowledged(path: Path, deleted: tuple[str, ...]) -> None:
    book = opened(path)
    one_step(book)
    acknowledged = book.ledger.snapshot()
    for file in files(path, *deleted):
        file.unlink()
    book.journal.failed("engine", "engine-0", "never acknowledged")
    with pytest.raises(JournalError, match="was deleted, moved or replaced") as caught:
        commit(book)
    assert f"everything acknowledged is in {path}: `asyncrl resume` continues" in caught.value.hint
    check(path)
    assert DurableLedger(path, SETTINGS).ledger.snapshot() == acknowledged
    with queries.snapshot(path) as connection:
        assert not history(connection).failures
    assert {file.name for file in path.parent.iterdir()} <= {FILE, f"{FILE}-wal", f"{FILE}-shm"}


def test_a_replaced_file_is_kept_and_a_copy_has_everything_acknowledged(path: Path) -> None:
    book = opened(path)
    one_step(book)
    acknowledged = book.ledger.snapshot()
    other = path.with_name("other")
    other.write_bytes(b"from another run")
    other.replace(path)
    with pytest.raises(JournalError, match=r"journal\.db was deleted, moved or replaced") as caught:
        one_step(book)
    assert "journal.db.saved" in caught.value.hint
    assert path.read_bytes() == b"from another run"
    assert DurableLedger(path.with_name("journal.db.saved"), SETTINGS).ledger.snapshot() == acknowledged


@pytest.mark.parametrize("ending", ["", "-wal"])
def test_a_truncated_file_ends_the_run(path: Path, ending: str) -> None:
    book = opened(path)
    one_step(book)
    with files(path, ending)[0].open("r+b") as file:
        file.truncate(4096)
    for act in (lambda: one_step(book), lambda: book.journal.prune(1)):
        with pytest.raises(JournalError, match=rf"{ending} was cut from \d+ to 4096 bytes"):
            act()


def test_a_moved_folder_ends_the_run_and_has_everything_acknowledged(path: Path, tmp_path: Path) -> None:
    path = tmp_path / "run" / FILE
    path.parent.mkdir()
    book = opened(path)
    one_step(book)
    acknowledged = book.ledger.snapshot()
    path.parent.rename(tmp_path / "moved")
    with pytest.raises(JournalError, match="was deleted, moved or replaced") as caught:
        one_step(book)
    assert "must stay in place" in caught.value.hint
    with pytest.raises(JournalError, match="was deleted, moved or replaced"):  # also without another commit
        book.journal.close()
    assert not path.parent.exists()
    assert DurableLedger(tmp_path / "moved" / FILE, SETTINGS).ledger.snapshot() == acknowledged


# -- values that cannot be stored


def test_a_prompt_that_cannot_be_stored_is_named_and_harms_no_other(path: Path) -> None:
    book = opened(path)
    (good,) = book.admit(candidates(1, 1))
    (second,) = candidates(2, 1)
    for faulty, fault in (
        (Prompt(HALF_A_PAIR, "text"), "not valid Unicode"),
        (Prompt("p2", "text", {"what": object()}), "not JSON serializable"),
    ):
        with pytest.raises(JournalError, match=f"prompt .* cannot be stored: .*{fault}") as caught:
            book.admit([replace(second, prompt=faulty)])
        assert repr(faulty.uid) in caught.value.message
    with pytest.raises(JournalError, match="int32"):
        book.admit([replace(second, prompt_ids=(2**40,))])
    commit(book)
    assert book.ledger.running == (good.group_id,)
    assert DurableLedger(path, SETTINGS).ledger.snapshot() == book.ledger.snapshot()


@pytest.mark.parametrize(
    "note",
    [
        lambda book: book.publish(replace(publish_record(1, 1), change=float("nan"))),
        lambda book: book.publish(replace(publish_record(1, 1), checksum=HALF_A_PAIR)),
        lambda book: book.score([Outcome("2-0", Scored(float("nan")))]),
        lambda book: book.record([replace(rollout("2-0"), finish_reason=HALF_A_PAIR)]),
        lambda book: book.journal.evaluated(
            {"step": 1, "kind": "greedy", "accuracy": float("nan")}
            | dict.fromkeys(("mean_reward", "mean_length", "prompts", "oldest", "newest"), 0)
        ),
        lambda book: book.journal.checkpointed(2**70, "step", 0.0),
        lambda book: book.journal.checkpointed(1, "step", np.int64(3)),
    ],
)
def test_a_row_that_cannot_be_stored_is_refused_before_the_commit(
    path: Path, note: Callable[[DurableLedger], object]
) -> None:
    book = opened(path)
    fill(book)
    finish(book, *book.ledger.running[:2])
    assert book.take(0) is None
    before = book.ledger.snapshot()
    with pytest.raises(JournalError, match=r"the row .* cannot be stored: it contains"):
        note(book)
    assert book.ledger.snapshot() == before
    commit(book)
    assert DurableLedger(path, SETTINGS).ledger.snapshot() == before, "the others' rows are written"


def test_only_characters_that_cannot_be_stored_are_escaped_in_a_message(path: Path) -> None:
    book = opened(path)
    book.admit(candidates(1, 1))
    book.journal.failed("engine", HALF_A_PAIR, f"é {HALF_A_PAIR}")
    book.score([Outcome("0-0", RewardFailure(HALF_A_PAIR))])
    commit(book)
    with queries.snapshot(path) as connection:
        (failure,) = history(connection).failures
        (first,) = queries.group_record(connection, 0).rollouts
    assert (failure.part, failure.message, first.failure) == (r"caf\ud83d", r"é caf\ud83d", r"caf\ud83d")


# -- damage


@pytest.mark.parametrize(
    ("sql", "fault"),
    [
        (
            "UPDATE rollouts SET reward = 0.25 WHERE group_id = 0 AND rollout_index = 1",
            "rollout 0-1 has a wrong checksum",
        ),
        ("UPDATE rollouts SET finish_reason = 'stpp' WHERE group_id = 0", "rollout 0-0 has a wrong checksum"),
        (
            "UPDATE rollouts SET group_id = 5000 WHERE group_id = 0 AND rollout_index = 0",
            "group 0 has 1 of its 2 rewards",
        ),
        ("UPDATE groups SET prompt = '\"texu 1\"' WHERE id = 0", "the prompt of group 0 has a wrong checksum"),
        ("UPDATE groups SET version = 1 WHERE id = 0", "the prompt of group 0 has a wrong checksum"),
        ("UPDATE groups SET step = 3 WHERE id = 0", "the batch of step 0 has 1 groups"),
        (
            "UPDATE segments SET group_id = 5000 WHERE group_id = 0 AND rollout_index = 0",
            "rollout 0-0 has 0 of its 2 tokens",
        ),
        ("UPDATE segments SET version = 1 WHERE group_id = 0 AND rollout_index = 0", "0-0 have a wrong checksum"),
        ("UPDATE groups SET uid = CAST(x'ff41' AS TEXT) WHERE id = 0", "decode"),
    ],
)
def test_changed_values_are_found_as_damage(path: Path, sql: str, fault: str) -> None:
    book = opened(path)
    one_step(book)
    book.journal._connection.execute(sql)
    with pytest.raises(JournalError, match=fault) as caught:
        book.journal.batch(0)
    assert caught.value.hint == DAMAGED


@pytest.mark.parametrize(
    ("sql", "fault"),
    [
        ("UPDATE rollouts SET reward = 0.25 WHERE group_id = 2", "rollout 2-0 has a wrong checksum"),
        ("UPDATE segments SET start = 1 WHERE group_id = 2", "rollout 2-0 have a wrong checksum"),
        ("DELETE FROM segments WHERE group_id = 2", "rollout 2-1 has 0 of its 2 tokens"),
    ],
)
def test_damage_to_running_groups_is_found_at_the_resume(path: Path, sql: str, fault: str) -> None:
    book = opened(path)
    one_step(book)
    book.record([rollout("2-0"), rollout("2-1")], [Outcome("2-0", Scored(1.0))])
    commit(book)
    book.journal._connection.execute(sql)
    with pytest.raises(JournalError, match=fault) as caught:
        DurableLedger(path, SETTINGS).opening()
    assert caught.value.hint == DAMAGED


def test_a_prompt_that_runs_again_has_its_own_checksum(path: Path) -> None:
    book = opened(path)
    one_step(book)
    entry = book.ledger.entry(2)
    book.journal.requeued(2, replace(entry, group_id=99))
    commit(book)
    connection = book.journal._connection
    with queries.snapshot(path) as reader:
        assert queries.group_record(reader, 99).prompt == queries.group_record(reader, 2).prompt
    connection.execute("UPDATE groups SET fields = '{\"answer\": 1}' WHERE id = 99")
    with pytest.raises(JournalError, match="the prompt of group 99"), queries.snapshot(path) as reader:
        queries.group_record(reader, 99)


def test_an_index_that_disagrees_with_its_table_is_found_before_a_resume(path: Path) -> None:
    book = opened(path)
    one_step(book)
    book.journal.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'groups (uid)', 'groups (state)')")
        connection.commit()
    with pytest.raises(JournalError) as caught:
        check(path)
    assert caught.value.hint == DAMAGED


def test_tokens_lost_after_a_pruning_are_damage(path: Path) -> None:
    book = opened(path)
    for _ in range(3):
        one_step(book)
    prune(book, 2)
    book.journal._connection.execute("DELETE FROM segments WHERE group_id = 4")
    with pytest.raises(JournalError, match="rollout 4-0 has 0 of its 2 tokens"):
        book.journal.batch(2)


# -- checkpoints


def folder_of(path: Path, step: int) -> Path:
    return path.parent / "checkpoints" / f"step-{step:06d}"


def recorded(path: Path) -> dict[int, bool]:
    """The steps of all checkpoints in the journal: True if the checkpoint still exists."""
    with queries.snapshot(path) as connection:
        return {at.after_step: at.removed_at is None for at in history(connection).checkpoints}


def test_checkpoints_in_the_journal_match_the_disk(path: Path) -> None:
    book = opened(path)
    for step in (1, 2, 3):
        folder_of(path, step).mkdir(parents=True)
    for step in (1, 2):
        book.journal.checkpointed(step, folder_of(path, step).name, 1.0)
    commit(book)
    folder_of(path, 1).rmdir()
    book.journal.close()
    book = opened(path, kind="resume")
    assert recorded(path) == {1: False, 2: True, 3: True}
    folder_of(path, 1).mkdir()
    opened(path, kind="resume")
    assert recorded(path) == {1: True, 2: True, 3: True}


def test_pruning_keeps_the_tokens_that_a_checkpoint_on_disk_needs(path: Path) -> None:
    """This includes a checkpoint without a row, because a kill came between its renaming and its row."""
    book = opened(path)
    for _ in range(6):
        one_step(book)
    for step in (4, 6):
        book.journal.checkpointed(step, folder_of(path, step).name, 1.0)
    commit(book)
    assert book.journal.first_needed_step(3, [4, 6]) == 0, "there are fewer checkpoints yet"
    assert book.journal.first_needed_step(2, [6]) == 4
    assert book.journal.first_needed_step(1, [4, 6]) == 4
    assert book.journal.first_needed_step(1, [2, 4, 6]) == 2
    prune(book, book.journal.first_needed_step(1, [2, 6]))
    assert book.journal.batch(2).step == 2
    with pytest.raises(LookupError, match="pruned"):
        book.journal.batch(1)


# -- without the journal


def test_a_batch_that_was_taken_and_not_trained_keeps_its_prompts(path: Path) -> None:
    book = opened(path)
    one_step(book)
    finish(book, *book.ledger.running[:2])
    before = book.fallback(1)["prompts"]
    assert book.take(1) is None
    commit(book)
    assert book.fallback(1)["prompts"] == before
    assert [prompt["uid"] for prompt in before] == ["p3", "p4"]


def test_rewards_that_differ_by_rounding_are_uniform(path: Path) -> None:
    book = opened(path)
    book.admit([*candidates(1, 1), Candidate(2, Prompt("p2", "x"), (1,), {"epoch": 0, "position": 2})])
    book.record([rollout(f"{group}-{index}") for group in (0, 1) for index in (0, 1)])
    rewards = {"0-0": 0.1 + 0.2, "0-1": 0.3, "1-0": 0.3, "1-1": 0.31}
    settled = book.score([Outcome(name, Scored(reward)) for name, reward in rewards.items()])
    assert (settled.rejected, settled.finished) == (((0, "uniform"),), (1,))


@pytest.mark.parametrize(("apart", "uniform"), [(False, {0, 1}), (True, {0})])
def test_uniform_groups_are_judged_by_the_rewards_that_train_them(path: Path, apart: bool, uniform: set[int]) -> None:
    by_parts = replace(SETTINGS, reward_parts={"reward": 1.0, "format": 0.5}, parts_apart=apart)
    book = DurableLedger.begin(path, by_parts, "train", "")
    book.admit([*candidates(1, 2), Candidate(3, Prompt("p3", "x"), (1,), {"epoch": 0, "position": 3})])
    names = [f"{group}-{index}" for group in range(3) for index in range(2)]
    book.record([rollout(name) for name in names])
    made = [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (0.5, 1.0), (1.0, 0.0), (1.0, 0.1)]
    scores = [Scored(reward, {"format": value}) for reward, value in made]
    first = [Outcome(name, score) for name, score in zip(names, scores, strict=True)]
    book.score(first[::2])
    commit(book)
    book = DurableLedger.begin(path, by_parts, "resume", "")  # the others come after a restart
    settled = book.score(first[1::2])
    assert dict(settled.rejected) == dict.fromkeys(uniform, "uniform")
    assert set(settled.finished) == {0, 1, 2} - uniform
    assert settled.solved == (0, 2), "solved is by the task's own reward"


# -- stored values have the checksum of the values that are read back

NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**1023), 2**1023) | st.sampled_from([0, -0.0, 5e-324, 1e308])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=100, deadline=None)
@given(uid=TEXTS, content=TEXTS, reason=TEXTS, reward=NUMBERS, later=st.booleans(), metrics=NUMBERS)
@example(uid="a\0b", content="\0", reason="\0", reward=-0.0, later=False, metrics=-0.0)
@example(uid="", content="", reason="", reward=-0.0, later=True, metrics=0)
@example(uid="", content="", reason="", reward=np.float64(0.5), later=True, metrics=np.float64(0.5))
def test_stored_values_read_back_with_their_checksum(
    tmp_path_factory: pytest.TempPathFactory,
    uid: str,
    content: str,
    reason: str,
    reward: float,
    later: bool,
    metrics: float,
) -> None:
    book = opened(tmp_path_factory.mktemp("journal") / FILE)
    book.admit([Candidate(1, Prompt(uid, content, {"answer": reason}), (1,), {"epoch": 0, "position": 1})])
    rewarded = Outcome("0-0", Scored(reward, {"measured": metrics}))
    failed = Outcome("0-1", RewardFailure(reason))
    book.record([rollout("0-0"), rollout("0-1")], () if later else (rewarded, failed))
    commit(book)
    if later:
        book.score([rewarded, failed])
        commit(book)
    connection = book.journal._connection
    assert read_group(connection, 0).prompt == Prompt(uid, content, {"answer": reason})
    first, second = read_rollouts(connection, 0).values()
    assert (first.reward, second.failure) == (float(reward), reason or None)
    book.journal.close()
