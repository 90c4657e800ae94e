"""A run is resumed from its files; a refusal does not change them."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from stand_ins import prompts, rollout, spec

from asyncrl_cli.core.errors import ConfigError, RunError
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.schema import FILE, JournalError, check
from asyncrl_cli.orchestrator.launch import DriverStart
from asyncrl_cli.orchestrator.replay import changes_since
from asyncrl_cli.orchestrator.resume import prepare
from asyncrl_cli.records.groups import BufferSettings, Candidate, Opening, Outcome, PublishRecord, StepRecord
from asyncrl_cli.records.rewards import Scored
from asyncrl_cli.runs.checkpoints import (
    Checkpoint,
    checkpoint_name,
    complete_checkpoints,
    newest_undamaged,
    seal,
    verify,
)
from asyncrl_cli.runs.directory import MODEL, RunDirectory

GROUPS = {"groups_per_step": 1, "max_staleness": 0}
SPEC = spec(rollout={"group_size": 1}, pipeline=GROUPS)


def record(run: RunDirectory, taken: int, trained: int | None = None, base: dict[str, Any] | None = None) -> None:
    """A journal with this many taken and trained steps, and a row of metrics for each taken step."""
    book = DurableLedger(run.path / FILE, BufferSettings.from_spec(SPEC), base)
    first = book.ledger.step
    trained = taken if trained is None else trained
    for step in range(first, taken):
        serial = step - first + 1
        candidate = Candidate(serial, prompts(1)[0], (1, 2), {"epoch": 0, "position": serial})
        (admission,) = book.admit([candidate])
        rollout_id = f"{admission.group_id}-0"
        book.record([rollout(rollout_id)], [Outcome(rollout_id, Scored(1.0, {"length": 2.0}))])
        assert book.take(step) is None
        book.publish(PublishRecord(step + 1, step + 1, "sum", 0.0, 0.0, 0.0, 0.0))
        if step < trained:
            book.journal.trained(StepRecord(step, "digest", {}))
        run.append("metrics.jsonl", {"step": step + 1})
    book.journal.commit(book.journal.noted())
    book.journal.close()


def save(run: RunDirectory, step: int, fallback: dict[str, Any] | None = None) -> Checkpoint:
    """Make an intact checkpoint. ``fallback``: the driver's state in it."""
    checkpoint = Checkpoint(run.path / "checkpoints" / checkpoint_name(step), step)
    (checkpoint.folder / "state").mkdir(parents=True)
    (checkpoint.folder / "state/shard").write_text(f"weights {step}")
    layout = {"ranks": 1, "zero_stage": 2, "dtype": "float32"}
    state = {"step": step, "next_group": step, "prompts": [], **(fallback or {}), "trainer": layout}
    (checkpoint.folder / "run.json").write_text(json.dumps(state))
    seal(checkpoint.folder)
    return checkpoint


def finish(run: RunDirectory) -> None:
    """Make the files of a finished run."""
    (run.path / MODEL).mkdir()
    (run.path / MODEL / "config.json").write_text("{}")
    run.update(phase="finished")


def start(run: RunDirectory, step: int | None = None, steps: int = 10, without_journal: bool = False) -> DriverStart:
    of = SPEC.model_copy(update={"stop": spec(stop={"steps": steps}).stop})
    return prepare(run, of, step, "n=1", without_journal).carry_out(run)


def test_checkpoint_without_a_critic_is_refused_before_anything_changes(run: RunDirectory) -> None:
    record(run, taken=5)
    save(run, 5)
    before = on_disk(run)
    with_critic = SPEC.model_copy(update={"algorithm": spec(algorithm={"preset": "ppo"}).algorithm})
    with pytest.raises(RunError, match="the checkpoint has no critic"):
        prepare(run, with_critic, step=None, note="algorithm.advantage=gae", without_journal=False)
    assert on_disk(run) == before


def test_a_new_part_of_the_reward_that_no_recorded_rollout_has_is_refused(run: RunDirectory) -> None:
    record(run, taken=5)
    before = on_disk(run)
    parts = {"reward": 1.0, "length": 0.1, "fromat": 0.3}
    misspelled = SPEC.model_copy(update={"algorithm": spec(algorithm={"reward_parts": parts}).algorithm})
    note = "algorithm.reward_parts.length=0.1, algorithm.reward_parts.fromat=0.3"
    with pytest.raises(ConfigError, match="no recorded rollout has the metric 'fromat'; the task reports reward, leng"):
        prepare(run, misspelled, step=None, note=note, without_journal=False)
    assert on_disk(run) == before
    prepare(run, misspelled, step=None, note="stop.steps=9", without_journal=False)


def evaluate(run: RunDirectory, accuracies: dict[int, float]) -> None:
    """Record greedy evaluations, by step."""
    book = DurableLedger(run.path / FILE, BufferSettings.from_spec(SPEC))
    for step, accuracy in accuracies.items():
        result = {"accuracy": accuracy, "mean_reward": accuracy, "mean_length": 1.0, "prompts": 5}
        book.journal.evaluated({"step": step, "kind": "greedy", **result, "oldest": step, "newest": step})
    book.journal.commit(book.journal.noted())
    book.journal.close()


def opening(run: RunDirectory, driver_start: DriverStart) -> Opening:
    book = DurableLedger.begin(run.path / FILE, BufferSettings.from_spec(SPEC), "resume", "", driver_start.base)
    run_state = book.opening()
    book.journal.close()
    return run_state


def test_a_step_that_is_trained_again_is_evaluated_again(run: RunDirectory) -> None:
    record(run, taken=4)
    evaluate(run, {2: 0.5, 4: 0.9})
    for step in (2, 4):
        save(run, step)
    resumed = opening(run, start(run, step=2))
    assert resumed.evaluated == {2: 0.5} and resumed.evaluations == {(2, "greedy")}


def test_accuracies_survive_a_resume_without_the_journal(run: RunDirectory) -> None:
    record(run, taken=4)
    evaluate(run, {2: 0.9, 4: 0.4})
    book = DurableLedger(run.path / FILE, BufferSettings.from_spec(SPEC))
    for step in (2, 4):
        save(run, step, book.fallback(step))
    book.journal.close()
    resumed = opening(run, start(run, without_journal=True))
    assert resumed.evaluated == {2: 0.9, 4: 0.4}, "the best checkpoint stays the best"
    assert resumed.evaluations == frozenset()


def on_disk(run: RunDirectory) -> dict[str, bytes]:
    """Every file, except those that SQLite creates to read a journal."""
    files = {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    return {name: data for name, data in files.items() if name != f"{FILE}-shm" and (data or name != f"{FILE}-wal")}


def refused(run: RunDirectory, **how: Any) -> RunError:
    """The reason why the run cannot be resumed. Checks that nothing has changed on disk."""
    before = on_disk(run)
    with pytest.raises(RunError) as error:
        start(run, **how)
    assert on_disk(run) == before
    return error.value


def metrics(run: RunDirectory) -> list[int]:
    return [row["step"] for row in run.read("metrics.jsonl")]


# -- resuming


@pytest.mark.parametrize("journal", ["no file", "an empty file", "no tables"])
def test_a_run_that_died_before_anything_was_recorded_begins(run: RunDirectory, journal: str) -> None:
    if journal == "an empty file":
        (run.path / FILE).touch()
    elif journal == "no tables":
        connection = sqlite3.connect(run.path / FILE)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
    assert start(run) == DriverStart("resume", "n=1", None)
    if journal != "no file":
        check(run.path / FILE)


def test_the_trainer_starts_from_the_newest_or_a_named_checkpoint_or_the_initial_model(run: RunDirectory) -> None:
    record(run, taken=6)
    older, newest = save(run, 2), save(run, 4)
    assert start(run) == DriverStart("resume", "n=1", newest)
    assert metrics(run) == [1, 2, 3, 4, 5, 6]
    error = refused(run, step=3)
    assert "there is no checkpoint of step 3" in error.message
    assert "2, 4" in error.hint
    assert start(run, step=2).checkpoint == older
    assert start(run, step=0).checkpoint is None


def test_rows_of_metrics_that_were_never_written_come_from_the_journal(run: RunDirectory) -> None:
    record(run, taken=3)
    (run.path / "metrics.jsonl").write_text('{"step": 2, "version": 2, "loss": 0.5}\n')
    start(run)
    first, second, last = run.read("metrics.jsonl")
    assert second == {"step": 2, "version": 2, "loss": 0.5}
    assert (first["step"], first["version"], last["step"], last["version"]) == (1, 1, 3, 3)
    assert first["time"] > 0


# -- nothing to do


def test_a_run_that_is_done_says_how_to_train_on(run: RunDirectory) -> None:
    record(run, taken=10)
    finish(run)
    error = refused(run)
    assert error.message == "run already completed 10 of 10 steps"
    assert error.hint.endswith(f"asyncrl resume {run.argument} --steps 20")
    assert start(run, steps=20).kind == "resume"


@pytest.mark.parametrize("has_model", [False, True])
def test_a_run_that_died_after_its_last_step_continues(run: RunDirectory, has_model: bool) -> None:
    record(run, taken=10)
    finish(run)
    if not has_model:
        (run.path / MODEL / "config.json").unlink()
    else:
        run.update(phase="running")
    assert start(run) == DriverStart("resume", "n=1", None)


def test_a_run_cannot_end_before_steps_that_it_has_taken(run: RunDirectory) -> None:
    record(run, taken=6, trained=5)
    error = refused(run, steps=5)
    assert error.message == "the run has taken 6 steps, more than 5"
    assert start(run, steps=6).kind == "resume"
    finish(run)
    assert "more than 5" in refused(run, steps=5).message, "also if it has finished"


# -- damage


def test_a_damaged_checkpoint_names_an_older_one(run: RunDirectory) -> None:
    record(run, taken=6)
    save(run, 2)
    (save(run, 4).folder / "state/shard").write_text("weights 5")
    error = refused(run)
    assert "state/shard has changed" in error.message
    assert "--step 2" in error.hint
    assert start(run, step=2).checkpoint is not None


def test_checkpoints_of_steps_that_are_trained_again_are_archived(run: RunDirectory) -> None:
    """Otherwise a restarted trainer would load them, and a save would not replace them."""
    record(run, taken=6)
    for step in (2, 4, 6):
        save(run, step)
    assert start(run, step=6).note == "n=1", "there is no later checkpoint"
    assert start(run, step=2).note == "n=1, checkpoints after step 2 are in checkpoints/archived-1"
    assert newest_undamaged(run, 1) is None
    assert newest_undamaged(run, 9) == Checkpoint(run.path / "checkpoints" / checkpoint_name(2), 2)
    archived = run.path / "checkpoints" / "archived-1"
    assert [(found.step, verify(found)) for found in complete_checkpoints(archived)] == [(4, []), (6, [])]
    assert start(run, step=0).note == "n=1, checkpoints after step 0 are in checkpoints/archived-2"
    assert start(run).checkpoint is None


def test_a_journal_that_is_gone_is_missed_when_there_are_checkpoints(run: RunDirectory) -> None:
    save(run, 4)
    error = refused(run)
    assert error.location == str(run.path / FILE)
    assert error.hint.endswith(f"asyncrl resume {run.argument} --without-journal")
    shutil.rmtree(run.path / "checkpoints" / checkpoint_name(4))
    run.update(step=3)
    assert refused(run).message == "the run's journal is gone"


def test_a_journal_that_ends_before_the_checkpoint_is_an_older_copy(run: RunDirectory) -> None:
    record(run, taken=3)
    save(run, 4)
    error = refused(run)
    assert "the journal ends at step 3, but the newest checkpoint has step 4" in error.message
    assert "--without-journal" in error.hint


def test_a_truncated_log_is_noticed_by_the_step_in_state_json(run: RunDirectory) -> None:
    record(run, taken=6)
    run.update(step=6)
    assert start(run).kind == "resume"
    run.update(step=7)
    error = refused(run)
    assert (
        "the journal ends at step 6, but state.json has step 7: journal.db-wal is missing or truncated" in error.message
    )
    assert start(run, without_journal=True).checkpoint is None
    assert run.state.step == 0
    assert start(run, without_journal=True).kind == "resume"


@pytest.mark.parametrize("damage", ["garbage", "flipped"])
def test_a_damaged_journal_is_reported_and_kept(run: RunDirectory, damage: str) -> None:
    record(run, taken=6)
    save(run, 4)
    journal = run.path / FILE
    whole = bytearray(journal.read_bytes())
    if damage == "garbage":
        whole[:100] = b"x" * 100
    else:
        for page in range(16384, len(whole), 16384):
            whole[page : page + 64] = b"\xff" * 64
    journal.write_bytes(whole)
    before = on_disk(run)
    with pytest.raises(JournalError, match="--without-journal"):
        start(run)
    assert on_disk(run) == before


@pytest.mark.parametrize(
    ("sql", "fault"),
    [
        ("UPDATE rollouts SET reward = 0.5 WHERE group_id = 4", "rollout 4-0 has a wrong checksum"),
        ("DELETE FROM segments WHERE group_id = 4", "rollout 4-0 has 0 of its"),
        ("UPDATE groups SET prompt = '\"other\"' WHERE id = 4", "the prompt of group 4 has a wrong checksum"),
    ],
)
def test_damage_to_what_is_trained_again_is_found_before_anything_starts(
    run: RunDirectory, sql: str, fault: str
) -> None:
    record(run, taken=6)
    save(run, 2)
    save(run, 5)
    with closing(sqlite3.connect(run.path / FILE)) as connection, connection:
        connection.execute(sql)
    with pytest.raises(JournalError, match=fault):
        start(run, step=2)
    assert start(run).kind == "resume", "from step 5 on nothing is damaged"


def test_tokens_that_were_dropped_keep_a_run_from_starting_before_them(run: RunDirectory) -> None:
    record(run, taken=6)
    save(run, 4)
    book = DurableLedger(run.path / FILE, BufferSettings.from_spec(SPEC))
    book.journal.prune(4)
    book.journal.close()
    assert (
        refused(run, step=0).message
        == "the steps after step 0 cannot be trained again: the tokens of step 0 are pruned"
    )
    assert start(run).kind == "resume"


# -- kills, archived steps


def test_steps_that_are_trained_again_from_a_named_checkpoint_are_reported_again(run: RunDirectory) -> None:
    record(run, taken=6)
    for saved in (2, 4, 6):
        save(run, saved)
    start(run, step=2)
    assert metrics(run) == [1, 2]
    book = DurableLedger.begin(run.path / FILE, BufferSettings.from_spec(SPEC), "resume", "")
    assert book.opening().trained == 2
    book.journal.trained(StepRecord(1, "other", {"loss": 1.0}))
    book.journal.trained(StepRecord(2, "other", {"loss": 1.0}))
    book.journal.commit(book.journal.noted())
    digests = book.journal._rows("SELECT digest FROM batches ORDER BY step")
    assert [digest for (digest,) in digests] == ["digest", "digest", "other", None, None, None]
    book.journal.close()
    start(run)
    assert metrics(run) == [1, 2, 3]
    assert run.read("metrics.jsonl")[-1]["loss"] == 1.0


def test_steps_that_are_trained_again_with_other_settings_are_announced_and_reported_again(run: RunDirectory) -> None:
    record(run, taken=4)
    save(run, 2)
    plan = prepare(run, SPEC, None, "trainer.optimizer.learning_rate=0.1", False)
    start_again = plan.carry_out(run)
    assert "steps 3 to 4 are trained again with the new settings" in start_again.note
    assert metrics(run) == [1, 2]
    DurableLedger.begin(run.path / FILE, BufferSettings.from_spec(SPEC), "resume", start_again.note).journal.close()
    (reason,) = changes_since(run, 2)
    assert reason == "the resume after step 4 changed trainer.optimizer.learning_rate=0.1"
    assert changes_since(run, 4) == [], "a checkpoint of step 4 has the weights of the new settings"


@pytest.mark.parametrize("note", ["stop.steps=8", "rollout.engines=2"])
def test_steps_that_are_trained_again_to_the_same_weights_keep_their_reports(run: RunDirectory, note: str) -> None:
    record(run, taken=4)
    save(run, 2)
    assert prepare(run, SPEC, None, note, False).carry_out(run).note == note
    assert metrics(run) == [1, 2, 3, 4]


# -- without the journal


def test_without_its_journal_a_run_continues_from_a_checkpoint_alone(run: RunDirectory) -> None:
    record(run, taken=6)
    checkpoint = save(run, 4)
    journal = (run.path / FILE).read_bytes()
    (run.path / f"{FILE}-wal").write_bytes(b"a log")
    continuation = start(run, without_journal=True)
    assert continuation == DriverStart("resume", "without the old journal, n=1", checkpoint, checkpoint.state())
    assert continuation.base is not None
    assert continuation.base["step"] == 4
    assert metrics(run) == [1, 2, 3, 4]
    assert not list(run.path.glob(f"{FILE}*"))
    assert (run.path / "damaged-1" / FILE).read_bytes() == journal
    assert (run.path / "damaged-1" / f"{FILE}-wal").read_bytes() == b"a log"


def test_without_journal_and_checkpoint_a_run_starts_over(run: RunDirectory) -> None:
    record(run, taken=3)
    assert start(run, without_journal=True) == DriverStart("resume", "without the old journal, n=1", None, None)
    assert metrics(run) == []


def test_steps_before_the_journal_began_count(run: RunDirectory) -> None:
    """A run that continued without its first journal, and died."""
    for step in range(1, 5):
        run.append("metrics.jsonl", {"step": step})
    checkpoint = save(run, 4)
    record(run, taken=4, base=checkpoint.state())
    assert start(run) == DriverStart("resume", "n=1", checkpoint)
    assert metrics(run) == [1, 2, 3, 4]
    assert refused(run, steps=3).message == "the run has taken 4 steps, more than 3"
    record(run, taken=6, trained=5)
    start(run)
    assert metrics(run) == [1, 2, 3, 4, 5]
