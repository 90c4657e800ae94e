"""The ledger with its journal, event by event. ``test_durable_properties`` tests crashes at any moment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_stand_ins import (
    PROMPT_IDS,
    SETTINGS,
    candidates,
    commit,
    content,
    contents,
    episode,
    fill,
    finish,
    group_outcomes,
    group_rollouts,
    joined,
    part,
    pieces,
    publish_record,
    rollout,
    tokens,
)

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.ledger import LedgerError
from asyncrl_cli.journal.schema import JournalError
from asyncrl_cli.records.generation import CONTEXT, Segment
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


def prefix(opening: Opening, group_id: int, index: int, branch: int = 0) -> tuple[Segment, ...]:
    (group,) = (group for group in opening.groups if group.group_id == group_id)
    return group.prefixes.get(index, {}).get(branch, ())


def test_a_new_journal_starts_at_step_0(path: Path) -> None:
    book, opening = opened(path)
    assert (opening.step, opening.version, opening.trained, opening.serial) == (0, 0, 0, 0)
    assert (opening.checksum, opening.loader, opening.groups, opening.waiting) == (None, None, (), ())
    assert book.fallback(book.ledger.step) == {"next_group": 0, "loader": None, "prompts": []}


def test_segments_of_several_versions_are_the_prefix_until_the_rollout_is_finished(path: Path) -> None:
    book, _ = opened(path, replace(SETTINGS, max_staleness=4))
    book.admit(candidates(1, 2))
    one = rollout("0-1", [0, 0, 0, 1, 1, 3])
    book.grown(pieces(one, 0, 2))
    book.grown(pieces(one, 2, 5))
    book, opening = reopened(book, path)
    segments = prefix(opening, 0, 1)
    assert [(segment.start, segment.version) for segment in segments] == [(0, 0), (2, 0), (3, 1)]
    assert tokens(joined("0-1", segments)) == tokens(part(one, 0, 5))
    book.grown(pieces(one, 5, 6))
    book.record([one])
    book, opening = reopened(book, path)
    assert prefix(opening, 0, 1) == ()
    assert contents(opening.groups[0].unscored[1]) == contents(one)
    assert opening.groups[1].unscored == opening.groups[1].prefixes == {}
    book.score([Outcome("0-1", Scored(0.5))])
    book, opening = reopened(book, path)
    assert opening.groups[0].scored == {1}
    assert opening.groups[0].unscored == {}


def test_a_rollout_generated_again_replaces_its_recorded_tokens(path: Path) -> None:
    book, _ = opened(path)
    book.admit(candidates(1, 1))
    first, again, third = (rollout("0-0", [0] * 9, seed) for seed in range(3))
    book.grown([*pieces(first, 0, 2), *pieces(first, 2, 6), *pieces(first, 6, 9)])
    book.grown(pieces(again, 0, 3))
    book, opening = reopened(book, path)
    assert tokens(joined("0-0", prefix(opening, 0, 0))) == tokens(part(again, 0, 3))
    book.grown(pieces(again, 3, 5))
    book.grown(pieces(third, 3, 4))
    book, opening = reopened(book, path)
    assert [segment.end for segment in prefix(opening, 0, 0)] == [3, 4]
    assert tokens(joined("0-0", prefix(opening, 0, 0)[:1])) == tokens(part(again, 0, 3))


def test_each_sequence_of_an_episode_is_recorded_separately(path: Path) -> None:
    book, _ = opened(path, replace(SETTINGS, max_staleness=4))
    book.admit(candidates(1, 2))
    root = rollout("0-1", [CONTEXT, CONTEXT, 0, 0, CONTEXT, 1, 1])
    branch, dropped = rollout("0-1.1", [CONTEXT, 2, 2, CONTEXT]), rollout("0-1.2", [CONTEXT, 3])
    book.grown([*pieces(root, 0, 4), *pieces(branch, 0, 2), *pieces(dropped), *pieces(root, 4, 6)])
    again = rollout("0-1.1", [CONTEXT, 2, 2, CONTEXT], seed=1)
    book.grown(pieces(again, 0, 1))  # invalidates later segments of this sequence, and of no other
    book, opening = reopened(book, path)
    found = {branch: joined(of[0].rollout_id, of) for branch, of in opening.groups[0].prefixes[1].items()}
    assert [tokens(found[at]) for at in range(3)] == [
        tokens(part(root, 0, 6)),
        tokens(part(again, 0, 1)),
        tokens(dropped),
    ]
    row = "SELECT tokens, oldest, newest FROM rollouts WHERE group_id = 0 AND rollout_index = 1"
    assert book.journal._connection.execute(row).fetchone() == (4, 0, 3), "given tokens have no version"

    ended = episode([root, branch])
    book.record([ended], [Outcome("0-1", Scored(0.5, {"turns": 2.0, "tool_errors": 0.0}))])
    book.grown(pieces(dropped))  # arrives too late
    book, opening = reopened(book, path)
    assert opening.groups[0].scored == {1}
    assert book.journal._connection.execute(row).fetchone() == (6, 0, 2)
    assert book.journal._connection.execute("SELECT count(*) FROM segments WHERE branch = 2").fetchone() == (0,)
    book.record([rollout("0-0", [CONTEXT, 0])], [Outcome("0-0", Scored(1.0))])
    finish(book, 1)
    assert book.take(0) is None
    commit(book)
    first, second = book.journal.batch(0).groups
    assert contents(first.rollouts[1]) == contents(ended)
    assert [one.rollout_id for one in first.rollouts[1].sequences] == ["0-1", "0-1.1"]
    assert first.metrics == ({}, {"turns": 2.0, "tool_errors": 0.0})
    assert second.metrics == (), "nothing was measured"


def test_an_episode_waits_for_its_reward_with_all_its_sequences(path: Path) -> None:
    book, _ = opened(path)
    book.admit(candidates(1, 1))
    ended = episode(
        [rollout("0-0", [CONTEXT, 0, 0]), rollout("0-0.1", [CONTEXT, 0]), rollout("0-0.2", [CONTEXT, CONTEXT, 0])]
    )
    book.record([ended])
    book, opening = reopened(book, path)
    assert contents(opening.groups[0].unscored[0]) == contents(ended)
    book.record([episode([rollout("0-0", [CONTEXT, 0])])])  # delivered a second time
    book.score([Outcome("0-0", Scored(1.0, {"turns": 3.0}))])
    commit(book)
    found = book.journal._connection.execute("SELECT tokens, reward, metrics FROM rollouts").fetchall()
    assert found == [(4, 1.0, '{"turns": 3.0}')]


def test_a_segment_after_a_gap_is_ignored(path: Path) -> None:
    book, _ = opened(path)
    book.admit(candidates(1, 1))
    one = rollout("0-0", [0] * 9)
    book.grown([*pieces(one, 0, 2), *pieces(one, 4, 6), *pieces(one, 1, 4)])
    book, opening = reopened(book, path)
    assert tokens(joined("0-0", prefix(opening, 0, 0))) == tokens(part(one, 0, 4))
    book.record([one])
    book, opening = reopened(book, path)
    assert contents(opening.groups[0].unscored[0]) == contents(one)


def test_late_arrivals_change_nothing(path: Path) -> None:
    book, _ = opened(path)
    book.admit(candidates(1, 3))
    one = rollout("0-0", [0] * 6)
    book.record([one])
    book.score([Outcome("0-0", Scored(1.0))])
    book.grown(pieces(one, 0, 3))
    book.record([rollout("0-0", [0, 0], seed=1)])
    book.score([Outcome("0-0", Scored(0.0)), Outcome("0-0", RewardFailure("too late"))])
    finish(book, 1)
    book.score([Outcome("2-1", RewardFailure("the engine refused"))])
    settled = book.score([Outcome("2-0", Scored(1.0)), Outcome("1-0", RewardFailure("too late"))])
    assert (settled.finished, settled.rejected) == ((), ())
    book.record([rollout("2-0"), rollout("1-0", seed=1), rollout("7-0")])
    book.grown([*pieces(rollout("2-0")), *pieces(rollout("1-0")), *pieces(rollout("7-0"))])
    book.record([rollout("0-1")])
    book.score([Outcome("0-1", Scored(0.0))])
    assert book.take(0) is None
    commit(book)
    (group, other) = book.journal.batch(0).groups
    assert contents(group.rollouts[0]) == contents(one)
    assert group.rewards == (1.0, 0.0)
    assert [contents(r) for r in other.rollouts] == [contents(r) for r in group_rollouts(1)]
    assert book.ledger.rejections == {"failed": 1}


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


def test_a_response_without_tokens_is_recorded_as_a_rollout(path: Path) -> None:
    book, _ = opened(path)
    book.admit(candidates(1, 2))
    empty = rollout("0-0", ())
    book.record([empty])
    book, opening = reopened(book, path)
    assert contents(opening.groups[0].unscored[0]) == contents(empty)
    book.record([rollout("0-1")])
    book.score(group_outcomes(0))
    finish(book, 1)
    assert book.take(0) is None
    commit(book)
    assert contents(book.journal.batch(0).groups[0].rollouts[0]) == contents(empty)
    assert book.journal.batch(0).groups[0].rollouts[0].ids.dtype == np.int32


def test_prompts_are_admitted_while_there_is_room(path: Path) -> None:
    book, _ = opened(path)
    assert [one.group_id for one in fill(book, 1)] == [0, 1, 2, 3], "(v + 1 + S)·k·B groups"
    with pytest.raises(LedgerError, match="no room"):
        book.admit(candidates(5, 1))
    book, opening = reopened(book, path)
    assert (opening.serial, opening.loader) == (4, {"epoch": 0, "position": 4})
    book.score([Outcome("1-0", RewardFailure("no"))])
    assert [one.prompt.uid for one in fill(book, 5)] == ["p5"]


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


def test_a_requeued_group_runs_again_under_a_new_index(path: Path) -> None:
    book = overdue_book(path)
    book.grown(pieces(rollout("0-0")))
    waiting = book.take(1)
    assert waiting is not None
    assert waiting.overdue == (0,)
    assert book.requeue([0, 2]) == [(0, 3, 1)], "group 2 has finished meanwhile"
    assert book.requeue([0]) == []
    book.grown(pieces(rollout("0-0"), 1))
    book, opening = reopened(book, path)
    (group,) = opening.groups
    assert (group.group_id, group.version, group.prompt.uid) == (3, 1, "p1")
    assert (group.scored, group.unscored, group.prefixes) == (frozenset(), {}, {})
    assert (opening.serial, opening.loader) == (3, {"epoch": 0, "position": 3}), "a replacement is not a new prompt"
    assert opening.counts.requeued == 1


def test_late_groups_are_still_counted_after_a_restart(path: Path) -> None:
    settings = replace(SETTINGS, on_stale="train", groups_per_step=1)
    book, _ = opened(path, settings)
    serial = 1
    for step in range(2):
        serial += len(fill(book, serial))
        finish(book, book.ledger.running[-1])
        assert book.take(step) is None
        book.publish(publish_record(step + 1, step + 1))
    finish(book, 0)
    assert book.take(2) is None
    assert book.ledger.counts().late == 1
    commit(book)
    assert opened(path, settings)[0].ledger.snapshot() == book.ledger.snapshot()


def test_a_batch_is_taken_once_and_is_always_the_same(path: Path) -> None:
    book, _ = opened(path)
    book.admit(candidates(1, 4))
    finish(book, 3, 1)
    assert book.take(0) is None
    commit(book)
    batch = book.journal.batch(0)
    assert [group.group_id for group in batch.groups] == [1, 3]
    assert batch.staleness == (0, 0)
    finish(book, 0)
    book, opening = reopened(book, path)
    assert opening.step == book.ledger.step == 1
    assert content(book.journal.batch(0)) == content(batch)


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
    fill(book, 4)
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


def test_messages_and_fields_of_a_prompt_survive_a_restart(path: Path) -> None:
    book, _ = opened(path)
    (one,) = candidates(1, 1)
    messages = ({"role": "system", "content": "Zürich ✓"}, {"role": "user", "content": "2 + 2?"})
    prompt = replace(one.prompt, content=messages, fields={"answer": 4, "nested": {"list": [1, None]}})
    book.admit([replace(one, prompt=prompt)])
    _, opening = reopened(book, path)
    assert opening.groups[0].prompt == prompt
    assert opening.groups[0].prompt_ids == one.prompt_ids


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
