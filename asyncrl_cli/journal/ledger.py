"""The ledger decides which groups may start, and which groups the next training batch takes.

Invariant: with the policies ``wait`` and ``requeue`` no group is trained more than ``max_staleness``
weight versions after the version it was admitted at, and no finished group is dropped to achieve this.
``Ledger.room`` and ``Ledger.take`` enforce it. The ledger is pure: it reads no clock, does no I/O and
does not know rollouts. A group is an integer, its admission index. The ledger only moves forward:
after a crash its last state is restored, and the trainer catches up with it.

Life of a group::

    admit -> running -> finish -> finished -> take -> taken (forgotten, only counted)
                |                    |
                +------ reject ------+--> rejected (leaves A, so its room is given back)
                |
                +-- requeue --> gone; its prompt runs again under a new index (A unchanged)

The theorem
-----------
Symbols: B groups per step, k steps per publish, S the staleness bound, t batches taken so far, w = t // k the
trainer's version, v versions published so far (all engines serve version v), A groups admitted and not rejected.
Every batch has B groups, so A − tB groups are *outstanding* (running or finished).

The trainer does not wait for the engines: while they load version w it takes batches of w. At most one publish is
in flight, so v <= w <= v + 1 whenever a batch is taken, and t <= (v + 2)k at any time (decision 0001). Groups are
admitted at v, because the engines serve v, and trained at w.

* Admission needs A < (v + 1 + S)kB. The group's version is v and its deadline v + S: a batch must take it
  while the trainer's version is at most v + S, i.e. in one of the steps t, ..., (v + S + 1)k − 1.
* For d >= w let places(d) = B·((d + 1)k − t − 1), the places in the batches *after* the next one until d
  has passed; U(d) the outstanding groups with a deadline of at most d; run(d) the running groups among them.
* A batch has the B finished groups with the earliest deadlines, ties by admission order. It is taken once there
  are B of them and run(d) <= places(d) for every d >= w: then each group left behind still gets a place in time.

Claim: U(d) <= places(d) + B for every d >= w, and U(d) = 0 for every d < w whenever a batch is taken.
Hence every group is taken by its deadline, and a batch can be taken as soon as the running groups finish.

Proof, by induction over the events; at the start nothing is outstanding.

1. admit: all deadlines are at most v + S, so for d >= v + S, U(d) = A − tB <= ((v + 1 + S)k − t)B <=
   places(d) + B. For d < v + S the new group does not count, and U(d) does not change. How room arose
   (publish, rejection) does not matter: the bound looks at A alone. The new deadline is not below w: if
   v + S < w, then (v + 1 + S)kB <= wkB <= tB <= A, so there is no room.
2. finish changes no U. reject lowers U. requeue lowers U(d) for the old deadline and leaves the total
   A − tB, and only the total bounds U(d) for d >= v + S, the replacement's deadline. The new deadline is later:
   when a group is overdue, there are B finished groups, all with deadlines up to v + S, so
   run(v + S) <= places(v + S).
3. take: let F(d) = U(d) − run(d) be the finished groups. Earliest deadline first takes min(B, F(d)) of them.
   If it takes B, then U(d) − B <= places(d) by the claim. Otherwise no finished group is left and
   run(d) <= places(d) by the rule. Afterwards t is higher by one, and places(d) lower by B, which gives the
   claim. The last batch of w has places(w) = 0, so U(w) = 0 after it: no group is overdue when d = w leaves
   the range d >= w. ``train`` drops the rule, and with it the claim: late groups are counted instead.
4. publish raises v and nothing else, and the claim does not mention v.

A crash is not an event: ``restore`` gives back the same state. A batch that is trained again was taken once.
``ahead`` only delays admissions, and only while a batch is ready (decision 0001).

A batch is always possible: (a) A can reach (t + 1)B: after the publish in flight v = w, and then
(v + 1 + S)k >= (w + 1)k >= t + 1; with S >= 1 also before it, as (v + 1 + S)k >= (v + 2)k >= t + 1. The bound
by ``total_steps`` is not below (t + 1)B either; (b) when every outstanding group has finished,
run(d) = 0 <= places(d). So if rollouts end and the caller uses the room, no step waits without end.

Earliest deadline first needs the second condition: with k = 1, B = 2, S = 2, let the four groups 0 to 3 of
version 0 be long. Step 1 would take two groups of version 1, and at step 2 four groups would be due for two places.

Versions never fall from one admission to the next, so deadlines rise with the admission index: earliest
deadline first *is* admission order, and the state needs only sorted lists of indices.

The caller must ensure the theorem's assumption: no token of a group admitted at version a is sampled under a
version below a. So ``publish`` is called after *every* engine serves the new weights, and an engine that
restarts loads the current version before it serves.

With S = 0 the trainer waits for every publish, because there is no room before it. Then batches are taken strictly
in admission order: if finish order decided a batch's groups, ``async`` with S = 0 would differ from ``sync`` for
k > 1. docs/decisions/0001-ledger.md has the reasons.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import get_args

from asyncrl_cli.records.groups import BufferSettings, Counts, LedgerState, OnStale


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One admitted group."""

    group_id: int
    """Admission index; rises by one with every admission, also of a requeued prompt."""
    version: int
    """Weight version at admission; none of the group's tokens is older."""
    deadline: int
    """Last version at which the group may be trained, ``version + max_staleness``."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, in admission order."""

    step: int
    version: int
    """Weight version that the batch is trained at, w = t // k."""
    group_ids: tuple[int, ...]
    """B admission indices, ascending."""
    group_versions: tuple[int, ...]
    """Each group's version at admission."""

    @property
    def staleness(self) -> tuple[int, ...]:
        """Each group's staleness in versions, in the order of ``group_ids``."""
        return tuple(self.version - admitted_at for admitted_at in self.group_versions)


class Blocker(StrEnum):
    """The reason why the next batch cannot be taken."""

    ALL_TAKEN = "done"  # all steps are taken
    PUBLISH = "publish"  # a publish is in flight, and the next version is due
    GROUPS = "groups"  # fewer than B groups have finished
    OVERDUE_GROUPS = "missing"  # running groups would otherwise miss their deadline


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why there is no next batch yet; ``str()`` gives a sentence. ``finished`` counts groups, ``batch_size`` is B."""

    blocker: Blocker
    finished: int
    batch_size: int
    missing_groups: tuple[int, ...] = ()
    """Running groups that the batch waits for (``Blocker.OVERDUE_GROUPS``), in admission order."""

    def __str__(self) -> str:
        match self.blocker:
            case Blocker.ALL_TAKEN:
                return "all steps are taken"
            case Blocker.PUBLISH:
                return "the previous weight version must be published first"
            case Blocker.GROUPS:
                return f"only {self.finished} of {self.batch_size} groups have finished"
            case Blocker.OVERDUE_GROUPS:
                return "groups that would miss their deadline have not finished: " + ", ".join(
                    map(str, self.missing_groups)
                )


class LedgerError(RuntimeError):
    """The ledger's state does not allow an event. The state is unchanged."""


class LateGroups(LedgerError):
    """Groups that were admitted under ``train`` and cannot meet the deadlines of another policy."""


class Ledger:
    """Admits, orders and accounts for groups. The module docstring has the rules and the proof.

    With n groups outstanding an event costs O(log n) comparisons and one memory move, ``next_batch``
    O(B + D log n), where D <= S + 1 is the number of different deadlines among the running groups.

    Raises ``ValueError`` for settings out of range.
    """

    def __init__(self, settings: BufferSettings) -> None:
        if settings.groups_per_step < 1 or settings.publish_every < 1 or settings.max_staleness < 0:
            raise ValueError("groups_per_step and publish_every are at least 1, max_staleness at least 0")
        if settings.on_stale not in get_args(OnStale):
            raise ValueError(f"on_stale is one of {', '.join(get_args(OnStale))}, not {settings.on_stale!r}")
        if settings.total_steps < 0:
            raise ValueError("total_steps is at least 0")
        self.settings = settings
        self._step = 0
        self._version = 0
        self._next_id = 0
        self._running: list[int] = []  # ascending, like _finished
        self._finished: list[int] = []
        self._version_of: dict[int, int] = {}  # the outstanding groups' versions
        self._rejections: dict[str, int] = {}
        self._requeued = 0
        self._late_groups = 0

    # -- state

    @property
    def step(self) -> int:
        """t: number of batches taken, and index of the next batch."""
        return self._step

    @property
    def version(self) -> int:
        """v: newest published weight version; 0 is the initial model."""
        return self._version

    @property
    def admitted(self) -> int:
        """A: number of groups admitted and not rejected, including taken groups."""
        return self._step * self.settings.groups_per_step + len(self._running) + len(self._finished)

    @property
    def running(self) -> tuple[int, ...]:
        """Running groups in admission order."""
        return tuple(self._running)

    @property
    def finished(self) -> tuple[int, ...]:
        """Finished groups that no batch has taken, in admission order."""
        return tuple(self._finished)

    @property
    def rejections(self) -> dict[str, int]:
        """Number of rejected groups by reason."""
        return dict(self._rejections)

    @property
    def trainer_version(self) -> int:
        """w: version that the next batch is trained at, t // k."""
        return self._step // self.settings.publish_every

    @property
    def publish_due(self) -> bool:
        """True after a version's last batch is taken, until ``publish``: the trainer is ahead of the engines."""
        return self._version < self.trainer_version

    @property
    def _publish_overdue(self) -> bool:
        """True if two versions are due. The proof allows only one publish in flight while a batch is taken."""
        return self._version + 1 < self.trainer_version

    @property
    def is_done(self) -> bool:
        """True once ``total_steps`` batches are taken."""
        return self._step >= self.settings.total_steps

    def entry(self, group_id: int) -> GroupEntry:
        """Return the entry of a running or finished group. Raises ``LedgerError`` for any other group."""
        if group_id not in self._version_of:
            raise LedgerError(f"group {group_id} is not outstanding")
        return GroupEntry(group_id, self._version_of[group_id], self._deadline(group_id))

    def counts(self) -> Counts:
        """Return the number of groups in each state."""
        return Counts(
            running=len(self._running),
            finished=len(self._finished),
            taken=self._step * self.settings.groups_per_step,
            rejected=sum(self._rejections.values()),
            requeued=self._requeued,
            late=self._late_groups,
        )

    # -- admission

    def room(self) -> int:
        """Return how many groups may be admitted now: min((v + 1 + S)·k, total_steps)·B − A, at least 0, and 0 while
        ``ahead`` batches wait to be taken."""
        if self._enough_finished():
            return 0
        steps = (self._version + 1 + self.settings.max_staleness) * self.settings.publish_every
        return max(0, min(steps, self.settings.total_steps) * self.settings.groups_per_step - self.admitted)

    def admit(self) -> GroupEntry:
        """Start a group at the current version. Raises ``LedgerError`` if there is no room."""
        if self.room() < 1:
            raise LedgerError(f"no room at version {self._version}: {self.admitted} groups are admitted")
        return self._start()

    def finish(self, group_id: int) -> None:
        """All rollouts of a running group are complete. Raises ``LedgerError`` if the group is not running."""
        self._remove(self._running, group_id, "running")
        insort(self._finished, group_id)  # sorted by index, which is the order of deadlines; see the proof

    def reject(self, group_id: int, reason: str) -> None:
        """Drop a running or finished group; it leaves A, which frees its room. ``rejections`` counts it by reason
        (``uniform``, ``failed``, ``unscored``). Raises ``LedgerError`` if the group is not outstanding."""
        if _index(self._running, group_id) is not None:
            self._remove(self._running, group_id, "running")
        else:
            self._remove(self._finished, group_id, "running or finished")
        del self._version_of[group_id]
        self._rejections[reason] = self._rejections.get(reason, 0) + 1

    def overdue(self) -> tuple[int, ...]:
        """Return the running groups to cancel and ``requeue`` now; always empty with the other policies.

        A group is overdue only if B groups have finished: otherwise the step must wait anyway, and cancelling its
        rollouts would gain nothing. These are the fewest groups that suffice (max over d of run(d) − places(d)), with
        the earliest deadlines. Once all are requeued, ``next_batch`` has a batch. With S = 0 there are none, because a
        replacement would have the same deadline.
        """
        if self.settings.on_stale != "requeue" or self.settings.max_staleness == 0:
            return ()
        upcoming = self.next_batch()
        return upcoming.missing_groups if isinstance(upcoming, Blocked) else ()

    def requeue(self, group_id: int) -> GroupEntry:
        """Abandon an overdue group and start its prompt again, at the current version.

        The ledger forgets the old index: cancel its rollouts and ignore results that still arrive for it. Raises
        ``LedgerError`` if the group is not in ``overdue()``.
        """
        if group_id not in self.overdue():
            raise LedgerError(f"group {group_id} is not overdue")
        self._remove(self._running, group_id, "running")
        del self._version_of[group_id]
        self._requeued += 1
        return self._start()

    # -- batches

    def next_batch(self) -> Batch | Blocked:
        """Return the batch of step t, or the reason why there is none yet. Changes nothing."""
        finished, batch_size = len(self._finished), self.settings.groups_per_step
        if self.is_done:
            return Blocked(Blocker.ALL_TAKEN, finished, batch_size)
        if self._publish_overdue:
            return Blocked(Blocker.PUBLISH, finished, batch_size)
        if finished < batch_size:
            return Blocked(Blocker.GROUPS, finished, batch_size)
        if missing_ids := self._missing_groups():
            return Blocked(Blocker.OVERDUE_GROUPS, finished=finished, batch_size=batch_size, missing_groups=missing_ids)
        return self._batch(self._finished[:batch_size])

    def take(self, batch: Batch) -> None:
        """Take a batch for training: the ledger forgets its groups, and t rises by one.

        The batch stays valid if other groups finish after ``next_batch``. It becomes invalid if one of its groups is
        rejected: then ask for the next batch again. Raises ``LedgerError`` if the batch belongs to another step, two
        versions are due, a group in it has not finished, or a group left behind would miss its deadline.
        """
        if self.is_done or self._publish_overdue:
            raise LedgerError(f"no batch can be taken: {self.next_batch()}")
        if batch.step != self._step:
            raise LedgerError(f"the next batch belongs to step {self._step}, not {batch.step}")
        self._check(batch)  # all rules again, because events may have come since ``next_batch``
        leaving = set(batch.group_ids)
        self._finished = [group_id for group_id in self._finished if group_id not in leaving]
        for group_id in batch.group_ids:
            del self._version_of[group_id]
        self._late_groups += sum(staleness > self.settings.max_staleness for staleness in batch.staleness)
        self._step += 1

    def publish(self) -> None:
        """Raise v: every engine serves the next weight version now. Raises ``LedgerError`` while t < (v + 1)·k."""
        self.check_publish()
        self._version += 1

    def check_publish(self) -> None:
        """Raise ``LedgerError`` as ``publish`` would."""
        if not self.publish_due:
            due = (self._version + 1) * self.settings.publish_every
            raise LedgerError(f"version {self._version + 1} is due at step {due}, not {self._step}")

    # -- restart

    def snapshot(self) -> LedgerState:
        """Return the entire state except the settings; ``restore`` makes a ledger from it that behaves identically."""
        return LedgerState(
            step=self._step,
            version=self._version,
            next_id=self._next_id,
            running=tuple((group_id, self._version_of[group_id]) for group_id in self._running),
            finished=tuple((group_id, self._version_of[group_id]) for group_id in self._finished),
            rejections=dict(self._rejections),
            requeued=self._requeued,
            late=self._late_groups,
        )

    @classmethod
    def restore(cls, settings: BufferSettings, state: LedgerState) -> Ledger:
        """Make a ledger from a snapshot and settings. Raises ``LedgerError`` if the snapshot contradicts itself,
        and ``LateGroups`` if ``wait`` or ``requeue`` could not keep its deadlines."""
        ledger = cls(settings)
        ledger._step, ledger._version, ledger._next_id = state.step, state.version, state.next_id
        ledger._version_of = dict([*state.running, *state.finished])
        ledger._running = sorted(group_id for group_id, _ in state.running)
        ledger._finished = sorted(group_id for group_id, _ in state.finished)
        ledger._rejections = dict(state.rejections)
        ledger._requeued, ledger._late_groups = state.requeued, state.late
        ledger._check_restored(len(state.running) + len(state.finished))
        return ledger

    # -- the rules

    def _enough_finished(self) -> bool:
        """True if a group admitted now would only wait, and be staler when it is trained.

        False while the next batch waits for a running group, because then the engines have time for new groups.
        """
        ahead, batch_size = self.settings.ahead, self.settings.groups_per_step
        if ahead is None or self.settings.max_staleness == 0 or len(self._finished) < ahead * batch_size:
            return False
        return not self._missing_groups()

    def _start(self) -> GroupEntry:
        group_id = self._next_id
        self._next_id += 1
        self._running.append(group_id)
        self._version_of[group_id] = self._version
        return self.entry(group_id)

    def _deadline(self, group_id: int) -> int:
        return self._version_of[group_id] + self.settings.max_staleness

    def _batch(self, group_ids: Sequence[int]) -> Batch:
        versions = tuple(self._version_of[group_id] for group_id in group_ids)
        return Batch(self._step, version=self.trainer_version, group_ids=tuple(group_ids), group_versions=versions)

    def _overflow(self, group_ids: Sequence[int]) -> int:
        """Count the groups that would miss their deadline if the next batch contained none of these groups.

        This is the maximum over d of |{deadline <= d}| − places(d), at least 0. It suffices to look at the groups'
        deadlines: between two deadlines the count is constant and places(d) grows.

        Args:
            group_ids: outstanding groups in admission order, which is the order of their deadlines.
        """
        worst = start = 0
        while start < len(group_ids):
            deadline = self._deadline(group_ids[start])
            start = bisect_right(group_ids, deadline, lo=start, key=self._deadline)
            places = self.settings.groups_per_step * ((deadline + 1) * self.settings.publish_every - self._step - 1)
            worst = max(worst, start - places)
        return worst

    def _missing_groups(self) -> tuple[int, ...]:
        """Running groups that the next batch must wait for, although B groups have finished."""
        if self.settings.max_staleness == 0:
            # The oldest B groups in admission order, finished or not: finish order must not decide the batch.
            batch_size = self.settings.groups_per_step
            oldest_ids = sorted(self._running[:batch_size] + self._finished[:batch_size])[:batch_size]
            return tuple(group_id for group_id in oldest_ids if _index(self._running, group_id) is not None)
        if self.settings.on_stale == "train":
            return ()
        return tuple(self._running[: self._overflow(self._running)])

    def _check(self, batch: Batch) -> None:
        """Raise ``LedgerError`` unless the rules allow this batch now. It need not be ``next_batch``'s batch."""
        ids = batch.group_ids
        if len(ids) != self.settings.groups_per_step or list(ids) != sorted(set(ids)):
            raise LedgerError(f"a batch has {self.settings.groups_per_step} different groups in admission order")
        if unfinished := [group_id for group_id in ids if _index(self._finished, group_id) is None]:
            raise LedgerError(f"groups {unfinished} have not finished, or are gone")
        if batch != self._batch(ids):
            raise LedgerError("the batch's versions differ from the ledger's")
        leaving = set(ids)
        behind = sorted(group_id for group_id in self._version_of if group_id not in leaving)
        if self.settings.max_staleness == 0:
            if behind and behind[0] < ids[-1]:
                raise LedgerError(f"with max_staleness 0 group {behind[0]} comes before group {ids[-1]}")
        elif self.settings.on_stale != "train" and self._overflow(behind):
            raise LedgerError(f"the batch leaves behind groups that would miss their deadline: {behind[0]} first")

    def _check_restored(self, outstanding: int) -> None:
        # Versions must not fall with the index, nor exceed the ledger's: the order of deadlines depends on it.
        versions = [*(self._version_of[group_id] for group_id in sorted(self._version_of)), self._version]
        sound = (
            len(self._version_of) == outstanding
            and all(group_id < self._next_id for group_id in self._version_of)
            and versions == sorted(versions)
            and self._version * self.settings.publish_every
            <= self._step
            <= (self._version + 2) * self.settings.publish_every
        )
        if not sound:
            raise LedgerError("the snapshot contradicts itself")
        # The claim, U(d) <= places(d) + B: a run under ``train``, or with a larger bound, may have violated it.
        if self.settings.on_stale != "train":
            overflow = self._overflow(sorted(self._version_of)) - self.settings.groups_per_step
            if overflow > 0:
                raise LateGroups(f"{overflow} of the groups that are not trained yet can no longer meet their deadline")

    def _remove(self, group_ids: list[int], group_id: int, expected: str) -> None:
        index = _index(group_ids, group_id)
        if index is None:
            raise LedgerError(f"group {group_id} is not {expected}")
        del group_ids[index]


def _index(ascending: Sequence[int], group_id: int) -> int | None:
    index = bisect_left(ascending, group_id)
    return index if index < len(ascending) and ascending[index] == group_id else None
