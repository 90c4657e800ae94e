"""The ledger's rules one by one, with the examples in its docstring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from buffer_stand_ins import made_ledger

from asyncrl_cli.journal.ledger import Batch, Blocked, Ledger, LedgerError
from asyncrl_cli.records.groups import OnStale


def admit(ledger: Ledger, count: int) -> list[int]:
    return [ledger.admit().group_id for _ in range(count)]


def finish(ledger: Ledger, *group_ids: int) -> None:
    for group_id in group_ids:
        ledger.finish(group_id)


def take(ledger: Ledger) -> Batch:
    batch = ledger.next_batch()
    assert isinstance(batch, Batch), str(batch)
    ledger.take(batch)
    return batch


def train(ledger: Ledger) -> Batch:
    batch = take(ledger)
    if ledger.publish_due:
        ledger.publish()
    return batch


def blocked(ledger: Ledger) -> Blocked:
    result = ledger.next_batch()
    assert isinstance(result, Blocked)
    return result


def four_long_groups(on_stale: OnStale) -> Ledger:
    """The docstring's example at step 1: groups 0 to 3 of version 0 still run, 6 and 7 are finished."""
    ledger = made_ledger(groups_per_step=2, publish_every=1, max_staleness=2, on_stale=on_stale)
    admit(ledger, 6)
    finish(ledger, 4, 5)
    assert train(ledger).group_ids == (4, 5)
    admit(ledger, 2)
    finish(ledger, 6, 7)
    return ledger


def test_a_running_group_that_would_be_late_is_waited_for() -> None:
    ledger = four_long_groups("wait")
    assert blocked(ledger) == Blocked("missing", finished=2, batch_size=2, missing_groups=(0, 1))
    assert "0, 1" in str(blocked(ledger))
    ledger.finish(0)
    assert blocked(ledger).missing_groups == (1,)
    ledger.finish(3)  # any two of the four are enough
    batch = train(ledger)
    assert batch.group_ids == (0, 3)
    assert batch.staleness == (1, 1)
    finish(ledger, 1, 2)
    assert train(ledger).group_ids == (1, 2)
    assert train(ledger).group_ids == (6, 7)


def test_requeue_replaces_only_groups_that_block_the_batch() -> None:
    ledger = four_long_groups("requeue")
    before = ledger.admitted
    assert ledger.overdue() == (0, 1)
    with pytest.raises(LedgerError, match="not overdue"):
        ledger.requeue(2)
    assert ledger.requeue(1).version == 1  # in any order
    assert ledger.overdue() == (0,)
    replacement = ledger.requeue(0)
    assert replacement == ledger.entry(replacement.group_id)
    assert (replacement.group_id, replacement.deadline) == (9, 3)
    assert ledger.overdue() == ()
    assert ledger.admitted == before
    assert ledger.counts().requeued == 2
    with pytest.raises(LedgerError, match="not running"):
        ledger.finish(0)
    assert train(ledger).group_ids == (6, 7)


@pytest.mark.parametrize("on_stale", ["wait", "train"])
def test_other_policies_never_requeue(on_stale: OnStale) -> None:
    ledger = four_long_groups(on_stale)
    assert ledger.overdue() == ()
    with pytest.raises(LedgerError):
        ledger.requeue(0)


def test_batches_are_taken_while_one_publish_is_in_flight() -> None:
    ledger = made_ledger(groups_per_step=1, publish_every=2, max_staleness=1)
    finish(ledger, *admit(ledger, 4))
    with pytest.raises(LedgerError, match="due at step 2, not 0"):
        ledger.publish()
    take(ledger)
    assert not ledger.publish_due
    take(ledger)
    assert ledger.publish_due
    assert (ledger.step, ledger.version, ledger.trainer_version) == (2, 0, 1)
    ledger.reject(3, "uniform")
    assert ledger.admit().version == 0, "before the publish the engines still serve the old version"
    assert take(ledger).staleness == (1,), "the trainer has the new version before the engines have it"
    ledger.finish(4)
    assert take(ledger).staleness == (1,)
    assert blocked(ledger).blocker == "publish"
    with pytest.raises(LedgerError, match="published first"):
        ledger.take(Batch(4, 2, (5,), (0,)))
    ledger.publish()
    finish(ledger, *admit(ledger, 1))
    assert take(ledger).staleness == (1,)
    assert ledger.publish_due


def test_without_staleness_missing_groups_are_named() -> None:
    ledger = made_ledger(groups_per_step=2, publish_every=2, max_staleness=0)
    admit(ledger, 4)
    finish(ledger, 0, 3)
    assert blocked(ledger) == Blocked("missing", 2, 2, (1,))
    with pytest.raises(LedgerError, match="group 1 comes before"):
        ledger.take(Batch(0, 0, (0, 3), (0, 0)))


def test_take_accepts_a_batch_that_newer_events_left_valid() -> None:
    ledger = made_ledger(groups_per_step=2, publish_every=1, max_staleness=1)
    admit(ledger, 4)
    finish(ledger, 2, 3)
    batch = ledger.next_batch()
    assert isinstance(batch, Batch)
    ledger.finish(0)  # it would have been chosen
    ledger.take(batch)
    assert ledger.finished == (0,)
    assert ledger.running == (1,)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch(0, 0, (6, 7), (1, 1)), "step 1, not 0"),
        (Batch(1, 1, (6,), (1,)), "2 different groups"),
        (Batch(1, 1, (7, 6), (1, 1)), "admission order"),
        (Batch(1, 1, (6, 6), (1, 1)), "2 different groups"),
        (Batch(1, 1, (0, 6), (0, 1)), r"groups \[0\] have not finished"),
        (Batch(1, 1, (4, 6), (0, 1)), r"groups \[4\] have not finished"),
        (Batch(1, 1, (6, 7), (0, 1)), "versions"),
        (Batch(1, 1, (6, 7), (1, 1)), "miss their deadline"),
    ],
)
def test_take_refuses_a_batch_against_the_rules(batch: Batch, message: str) -> None:
    ledger = four_long_groups("wait")
    before = ledger.snapshot()
    with pytest.raises(LedgerError, match=message):
        ledger.take(batch)
    assert ledger.snapshot() == before


def test_events_for_groups_that_are_not_outstanding_are_refused() -> None:
    ledger = made_ledger(groups_per_step=1, publish_every=1, max_staleness=1)
    admit(ledger, 2)
    ledger.finish(0)
    take(ledger)
    for group_id in (0, 7, -1):
        with pytest.raises(LedgerError):
            ledger.finish(group_id)
        with pytest.raises(LedgerError):
            ledger.reject(group_id, "failed")
        with pytest.raises(LedgerError):
            ledger.entry(group_id)
    ledger.finish(1)
    with pytest.raises(LedgerError):
        ledger.finish(1)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"next_id": 7},
        {"running": ((0, 0), (1, 1), (2, 0), (3, 0))},
        {"running": ((6, 1),)},
        {"finished": ((6, 1), (7, 2))},
        {"step": 3},
    ],
)
def test_restore_refuses_a_snapshot_that_contradicts_itself(change: dict[str, Any]) -> None:
    ledger = four_long_groups("wait")
    snapshot = ledger.snapshot()
    assert Ledger.restore(ledger.settings, snapshot).snapshot() == snapshot
    with pytest.raises(LedgerError):
        Ledger.restore(ledger.settings, replace(snapshot, **change))


@pytest.mark.parametrize("arguments", [(0, 1, 0), (1, 0, 0), (1, 1, -1), (1, 1, 0, "drop"), (1, 1, 0, "wait", -1)])
def test_settings_out_of_range_are_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"at least|is one of"):
        made_ledger(*arguments)  # type: ignore[arg-type]
