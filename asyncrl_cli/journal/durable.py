"""The ledger with its journal: every event goes to both, and the journal's rows restore the ledger.

Invariant: the journal's rows and the uncommitted notes together describe exactly the ledger in memory. ``buffer.py``
answers a call only after its notes are committed, so a killed process loses nothing that it has acknowledged.

Repeated rollouts, segments and outcomes change nothing: they may be generated and reported again after a resume, or
after a gateway or a worker restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from asyncrl_cli.journal import history, progress
from asyncrl_cli.journal.ledger import Batch, LateGroups, Ledger, LedgerError
from asyncrl_cli.journal.rollout_rows import read_rollouts
from asyncrl_cli.journal.schema import JournalError, sound
from asyncrl_cli.journal.writer import Journal
from asyncrl_cli.records.generation import Rollout, Segment, group_and_index
from asyncrl_cli.records.groups import (
    BufferSettings,
    Candidate,
    Group,
    Opening,
    Outcome,
    PublishRecord,
    Settled,
    Waiting,
)
from asyncrl_cli.records.prompt import prompt_from, to_json
from asyncrl_cli.records.rewards import REWARD, Scored, part_of_reward, weighted_reward
from asyncrl_cli.records.training import CORRECT, FEWEST_SCORED, TrainingBatch, are_equal
from asyncrl_cli.runs.checkpoints import complete_checkpoints


class DurableLedger:
    """The buffer's state and its rules. Methods note events; ``journal.commit`` makes them durable."""

    @classmethod
    def begin(
        cls, path: Path, settings: BufferSettings, start_kind: str, note: str, base: Mapping[str, Any] | None = None
    ) -> DurableLedger:
        """Open the journal as its only writer. Raises ``JournalError``."""
        journal = Journal(path)
        # Read the state in the transaction that records the start: an earlier writer could otherwise commit in between,
        # and this ledger would miss its rows (decision 0013).
        with journal.transaction():
            book = cls(path, settings, base, journal)
            book.start(start_kind, note)
            journal.write(journal.noted())
        return book

    def __init__(
        self,
        path: Path,
        settings: BufferSettings,
        base: Mapping[str, Any] | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Restore the ledger from ``journal``, or open the journal at ``path``. Raises ``JournalError``.

        ``base``: the state (from ``fallback``) at which the history begins if an earlier journal was abandoned. Its
        ``step`` is the checkpoint's step. The journal's own base takes precedence.
        """
        self._path = path
        self.journal = journal or Journal(path)
        self._settings = settings
        self._finished: set[tuple[int, int]] = set()  # unscored recorded rollouts of running groups
        with sound(path, LedgerError):
            meta = self.journal.read(progress.meta)
            self._base: Mapping[str, Any] = meta.get("base", base or {})
            self.journal.described({"base": self._base, "settings": asdict(settings)})
            recorded = self.journal.read(progress.ledger_state)
            start = self._base.get("step", 0)
            # A new journal after an abandoned one has no rows yet, and the run's numbers must not start again at 0.
            state = replace(
                recorded,
                step=max(recorded.step, start),
                version=max(recorded.version, start // settings.publish_every),
                next_id=max(recorded.next_id, self._base.get("next_group", 0)),
            )
            try:
                self.ledger = Ledger.restore(settings, state)
            except LateGroups as late:
                if meta["settings"]["on_stale"] != "train":
                    raise
                raise JournalError(
                    f"pipeline.on_stale cannot change from train to {settings.on_stale} now: {late}",
                    location=str(path),
                    hint="resume without this change; it is possible once these groups are trained",
                ) from None
            self._scores = {
                group_id: {
                    index: Scored(row.reward, row.decoded_metrics())
                    for index, row in self.journal.read(read_rollouts, group_id).items()
                    if row.judged
                }
                for group_id in self.ledger.running
            }

    def start(self, start_kind: str, note: str) -> None:
        """Note that this process begins to write, as ``start_kind`` (``train`` or ``resume``)."""
        self.journal.started(start_kind, self.ledger.step, self.ledger.version, note, self._settings)
        folder = self._path.parent / "checkpoints"
        self.journal.checkpoints_found(
            {
                checkpoint.step: (checkpoint.folder.name, checkpoint.saved_at)
                for checkpoint in complete_checkpoints(folder)
            }
        )

    def opening(self) -> Opening:
        """Return the run's state. Call it before the first event."""
        with sound(self._path):
            groups = self.journal.open_groups()
        self._finished = {(group.group_id, index) for group in groups for index in group.unscored}
        return Opening(
            step=self.ledger.step,
            version=self.ledger.version,
            trained=max(self.journal.read(progress.steps_trained), self._base.get("step", 0)),
            checksum=self.journal.read(progress.checksum, self.ledger.version),
            serial=self.journal.read(progress.newest_serial),
            loader=self.journal.read(progress.loader_position) or self._base.get("loader"),
            groups=groups,
            waiting=tuple(prompt_from(row) for row in self._waiting()),
            evaluated=self.journal.read(history.greedy_accuracies),
            counts=self.ledger.counts(),
            evaluations=frozenset((row.after_step, row.kind) for row in self.journal.read(history.evaluations)),
            solved=self.journal.read(progress.solved_streaks) if self._settings.note_solved else {},
        )

    def admit(self, candidates: Sequence[Candidate]) -> tuple[Group, ...]:
        """Admit these prompts. Raises ``LedgerError`` if there is no room."""
        groups = []
        for candidate in candidates:
            # Before the ledger changes: the journal could never record a group with a prompt that it cannot store.
            self.journal.check_prompt(candidate)
            entry = self.ledger.admit()
            self.journal.admitted(entry, candidate)
            self._scores[entry.group_id] = {}
            groups.append(
                Group(
                    entry.group_id,
                    version=entry.version,
                    prompt=candidate.prompt,
                    prompt_ids=candidate.prompt_ids,
                    images=candidate.images,
                )
            )
        return tuple(groups)

    def grown(self, segments: Iterable[Segment]) -> None:
        """Note new tokens of unfinished rollouts."""
        self.journal.grown(segment for segment in segments if self._is_unfinished(segment.rollout_id))

    def record(self, rollouts: Iterable[Rollout], outcomes: Sequence[Outcome] = ()) -> Settled:
        """Note finished rollouts, and outcomes of these or earlier rollouts (see ``score``).

        Ignores known rollouts, and rollouts of groups that have ended.
        """
        by_rollout = {outcome.rollout_id: outcome for outcome in outcomes}
        new_rollouts = set()
        for rollout in rollouts:
            if self._is_unfinished(rollout.rollout_id):
                # First: if the journal refuses the rollout, memory must not have it.
                self.journal.recorded(rollout, by_rollout.get(rollout.rollout_id))
                self._finished.add(group_and_index(rollout.rollout_id))
                new_rollouts.add(rollout.rollout_id)
        return self.score(outcomes, new_rollouts)

    def score(self, outcomes: Iterable[Outcome], recorded: Collection[str] = ()) -> Settled:
        """Note rewards and failures, except for the rollouts in ``recorded``: the journal has their outcomes.

        A group's last reward finishes the group. A failure rejects it, and so do too few rewards (``unscored``).
        """
        finished, rejected, solved = [], [], []
        for outcome in outcomes:
            group_id, index = group_and_index(outcome.rollout_id)
            scores = self._scores.get(group_id)
            if scores is None or index in scores:  # the group has ended, or the outcome is repeated
                continue
            if outcome.rollout_id not in recorded:
                self.journal.scored(outcome)
            self._finished.discard((group_id, index))
            reason = "failed"
            if isinstance(outcome.score, Scored):
                scores[index] = outcome.score
                if len(scores) < self._settings.group_size:
                    continue
                rewarded = [score for score in scores.values() if score.reward is not None]
                reason = self._rejection_of(rewarded)
                if reason != "unscored" and all((score.reward or 0.0) >= CORRECT for score in rewarded):
                    solved.append(group_id)
            self._forget(group_id)
            if reason:
                self.ledger.reject(group_id, reason)
                self.journal.group_ended(group_id, "rejected", reason)
                rejected.append((group_id, reason))
            else:
                self.ledger.finish(group_id)
                self.journal.group_ended(group_id, "finished")
                finished.append(group_id)
        return Settled(tuple(finished), rejected=tuple(rejected), counts=self.ledger.counts(), solved=tuple(solved))

    def requeue(self, group_ids: Iterable[int]) -> list[tuple[int, int, int]]:
        """Abandon overdue groups and start their prompts again; returns (old index, new index, version)."""
        # Compare with all overdue groups before the first requeue, because each requeue changes them. Other groups may
        # have finished since the caller asked.
        started = []
        for group_id in [group_id for group_id in group_ids if group_id in self.ledger.overdue()]:
            entry = self.ledger.requeue(group_id)
            self.journal.requeued(group_id, entry)
            self._forget(group_id)
            self._scores[entry.group_id] = {}
            started.append((group_id, entry.group_id, entry.version))
        return started

    def take(self, step: int) -> Waiting | None:
        """Take the batch of a step, which must be the next one; None once it is taken. Raises ``LedgerError``."""
        if step != self.ledger.step:
            raise LedgerError(f"the next batch belongs to step {self.ledger.step}, not {step}")
        upcoming = self.ledger.next_batch()
        if not isinstance(upcoming, Batch):
            return Waiting(str(upcoming), self.ledger.overdue(), self.ledger.counts())
        earlier_late_count = self.ledger.counts().late
        self.ledger.take(upcoming)
        self.journal.batch_taken(upcoming, self.ledger.counts().late - earlier_late_count)
        return None

    def batch(self, step: int) -> TrainingBatch:
        """Return a step's batch for the trainer. Call it in the journal's thread. Raises as ``Journal.batch``."""
        return self.journal.batch(step, self._settings.earlier_results)

    def publish(self, record: PublishRecord) -> None:
        """Note that a version is published; again for an earlier version replaces its record.

        Raises ``LedgerError`` if the version is not due.
        """
        if record.version > self.ledger.version + 1:
            raise LedgerError(f"version {record.version} cannot follow version {self.ledger.version}")
        is_next = record.version == self.ledger.version + 1
        if is_next:
            self.ledger.check_publish()
        self.journal.published(record)  # before the ledger changes, because the journal may refuse the record
        if is_next:
            self.ledger.publish()

    def fallback(self, step: int) -> dict[str, Any]:
        """Return the state, as JSON, that the checkpoint of ``step`` stores to resume the run without its journal.

        It includes the prompts of batches that are taken but not trained before ``step``. Call it in the journal's
        thread: it reads the last commit's state from the file.
        """
        return {
            "next_group": max(self.journal.read(progress.next_group), self._base.get("next_group", 0)),
            "loader": self.journal.read(progress.loader_position) or self._base.get("loader"),
            "evaluated": {
                evaluated_step: accuracy
                for evaluated_step, accuracy in self.journal.read(history.greedy_accuracies).items()
                if evaluated_step <= step
            },
            "prompts": [
                *(to_json(prompt) for prompt in self.journal.read(progress.untrained_prompts, step)),
                *self._waiting(),
            ],
        }

    def _waiting(self) -> Sequence[Mapping[str, Any]]:
        # The base's prompts are admitted first and in order. Prompts that are too long are skipped.
        prompts: Sequence[Mapping[str, Any]] = self._base.get("prompts", ())
        for uid in self.journal.read(progress.first_uids, len(prompts)) if prompts else ():
            uids = [prompt["uid"] for prompt in prompts]
            prompts = prompts[uids.index(uid) + 1 :] if uid in uids else prompts
        return prompts

    def _rejection_of(self, rewarded: Sequence[Scored]) -> str:
        """Why a group with these rewards is rejected; empty if it is not."""
        if len(rewarded) < min(FEWEST_SCORED, self._settings.group_size):
            return "unscored"
        uniform = self._settings.reject_uniform and all(map(are_equal, self._compared(rewarded)))
        return "uniform" if uniform else ""

    def _compared(self, scores: Sequence[Scored]) -> list[list[float]]:
        """Lists with one number for each rollout; in a uniform group the numbers of every list are equal. A part that
        a rollout lacks is skipped, or adds nothing to the sum, as in training (``StepRewards``)."""
        weights = self._settings.reward_parts or {REWARD: 1.0}
        if not self._settings.parts_apart:
            return [[weighted_reward(weights, score) for score in scores]]
        reward_parts = [[part_of_reward(name, score.reward, score.metrics) for score in scores] for name in weights]
        return [[value for value in values if value is not None] for values in reward_parts]

    def _is_unfinished(self, sequence_id: str) -> bool:
        group_id, index = group_and_index(sequence_id)
        return index not in self._scores.get(group_id, (index,)) and (group_id, index) not in self._finished

    def _forget(self, group_id: int) -> None:
        del self._scores[group_id]
        self._finished -= {(group_id, index) for index in range(self._settings.group_size)}
