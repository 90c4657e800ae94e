"""Acknowledged data survives a crash at any moment, and repeated results change nothing.

The state machine acts as the driver and its engines, and calls a ledger with a journal. ``Known`` is the expected
content of the journal: it is saved at every commit (which may come after any call) and restored at every crash.
Rollouts may be episodes with several sequences, and given tokens anywhere. The keys of ``engines``, ``delivered`` and
``prefixes`` are ids of sequences.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from buffer_stand_ins import (
    SETTINGS,
    candidates,
    commit,
    content,
    contents,
    episode,
    extended,
    joined,
    part,
    pieces,
    publish_record,
    rollout,
    tokens,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.ledger import Batch
from asyncrl_cli.records.generation import (
    CONTEXT,
    Rollout,
    Segment,
    branch_id,
    group_and_index,
    sequence_of,
    training_rollout_id,
)
from asyncrl_cli.records.groups import BufferSettings, Candidate, LedgerState, OnStale, Outcome, Settled
from asyncrl_cli.records.rewards import RewardFailure, Scored, Turn
from asyncrl_cli.records.training import TrainingBatch, TrainingGroup


@dataclass
class Known:
    """The driver's calls, and the answers to them."""

    ledger: LedgerState
    serial: int = 0
    recorded: dict[str, Rollout] = field(default_factory=dict)
    prefixes: dict[str, tuple[Segment, ...]] = field(default_factory=dict)
    scores: dict[str, Scored] = field(default_factory=dict)
    uids: dict[int, str] = field(default_factory=dict)
    batches: dict[int, tuple[Batch, TrainingBatch]] = field(default_factory=dict)

    def copy(self) -> Known:
        return replace(
            self,
            recorded=dict(self.recorded),
            prefixes=dict(self.prefixes),
            scores=dict(self.scores),
            uids=dict(self.uids),
            batches=dict(self.batches),
        )


class Crashes(RuleBasedStateMachine):
    """Calls in any possible order, with commits and crashes between any two."""

    @initialize(
        groups=st.integers(1, 2),
        every=st.integers(1, 2),
        staleness=st.integers(0, 2),
        on_stale=st.sampled_from(["wait", "wait", "requeue", "train"]),
        group_size=st.integers(1, 3),
        reject_uniform=st.booleans(),
        episodes=st.booleans(),
        random=st.randoms(use_true_random=False),
    )
    def start(
        self,
        groups: int,
        every: int,
        staleness: int,
        on_stale: OnStale,
        group_size: int,
        reject_uniform: bool,
        episodes: bool,
        random: Random,
    ) -> None:
        self.episodes = episodes
        self.settings: BufferSettings = replace(
            SETTINGS,
            groups_per_step=groups,
            publish_every=every,
            max_staleness=staleness,
            on_stale=on_stale,
            group_size=group_size,
            reject_uniform=reject_uniform,
        )
        # In memory if possible: these crashes end a process, not the machine.
        self.folder = Path(tempfile.mkdtemp(prefix="crashes-", dir=next(Path("/dev").glob("shm"), None)))
        self.lives = 0
        self._open(self.folder / "0.db")
        self.known = Known(self.book.ledger.snapshot())
        self.random = random
        self.seed = 0
        self.engines: dict[str, Rollout] = {}
        self.delivered: dict[str, int] = {}
        self.reports: list[tuple[str, Any]] = []
        self._commit()

    def teardown(self) -> None:
        self.book.journal.close()
        shutil.rmtree(self.folder)

    # -- the driver's calls

    @rule(count=st.integers(1, 6))
    def admit(self, count: int) -> None:
        offered = candidates(self.known.serial + 1, count)[: self.book.ledger.room()]
        admitted = self._call("admit", offered)
        assert [admission.prompt for admission in admitted] == [candidate.prompt for candidate in offered]

    @precondition(lambda self: self._running())
    @rule(data=st.data(), count=st.integers(1, 3), sent=st.booleans())
    def generate(self, data: st.DataObject, count: int, sent: bool) -> None:
        """Engines add tokens to some rollouts; with ``sent`` the driver sends all tokens not sent before."""
        running = data.draw(st.lists(st.sampled_from(self._running()), min_size=1, max_size=4, unique=True))
        branches = st.integers(0, 2 if self.episodes else 0)
        names = [branch_id(name, data.draw(branches)) for name in running]
        for name in names:
            self.engines[name] = extended(self.engines.get(name, rollout(name, ())), self._more(name, count))
        if sent:
            self._send(names)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def generate_again(self, data: st.DataObject) -> None:
        """An engine failed, and another engine starts at an earlier token."""
        name = data.draw(st.sampled_from(sorted(self.delivered)))
        sent = self.delivered[name]
        self.delivered[name] = data.draw(st.integers(0, max(sent - 1, 0)))
        more = self._more(name, data.draw(st.integers(1, sent + 1)))
        self.engines[name] = extended(part(self.engines[name], 0, self.delivered[name]), more)
        self._send([name])

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.delivered)))
        first = data.draw(st.integers(0, self.delivered[name]))
        self._call("grown", pieces(self.engines[name], first, self.delivered[name]))

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def tokens_after_a_gap_are_ignored(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.delivered)))
        ahead = extended(self.engines[name], self._more(name, 2))
        self.book.grown(pieces(ahead, self.delivered[name] + 1))

    @precondition(lambda self: self._running())
    @rule(data=st.data(), count=st.integers(1, 4))
    def finish(self, data: st.DataObject, count: int) -> None:
        """Rollouts end, some of them without tokens."""
        ended = data.draw(st.lists(st.sampled_from(self._running()), max_size=count, unique=True))
        self._call("record", [self._whole(name) for name in ended])

    @precondition(lambda self: self._unscored())
    @rule(data=st.data(), rewards=st.lists(st.sampled_from([0.0, 1.0, 1 / 3, None]), min_size=1, max_size=6))
    def score(self, data: st.DataObject, rewards: list[float | None]) -> None:
        names = data.draw(st.permutations(self._unscored()))
        metrics = [{"turns": float(at)} if at % 2 else {} for at in range(len(names))]
        turns = [(Turn(0.1, 0, 2), Turn(-0.1, 1, 5)) if at % 3 == 1 else () for at in range(len(names))]
        judged = zip(names, rewards, metrics, turns, strict=False)
        scores = [
            (name, Scored(reward, measured, () if reward is None else of)) for name, reward, measured, of in judged
        ]
        self._call("score", [Outcome(name, score) for name, score in scores])

    @precondition(lambda self: self._running() or self._unscored())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._running() + self._unscored()))
        settled = self._call("score", [Outcome(name, RewardFailure("the engine refused"))])
        assert settled.rejected == ((group_and_index(name)[0], "failed"),)

    @precondition(lambda self: isinstance(self.book.ledger.next_batch(), Batch))
    @rule()
    def take(self) -> None:
        batch = self.book.ledger.next_batch()
        assert isinstance(batch, Batch)
        if self.settings.on_stale != "train":
            assert max(batch.staleness) <= self.settings.max_staleness
        assert self._call("take", batch.step) is None
        assert batch.step in self.known.batches

    @precondition(lambda self: not isinstance(self.book.ledger.next_batch(), Batch))
    @rule()
    def ask_for_a_batch_too_early(self) -> None:
        waiting = self.book.take(self.book.ledger.step)
        assert waiting is not None
        assert waiting.overdue == self.book.ledger.overdue()
        assert self.book.ledger.snapshot() == self.known.ledger

    @precondition(lambda self: self.book.ledger.publish_due)
    @rule()
    def publish(self) -> None:
        self._call("publish", publish_record(self.book.ledger.version + 1, self.book.ledger.step))

    @precondition(lambda self: self.book.ledger.overdue())
    @rule()
    def requeue(self) -> None:
        overdue = self.book.ledger.overdue()
        started = self._call("requeue", overdue)
        assert tuple(old for old, _, _ in started) == overdue

    @rule(count=st.integers(1, 4))
    def run_on(self, count: int) -> None:
        """Run steps while only the newest groups finish: the old groups become late."""
        for _ in range(count):
            self.admit(9)
            for group_id in reversed(self.book.ledger.running[1:]):
                names = self._names(group_id)
                self._call("record", [rollout(name, [self.book.ledger.version]) for name in names])
                self._call("score", [Outcome(name, Scored(float(i))) for i, name in enumerate(names)])
            if self.book.ledger.overdue():
                self.requeue()
            if isinstance(self.book.ledger.next_batch(), Batch):
                self.take()
            if self.book.ledger.publish_due:
                self.publish()

    # -- faults

    @precondition(lambda self: self.reports)
    @rule(data=st.data())
    def results_arrive_again(self, data: st.DataObject) -> None:
        """A restarted gateway or worker reports again. Tokens of a running rollout arrive in order."""
        method, argument = data.draw(st.sampled_from(self.reports))
        if method == "grown":
            argument = [segment for segment in argument if _rollout_of(segment.rollout_id) in self.known.recorded]
        getattr(self.book, method)(argument)
        assert self.book.ledger.snapshot() == self.known.ledger

    @precondition(lambda self: self.known.ledger.next_id)
    @rule()
    def the_run_dies(self) -> None:
        """Everything except the file is lost. The next driver continues where the journal ends."""
        self._die()
        self.known = self.saved.copy()
        opening = self._opened_as_saved()
        indices = [index for group in opening.groups for index in group.prefixes.values()]
        prefixes = [prefix for branches in indices for prefix in branches.values()]
        self.engines = {prefix[0].rollout_id: joined(prefix[0].rollout_id, prefix) for prefix in prefixes}
        self.delivered = {prefix[0].rollout_id: prefix[-1].end for prefix in prefixes}
        self.reports = []
        self._commit()

    # -- invariants

    @invariant()
    def a_group_is_trained_at_most_once(self) -> None:
        taken = [group_id for batch, _ in self.known.batches.values() for group_id in batch.group_ids]
        assert len(taken) == len(set(taken))

    # -- helpers

    def _open(self, path: Path) -> None:
        self.book = DurableLedger(path, self.settings)
        self.book.journal._connection.execute("PRAGMA synchronous = OFF")  # a simulated crash is not a power failure

    def _commit(self) -> None:
        commit(self.book)
        self.saved = self.known.copy()

    def _die(self) -> None:
        """Leave the file as a kill would: the journal is not closed, and its log is not merged."""
        self.lives += 1
        path = self.folder / f"{self.lives}.db"
        for end in ("", "-wal"):
            shutil.copyfile(self.folder / f"{self.lives - 1}.db{end}", f"{path}{end}")
        self.book.journal.close()
        self._open(path)

    def _opened_as_saved(self) -> Any:
        """Open the journal. It must have everything that was acknowledged, and nothing else."""
        opening, known = self.book.opening(), self.known
        assert self.book.ledger.snapshot() == known.ledger
        assert (opening.step, opening.version) == (known.ledger.step, known.ledger.version)
        assert opening.serial == known.serial
        assert opening.loader == ({"epoch": 0, "position": known.serial} if known.serial else None)
        assert [group.group_id for group in opening.groups] == list(self.book.ledger.running)
        for group in opening.groups:
            group_id = group.group_id
            assert group.prompt.uid == known.uids[group_id]
            for index, name in enumerate(self._names(group_id)):
                assert (index in group.scored) == (name in known.scores)
                assert (index in group.unscored) == (name in known.recorded and name not in known.scores)
                if index in group.unscored:
                    assert contents(group.unscored[index]) == contents(known.recorded[name])
                found = group.prefixes.get(index, {})
                assert {
                    branch_id(name, branch): tokens(joined(branch_id(name, branch), found[branch])) for branch in found
                } == {
                    one: tokens(joined(one, prefix))
                    for one, prefix in known.prefixes.items()
                    if _rollout_of(one) == name
                }
            assert self.book._scores[group_id] == {
                group_and_index(name)[1]: replace(scored, turns=())
                for name, scored in known.scores.items()
                if group_and_index(name)[0] == group_id
            }
        for step, (_, batch) in known.batches.items():
            assert content(self.book.journal.batch(step)) == content(batch)
        return opening

    def _call(self, method: str, argument: Any) -> Any:
        """Make a call, and add its effect to ``known``."""
        upcoming = self.book.ledger.next_batch()
        answer = getattr(self.book, method)(argument)
        if method in ("grown", "record", "score"):
            self.reports.append((method, argument))
        if method == "admit":
            self._admitted(answer, argument)
        elif method == "grown":
            self._grown(argument)
        elif method == "record":
            self._recorded(argument)
        elif method == "score":
            self._judged(argument, answer)
        elif method == "take" and answer is None:
            assert isinstance(upcoming, Batch)
            self.known.batches[upcoming.step] = (upcoming, self._expected(upcoming))
        elif method == "requeue":
            for old, new, _ in answer:
                self.known.uids[new] = self.known.uids[old]
        self.known.ledger = self.book.ledger.snapshot()
        alive = set(self._running())
        self.engines = {name: so_far for name, so_far in self.engines.items() if _rollout_of(name) in alive}
        self.delivered = {name: count for name, count in self.delivered.items() if _rollout_of(name) in alive}
        if self.random.random() < 0.5:
            self._commit()
        return answer

    def _more(self, name: str, count: int) -> Rollout:
        """New tokens of a sequence; in an episode the first tokens are given."""
        self.seed += 1
        given = self.random.randint(0, 2) if self.episodes else 0
        return rollout(name, [CONTEXT] * given + [self.book.ledger.version] * count, self.seed)

    def _whole(self, name: str) -> Rollout:
        """A finished rollout with the current tokens of most of its branches; it may have dropped some."""
        branches = [one for one in self.engines if _rollout_of(one) == name != one and self.random.random() < 0.8]
        others = sorted(branches, key=sequence_of)
        return episode([self.engines.get(name, rollout(name, ())), *(self.engines[one] for one in others)])

    def _send(self, names: list[str]) -> None:
        """Send the tokens that the engines have added since the last call."""
        sent = [segment for name in names for segment in pieces(self.engines[name], self.delivered.get(name, 0))]
        self.delivered |= {name: len(self.engines[name].ids) for name in names}
        self._call("grown", sent)

    def _admitted(self, admissions: Iterable[Any], offered: list[Candidate]) -> None:
        for admission, candidate in zip(admissions, offered, strict=False):
            self.known.serial = candidate.serial
            self.known.uids[admission.group_id] = candidate.prompt.uid

    def _grown(self, segments: list[Segment]) -> None:
        for segment in segments:
            earlier = self.known.prefixes.get(segment.rollout_id, ())
            kept = [part for known in earlier if (part := known.slice(0, segment.start)) is not None]
            self.known.prefixes[segment.rollout_id] = (*kept, segment)

    def _recorded(self, ended: list[Rollout]) -> None:
        for one in ended:
            self.known.recorded.setdefault(one.rollout_id, one)  # the first result counts
            for name in [name for name in self.known.prefixes if _rollout_of(name) == one.rollout_id]:
                del self.known.prefixes[name]

    def _judged(self, outcomes: list[Outcome], settled: Settled) -> None:
        for outcome in outcomes:
            if isinstance(outcome.score, Scored):
                self.known.scores.setdefault(outcome.rollout_id, outcome.score)
        rejected = {
            group_and_index(outcome.rollout_id)[0]: "failed"
            for outcome in outcomes
            if isinstance(outcome.score, RewardFailure)
        }
        finished = set()
        for group_id in {group_and_index(outcome.rollout_id)[0] for outcome in outcomes} - rejected.keys():
            scores = [self.known.scores.get(name) for name in self._names(group_id)]
            if None in scores:
                continue
            rewards = [score.reward for score in scores if score is not None and score.reward is not None]
            if len(rewards) < min(2, len(scores)):
                rejected[group_id] = "unscored"
            elif self.settings.reject_uniform and len(set(rewards)) == 1:
                rejected[group_id] = "uniform"
            else:
                finished.add(group_id)
        assert (set(settled.finished), dict(settled.rejected)) == (finished, rejected)

    def _expected(self, batch: Batch) -> TrainingBatch:
        groups = []
        for group_id, version in zip(batch.group_ids, batch.group_versions, strict=True):
            rollouts = tuple(self.known.recorded[name] for name in self._names(group_id))
            scores = [self.known.scores[name] for name in self._names(group_id)]
            rewards = tuple(score.reward for score in scores)
            metrics = tuple(score.metrics for score in scores)
            turns = tuple(score.turns for score in scores)
            uid = self.known.uids[group_id]
            found = TrainingGroup(group_id, uid, version, rollouts, rewards, metrics if any(metrics) else ())
            groups.append(replace(found, turns=turns) if any(turns) else found)
        return TrainingBatch(batch.step, batch.version, tuple(groups))

    def _names(self, *group_ids: int) -> list[str]:
        indices = range(self.settings.group_size)
        return [training_rollout_id(group_id, index) for group_id in group_ids for index in indices]

    def _running(self) -> list[str]:
        """Rollouts that engines are generating."""
        return [name for name in self._names(*self.book.ledger.running) if name not in self.known.recorded]

    def _unscored(self) -> list[str]:
        recorded = [name for name in self._names(*self.book.ledger.running) if name in self.known.recorded]
        return [name for name in recorded if name not in self.known.scores]


def _rollout_of(sequence_id: str) -> str:
    return training_rollout_id(*group_and_index(sequence_id))


TestCrashes = pytest.mark.slow(Crashes.TestCase)
TestCrashes.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
