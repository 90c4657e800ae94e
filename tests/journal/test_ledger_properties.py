"""The theorem of the ledger's docstring, tested on random histories of any length and order.

The invariants are computed from the theorem's formulas, independently of the ledger's code, and compared with it.
"""

from __future__ import annotations

from dataclasses import replace

from buffer_stand_ins import made_ledger
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl_cli.journal.ledger import Batch, Blocked, GroupEntry, LateGroups, Ledger
from asyncrl_cli.records.groups import OnStale


class Histories(RuleBasedStateMachine):
    """Events in any possible order, with a crash (restore) at any moment."""

    @initialize(
        groups=st.integers(1, 4),
        every=st.integers(1, 3),
        staleness=st.integers(0, 3),
        on_stale=st.sampled_from(["wait", "requeue", "train"]),
        total=st.none() | st.integers(1, 30),
        ahead=st.none() | st.integers(1, 3),
    )
    def start(
        self, groups: int, every: int, staleness: int, on_stale: OnStale, total: int | None, ahead: int | None
    ) -> None:
        self.B, self.k, self.S, self.T, self.ahead = groups, every, staleness, total, ahead
        self.ledger = made_ledger(groups, every, staleness, on_stale, total, ahead)
        self.entries: dict[int, GroupEntry] = {}
        self.taken: list[Batch] = []
        self.gone: set[int] = set()

    # -- events

    @rule(count=st.integers(1, 9))
    def admits(self, count: int) -> None:
        self._fill(count)

    @precondition(lambda self: self.ledger.running)
    @rule(data=st.data(), count=st.integers(1, 6))
    def finish(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.ledger.running))):
            self.ledger.finish(data.draw(st.sampled_from(self.ledger.running)))

    @precondition(lambda self: self.ledger.running or self.ledger.finished)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(self.ledger.running + self.ledger.finished))
        self.ledger.reject(group_id, "uniform")
        self.gone.add(group_id)

    @precondition(lambda self: self.ledger.overdue())
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        while overdue := self.ledger.overdue():
            admitted, group_id = self.ledger.admitted, data.draw(st.sampled_from(overdue))
            self._started(self.ledger.requeue(group_id))
            assert self.ledger.entry(max(self.entries)).deadline > self.entries[group_id].deadline
            assert self.ledger.admitted == admitted
            self.gone.add(group_id)
        assert isinstance(self.ledger.next_batch(), Batch), "a requeue must make the batch possible at once"

    @precondition(lambda self: isinstance(self.ledger.next_batch(), Batch))
    @rule()
    def take(self) -> None:
        batch = self.ledger.next_batch()
        assert isinstance(batch, Batch)
        assert batch.step == len(self.taken)
        assert batch.version == batch.step // self.k
        assert batch.version - self.ledger.version in (0, 1), "at most one publish is in flight"
        assert list(batch.group_ids) == sorted(batch.group_ids)
        assert len(batch.group_ids) == self.B
        assert not self.gone.intersection(batch.group_ids)
        assert batch.group_versions == tuple(self.entries[g].version for g in batch.group_ids)
        if self.ledger.settings.on_stale != "train":
            assert max(batch.staleness) <= self.S
            assert all(self.entries[g].deadline >= batch.version for g in batch.group_ids)
        if self.S == 0:
            assert set(batch.group_versions) == {batch.version}
            assert batch.group_ids == (self.ledger.running + self.ledger.finished)[: self.B] or not any(
                g < batch.group_ids[-1] for g in self.ledger.running
            )
        self.ledger.take(batch)
        self.taken.append(batch)

    @rule(data=st.data())
    def fast_ones_overtake(self, data: st.DataObject) -> None:
        """Fill the room, then let only the newest groups finish until a batch is ready or must wait."""
        self._fill(99)
        while self.ledger.running and len(self.ledger.finished) < self.B:
            self.ledger.finish(self.ledger.running[-1])
        if isinstance(self.ledger.next_batch(), Batch):
            self.take()
        if self.ledger.publish_due and data.draw(st.integers(0, 3)):
            self.publish()

    @precondition(lambda self: self.ledger.publish_due)
    @rule()
    def publish(self) -> None:
        self.ledger.publish()

    @rule()
    def crash(self) -> None:
        restored = Ledger.restore(self.ledger.settings, self.ledger.snapshot())
        assert vars(restored) == vars(self.ledger)
        self.ledger = restored

    @rule()
    def nothing_is_stuck(self) -> None:
        """If all running groups and all new groups end now, the run reaches its next step."""
        restored = Ledger.restore(self.ledger.settings, self.ledger.snapshot())
        while restored.publish_due:
            restored.publish()
        for group_id in restored.running:
            restored.finish(group_id)
        while restored.room():
            restored.finish(restored.admit().group_id)
        upcoming = restored.next_batch()
        assert isinstance(upcoming, Batch) or upcoming.blocker == "done", str(upcoming)

    def _fill(self, count: int) -> None:
        for _ in range(min(count, self.ledger.room())):
            self._started(self.ledger.admit())

    def _started(self, entry: GroupEntry) -> None:
        assert entry.group_id == len(self.entries), "indices rise by one"
        assert entry == GroupEntry(entry.group_id, self.ledger.version, self.ledger.version + self.S)
        self.entries[entry.group_id] = entry

    # -- invariants

    @precondition(lambda self: self.ledger.settings.on_stale == "train")
    @rule()
    def another_policy_is_refused_or_keeps_the_bound(self) -> None:
        late = [d for d in range(self.ledger.version + self.S + 1) if self._due_by(d) > self._places_by(d)]
        try:
            restored = Ledger.restore(replace(self.ledger.settings, on_stale="wait"), self.ledger.snapshot())
        except LateGroups:
            assert late
            return
        assert not late
        for _ in range(100):
            upcoming = restored.next_batch()
            if isinstance(upcoming, Batch):
                assert max(upcoming.staleness) <= self.S
                restored.take(upcoming)
            elif restored.publish_due:
                restored.publish()
            elif restored.room():
                restored.admit()
            elif restored.running:
                restored.finish(restored.running[-1])

    def _due_by(self, deadline: int) -> int:
        return self._due(self.ledger.running, deadline) + self._due(self.ledger.finished, deadline)

    def _places_by(self, deadline: int) -> int:
        return max(0, self.B * ((deadline + 1) * self.k - self.ledger.step))

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        taken = [g for batch in self.taken for g in batch.group_ids]
        everywhere = [*taken, *self.gone, *self.ledger.running, *self.ledger.finished]
        assert sorted(everywhere) == list(range(len(self.entries)))
        counts = self.ledger.counts()
        assert counts.taken == len(taken)
        assert counts.rejected + counts.requeued == len(self.gone)
        assert (counts.running, counts.finished) == (len(self.ledger.running), len(self.ledger.finished))
        assert self.ledger.admitted == len(self.entries) - len(self.gone)
        assert counts.late == sum(staleness > self.S for batch in self.taken for staleness in batch.staleness)

    @invariant()
    def admission_is_bounded(self) -> None:
        bound = (self.ledger.version + 1 + self.S) * self.k * self.B
        if self.T is not None:
            bound = min(bound, self.T * self.B)
        assert self.ledger.admitted <= bound
        upcoming = self.ledger.next_batch()
        held_back = isinstance(upcoming, Blocked) and upcoming.blocker == "missing"
        waiting = len(self.ledger.finished) // self.B
        if self.ahead is None or self.S == 0 or waiting < self.ahead or held_back:
            assert self.ledger.room() == bound - self.ledger.admitted
        elif not (isinstance(upcoming, Blocked) and self.ledger.running):
            assert self.ledger.room() == 0, "it would only wait"
        if self.ledger.version + self.S < self.ledger.step // self.k:
            assert self.ledger.room() == 0, "a group would have missed its deadline from the start"

    @invariant()
    def demand_can_be_met(self) -> None:
        if self.ledger.settings.on_stale == "train":
            return
        v, t = self.ledger.version, self.ledger.step
        w = t // self.k
        assert v <= w
        assert t <= (v + 2) * self.k
        for d in range(max(v + self.S, *(e.deadline for e in self.entries.values()), 0) + 1 if self.entries else 0):
            rest = (d + 1) * self.k - t - 1
            due = self._due(self.ledger.running, d) + self._due(self.ledger.finished, d)
            if d >= w:
                assert due <= self.B * (rest + 1), f"U({d}) = {due}, R({d}) = {rest}"
            else:
                assert due == 0, f"{due} groups have missed version {d}"

    @invariant()
    def a_batch_is_taken_exactly_when_the_design_page_allows_it(self) -> None:
        ledger = self.ledger
        upcoming = ledger.next_batch()
        if self.S == 0 or (isinstance(upcoming, Blocked) and upcoming.blocker in ("done", "publish")):
            return
        met = ledger.settings.on_stale == "train" or all(
            self._due(ledger.finished, d)
            >= self._due(ledger.finished, d)
            + self._due(ledger.running, d)
            - self.B * ((d + 1) * self.k - ledger.step - 1)
            for d in range(ledger.step // self.k, ledger.version + self.S + 1)
        )
        assert isinstance(upcoming, Batch) == (met and len(ledger.finished) >= self.B), str(upcoming)
        if isinstance(upcoming, Batch):
            first = sorted(ledger.finished, key=lambda g: (self.entries[g].deadline, g))[: self.B]
            assert list(upcoming.group_ids) == first
        elif upcoming.blocker == "missing":
            assert set(upcoming.missing_groups) <= set(ledger.running)

    def _due(self, group_ids: tuple[int, ...], deadline: int) -> int:
        return sum(self.entries[g].deadline <= deadline for g in group_ids)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=250, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def batches_without_staleness(every: int, uniform: set[int], order: list[float]) -> list[tuple[int, ...]]:
    """The batches when rollouts finish in the given order and the groups in ``uniform`` are rejected."""
    ledger = made_ledger(groups_per_step=3, publish_every=every, max_staleness=0, total_steps=6)
    batches: list[tuple[int, ...]] = []
    while not ledger.is_done:
        while ledger.room():
            ledger.admit()
        upcoming = ledger.next_batch()
        if isinstance(upcoming, Batch):
            ledger.take(upcoming)
            batches.append(upcoming.group_ids)
        elif ledger.publish_due:
            ledger.publish()
        else:
            group_id = min(ledger.running, key=lambda g: order[g % len(order)])
            if group_id in uniform:
                ledger.reject(group_id, "uniform")
            else:
                ledger.finish(group_id)
    return batches


@settings(max_examples=60, deadline=None)
@given(every=st.integers(1, 3), uniform=st.sets(st.integers(0, 20), max_size=6), order=st.permutations(range(11)))
def test_without_staleness_batches_depend_only_on_the_groups(every: int, uniform: set[int], order: list[float]) -> None:
    kept = [group_id for group_id in range(40) if group_id not in uniform]
    expected = [tuple(kept[i : i + 3]) for i in range(0, 18, 3)]
    assert batches_without_staleness(every, uniform, order) == expected
