"""The ledger with its journal, event by event. ``test_durable_properties`` tests crashes at any moment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from buffer_stand_ins import (
    PROMPT_IDS,
    SETTINGS,
    candidates,
    commit,
    fill,
    finish,
    publish_record,
    rollout,
)

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.ledger import LedgerError
from asyncrl_cli.journal.schema import JournalError
from asyncrl_cli.records.groups import BufferSettings, Candidate, Opening, Outcome, StepRecord
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.records.rewards import RewardFailure, Scored


def opened(path: Path, settings: BufferSettings = SETTINGS, base: Any = None) -> tuple[DurableLedger, Opening]:
    """Open a ledger, and commit what the opening notes."""
    book = DurableLedger(path, settings, base)
    opening = book.opening()
    commit(book)
    return book, opening


def reopened(book: DurableLedger, path: Path) -> tuple[DurableLedger, Opening]:
    """Commit all noted events, and open the journal as the next process would."""
    commit(book)
    book.journal.close()
    return opened(path)


def test_a_new_journal_starts_at_step_0(path: Path) -> None:
    book, opening = opened(path)
    assert (opening.step, opening.version, opening.trained, opening.serial) == (0, 0, 0, 0)
    assert (opening.checksum, opening.loader, opening.groups, opening.waiting) == (None, None, (), ())
    state = {"next_group": 0, "loader": None, "evaluated": {}, "prompts": []}
    assert book.fallback(book.ledger.step) == state


def test_a_masked_rollout_is_judged_and_never_scored_again(path: Path) -> None:
    settings = replace(SETTINGS, group_size=3, reject_uniform=False, groups_per_step=1)
    book, _ = opened(path, settings)
    book.admit(candidates(1, 2))
    names = [f"{group_id}-{index}" for group_id in (0, 1) for index in range(3)]
    book.record([rollout(name) for name in names], [Outcome("0-1", Scored(None, {"refused": 1.0}))])
    book.score([Outcome("1-0", Scored(None))])
    commit(book)
    book.journal.close()
    book, opening = opened(path, settings)
    assert [group.scored for group in opening.groups] == [{1}, {0}]
    assert [set(group.unscored) for group in opening.groups] == [{0, 2}, {1, 2}]
    settled = book.score([Outcome("0-1", Scored(1.0)), *(Outcome(name, Scored(0.5)) for name in ("0-0", "0-2", "1-1"))])
    assert (settled.finished, settled.rejected) == ((0,), ())
    settled = book.score([Outcome("1-2", Scored(None))])
    assert (settled.finished, settled.rejected, settled.solved) == ((), ((1, "unscored"),), ())
    assert book.ledger.rejections == {"unscored": 1}
    assert book.take(0) is None
    commit(book)
    (group,) = book.journal.batch(0).groups
    assert group.rewards == (0.5, None, 0.5)
    assert group.metrics == ({}, {"refused": 1.0}, {})
    book.journal._connection.execute("UPDATE rollouts SET masked = 0 WHERE group_id = 0 AND rollout_index = 1")
    with pytest.raises(JournalError, match="checksum"):
        book.journal.batch(0)


def overdue_book(path: Path) -> DurableLedger:
    """A ledger with a group 0 that delays the batch of step 1."""
    book, _ = opened(path, replace(SETTINGS, on_stale="requeue", groups_per_step=1))
    book.admit(candidates(1, 2))
    finish(book, 1)
    assert book.take(0) is None
    book.publish(publish_record(1, 1))
    book.admit(candidates(3, 1))
    finish(book, 2)
    return book


def test_events_out_of_order_are_refused(path: Path) -> None:
    book, _ = opened(path)
    book.admit(candidates(1, 4))
    finish(book, 0, 1)
    before = book.ledger.snapshot()
    with pytest.raises(LedgerError, match="the next batch belongs to step 0, not 1"):
        book.take(1)
    with pytest.raises(LedgerError, match="version 2 cannot follow version 0"):
        book.publish(publish_record(2, 2))
    with pytest.raises(LedgerError, match="version 1 is due at step 1"):
        book.publish(publish_record(1, 1))
    assert book.ledger.snapshot() == before
    commit(book)
    assert opened(path)[0].ledger.snapshot() == before


def test_a_step_trained_again_keeps_its_first_report(path: Path) -> None:
    book, _ = opened(path)
    book.admit(candidates(1, 4))
    finish(book, 0, 1, 2, 3)
    assert book.take(0) is None
    book.journal.trained(StepRecord(0, "first", {"loss": 1.0}))
    book.journal.trained(StepRecord(0, "second", {"loss": 2.0}))
    book.publish(publish_record(1, 1))
    assert book.take(1) is None
    book, opening = reopened(book, path)
    assert (opening.step, opening.trained, opening.version, opening.checksum) == (2, 1, 1, "checksum 1")
    book.publish(replace(publish_record(1, 1), checksum="another"))
    assert reopened(book, path)[1].checksum == "another"


# -- continuing without the journal


def base_of_a_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint after two steps; p1 runs again, and p4 has just begun."""
    book = overdue_book(path)
    book.requeue([0])
    assert book.take(1) is None
    book.publish(publish_record(2, 2))
    commit(book)
    fill(book)
    commit(book)
    kept: dict[str, Any] = json.loads(json.dumps({"step": 2, **book.fallback(book.ledger.step)}))
    assert [prompt["uid"] for prompt in kept["prompts"]] == ["p1", "p4"]
    return kept


def test_a_run_continues_from_a_checkpoint_without_its_journal(tmp_path: Path) -> None:
    base = base_of_a_checkpoint(tmp_path / "old.db")
    path = tmp_path / "new.db"
    book, opening = opened(path, base=base)
    assert (opening.step, opening.version, opening.trained, opening.checksum) == (2, 2, 2, None)
    assert (opening.serial, opening.loader) == (0, {"epoch": 0, "position": 4})
    assert [prompt.uid for prompt in opening.waiting] == ["p1", "p4"]
    assert book.ledger.admitted == 2 * SETTINGS.groups_per_step
    with pytest.raises(LookupError, match="step 1 has no batch"):
        book.journal.batch(1)

    (first, second, third) = candidates(1, 3)
    loader = opening.loader
    assert loader is not None
    first = replace(first, prompt=opening.waiting[0], loader=loader)
    second = replace(second, prompt=opening.waiting[1], loader=loader)
    assert [a.group_id for a in book.admit([first])] == [base["next_group"]]
    book, opening = reopened(book, path)
    assert [prompt.uid for prompt in opening.waiting] == ["p4"]
    kept = book.fallback(book.ledger.step)
    assert [prompt["uid"] for prompt in kept["prompts"]] == ["p1", "p4"], "the next checkpoint keeps both"

    book.admit([second, replace(third, loader={"epoch": 0, "position": 5})])
    finish(book, base["next_group"], base["next_group"] + 1)
    assert book.take(2) is None
    book, opening = reopened(book, path)
    assert (opening.step, opening.version, opening.waiting) == (3, 2, ())
    assert opening.loader == {"epoch": 0, "position": 5}
    assert [prompt["uid"] for prompt in book.fallback(book.ledger.step)["prompts"]] == ["p3"]


@pytest.mark.parametrize(("admitted", "waiting"), [("outside/x", ["p1", "p2"]), ("p2", [])])
def test_own_and_skipped_prompts_are_not_taken_for_prompts_that_wait(
    path: Path, admitted: str, waiting: list[str]
) -> None:
    """A program's own prompt is admitted before the prompts that wait; ``p1`` is skipped if it is too long."""
    prompts = [{"uid": uid, "content": uid, "fields": {}} for uid in ("p1", "p2")]
    book, _ = opened(path, base={"step": 0, "next_group": 0, "loader": None, "prompts": prompts})
    book.admit([replace(candidates(1, 1)[0], prompt=Prompt(admitted, ""))])
    assert [prompt.uid for prompt in reopened(book, path)[1].waiting] == waiting


def test_a_prompt_that_waits_twice_is_admitted_twice(path: Path) -> None:
    twice = [{"uid": "p1", "content": "text 1", "fields": {}}] * 2
    base = {"step": 0, "next_group": 0, "loader": {"epoch": 1, "position": 1}, "prompts": twice}
    book, opening = opened(path, base=base)
    assert len(opening.waiting) == 2
    book.admit([replace(candidates(1, 1)[0], prompt=opening.waiting[0])])
    assert len(reopened(book, path)[1].waiting) == 1


def test_a_reopened_journal_keeps_its_own_base(tmp_path: Path) -> None:
    base = base_of_a_checkpoint(tmp_path / "old.db")
    for settled, first in (("with", base), ("without", None)):
        path = tmp_path / f"{settled}.db"
        opened(path, base=first)[0].journal.close()
        book, opening = opened(path, base={**base, "step": 100})
        assert opening.step == (2 if first else 0)
        book.journal.close()


def test_solved_prompts_are_known_after_a_restart(path: Path) -> None:
    """A prompt's last visits count, also if its group was not trained, but not failed visits."""
    settings = replace(SETTINGS, note_solved=True, max_staleness=9)
    rewards = {  # for each prompt, the rewards of its visits
        "once": [(1.0, 1.0)],
        "twice": [(0.0, 1.0), (1.0, 2.0), (1.0, 1.5)],
        "not_now": [(1.0, 1.0), (1.0, 0.5)],
        "never": [(0.0, 0.0)],
    }
    visits = [(uid, pair) for uid, pairs in rewards.items() for pair in pairs]
    book = DurableLedger(path, settings)
    book.admit(
        [
            Candidate(serial, Prompt(uid, "text"), PROMPT_IDS, {"epoch": 0, "position": serial})
            for serial, (uid, _) in enumerate([*visits, ("failed", ())], start=1)
        ]
    )
    solved: set[int] = set()
    for group_id, (_, pair) in enumerate(visits):
        for index, reward in enumerate(pair):
            name = f"{group_id}-{index}"
            solved |= set(book.record([rollout(name)], [Outcome(name, Scored(reward))]).solved)
    solved |= set(book.record([], [Outcome(f"{len(visits)}-0", RewardFailure("no memory"))]).solved)
    assert solved == {group_id for group_id, (_, pair) in enumerate(visits) if min(pair) >= 1.0}
    book.journal.commit(book.journal.noted())
    assert DurableLedger(path, settings).opening().solved == {"once": 1, "twice": 2}
    assert DurableLedger(path, SETTINGS).opening().solved == {}, "the history is read only if it is requested"
