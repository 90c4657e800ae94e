"""Decides from a run's files how it is resumed (decision 0009).

Invariant: nothing on disk changes before it is certain that the run can be resumed.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count

from asyncrl_cli.core.errors import DataError, RunError
from asyncrl_cli.data.images import ImageError
from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.file import prepare_resume
from asyncrl_cli.journal.history import metrics_rows, reported_metrics
from asyncrl_cli.journal.progress import base as base_of
from asyncrl_cli.journal.progress import loader_position, newest_prompts, steps_taken, steps_trained
from asyncrl_cli.journal.rollout_rows import prompt_texts
from asyncrl_cli.journal.schema import FILE, check, is_begun, reading
from asyncrl_cli.journal.writer import Journal
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.launch import DriverStart
from asyncrl_cli.records.groups import BufferSettings
from asyncrl_cli.records.rewards import REWARD, unknown_metric
from asyncrl_cli.runs.checkpoints import archive_later, verified_checkpoint
from asyncrl_cli.runs.directory import MODEL, RunDirectory
from asyncrl_cli.spec.changes import training_changes
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.checkpoints import CRITIC, check_layout, find_source

COMPARED_ROWS = 1000
"""Number of the journal's newest prompts that are compared with the data."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run is resumed, and which files are archived first."""

    start: DriverStart
    trained: int
    """Number of steps recorded as trained. Later steps are reported again, so their metrics are dropped."""
    again: bool
    """True if recorded steps after the checkpoint are trained and reported again, perhaps to other weights: then later
    checkpoints no longer count."""
    without_journal: bool
    """True if the run starts a new journal."""
    takes_data: bool = True
    """False if the journal has every group that the run still trains, so no training data is needed."""
    changed: str = ""
    """A text about the steps that are trained again to other weights because training settings changed."""

    def carry_out(self, run: RunDirectory, accept_changed_data: bool = False) -> DriverStart:
        """Archive the files that do not belong to the resumed run; returns its start.

        ``accept_changed_data``: never compare the prompts recorded so far with the data again.
        """
        first_step = self.start.checkpoint.step if self.start.checkpoint else 0
        notes = [self.start.note]
        if self.without_journal:
            _archive_journal(run)
            # Before the new journal begins, which would look damaged if state.json had a later step.
            run.update(step=first_step)
            notes.insert(0, "without the old journal")
        if self.changed:
            notes.append(self.changed)
        archive = archive_later(run.path / "checkpoints", first_step if self.again else None)
        if archive is not None:
            notes.append(f"checkpoints after step {first_step} are in {archive.relative_to(run.path)}")
        if (run.path / FILE).is_file():
            prepare_resume(run.path / FILE, first_step if self.again else None, accept_changed_data)
        _restore_metrics(run, self.trained)
        return replace(self.start, note=", ".join(filter(None, notes)))


def prepare(run: RunDirectory, spec: ExperimentSpec, step: int | None, note: str, without_journal: bool) -> Plan:
    """Plan the resume of a run, from the checkpoint of ``step`` if given. ``note`` is for the journal.

    Raises ``RunError`` if there is nothing to do or the checkpoint is damaged; ``JournalError`` if the journal is
    damaged or forbids a change of the spec; ``ConfigError`` if no recorded rollout has a changed part of the reward.
    """
    checkpoint = verified_checkpoint(run, step, lease=False) if step != 0 else None
    if checkpoint is not None:
        check_layout(checkpoint, spec.trainer)
        if spec.algorithm.needs_critic:  # a run without a critic may change to one
            find_source(checkpoint, spec.trainer, CRITIC)
    first_step = checkpoint.step if checkpoint else 0
    if without_journal:
        start = DriverStart("resume", note, checkpoint, base=checkpoint.state() if checkpoint else None)
        return Plan(start, first_step, again=True, without_journal=True)
    journal = run.path / FILE
    instead = f"restore it, or resume without it: asyncrl resume {run.argument} --without-journal"
    step_count, trained_count, journal_has_begun = 0, 0, False
    if journal.is_file():
        if journal_has_begun := is_begun(journal):
            check(journal)
            with reading(journal) as connection:
                base_step = base_of(connection).get("step", 0)  # steps before the journal began
                step_count = max(steps_taken(connection), base_step)
                trained_count = max(steps_trained(connection), base_step)
                _check_reward_parts(connection, spec, note)
    elif checkpoint is not None or run.state.step:
        raise RunError("the run's journal is gone", location=str(journal), hint=instead)
    total, has_model = spec.stop.total, (run.path / MODEL / "config.json").is_file()
    if step_count > total or (step_count == total and has_model and run.state.phase == "finished"):
        problem = f"the run has taken {step_count} steps, more than {total}"
        if step_count == total:
            problem = f"run already completed {step_count} of {total} steps"
        hint = f"to train further: asyncrl resume {run.argument} --steps {2 * step_count or 'N'}"
        raise RunError(problem, location=run.run_id, hint=hint)
    # A batch is in the journal before it is trained, so a later step in another file means that the journal lost rows
    # (decision 0013).
    for source, step_there in (("the newest checkpoint", first_step), ("state.json", run.state.step)):
        if step_there > step_count:
            raise RunError(
                f"the journal ends at step {step_count}, but {source} has step {step_there}: {FILE}-wal is missing or "
                "truncated, or the journal is an older copy",
                location=str(journal),
                hint=instead,
            )
    takes_data = not journal_has_begun or _read_through(run, spec=spec, first_step=first_step, taken_steps=step_count)
    # The batches are kept. With other settings they give other weights, so their old reports are dropped.
    changed = ""
    if first_step < trained_count and training_changes(note):
        next_step = first_step + 1
        steps = f"step {next_step} is" if trained_count == next_step else f"steps {next_step} to {trained_count} are"
        changed = f"{steps} trained again with the new settings, and their weights may differ"
    again = bool(changed) or step is not None
    return Plan(
        DriverStart("resume", note, checkpoint),
        trained=min(trained_count, first_step) if again else trained_count,
        again=again,
        without_journal=False,
        takes_data=takes_data,
        changed=changed,
    )


def _check_reward_parts(connection: sqlite3.Connection, spec: ExperimentSpec, note: str) -> None:
    """Raise ``ConfigError`` for a part of the reward in the ``note``'s changes that no recorded rollout has.

    The trainer checks only a run's first batch: all rollouts of a later one may lack a rare part. The tasks of a mix
    may have different metrics.
    """
    changed_parts = [name for name in spec.algorithm.reward_parts if f"algorithm.reward_parts.{name}=" in note]
    if not changed_parts or spec.task.mix or (reported := reported_metrics(connection)) is None:
        return
    for name in changed_parts:
        if name not in (REWARD, *reported):
            raise unknown_metric(name, reported, "no recorded rollout")


def _read_through(run: RunDirectory, spec: ExperimentSpec, first_step: int, taken_steps: int) -> bool:
    """Read what a resume needs from the journal, so damage is found now: the position, unfinished groups, and the
    batches from step ``first_step`` on. Changes nothing. True if further prompts are needed to reach the last step."""
    journal = Journal(run.path / FILE, to_write=False)
    with closing(journal):
        book = DurableLedger(run.path / FILE, BufferSettings.from_spec(spec), journal=journal)
        waiting = len(book.opening().waiting)
        for step in range(first_step, taken_steps):
            try:
                book.batch(step)
            except LookupError as error:
                raise RunError(
                    f"the steps after step {first_step} cannot be trained again: {error.args[0]}",
                    location=run.run_id,
                    hint=f"resume from a later checkpoint: `asyncrl checkpoint list {run.argument}` shows them",
                ) from None
        return book.ledger.admitted + waiting < spec.stop.total * spec.pipeline.groups_per_step


def check_data(run: RunDirectory, experiment: Experiment, plan: Plan, accept_changed_data: bool = False) -> None:
    """Compare the journal's newest prompts with the data, row by row, unless changes are accepted.

    Raises ``RunError`` if the data has changed: the loader's position would point to other rows. Raises ``DataError``
    if there is no such position.
    """
    path = run.path / FILE
    spec = experiment.spec
    if spec.stop.steps == 0:
        return
    loader = PromptLoader(experiment.train_prompts, seed=spec.seed, shuffle=spec.data.shuffle)
    base = plan.start.base or {}
    if plan.without_journal or not path.is_file() or not is_begun(path):
        if base.get("loader"):
            loader.restore(base["loader"])
        return
    with reading(path) as connection:
        position_now = loader_position(connection) or base_of(connection).get("loader")
        rows = newest_prompts(connection, COMPARED_ROWS)
    if position_now:
        loader.restore(position_now)
    for epoch, position, uid, *recorded in () if accept_changed_data else rows:
        loader.restore({"epoch": epoch, "position": position})
        try:
            prompt = loader.newest()
        except DataError as error:
            if isinstance(error.__context__, ImageError):
                continue  # an image file is gone, but the journal has the image
            raise
        if [prompt.uid, *prompt_texts(prompt)] != [uid, *recorded]:
            difference = "other contents" if prompt.uid == uid else f"prompt {prompt.uid!r} at its position"
            raise RunError(
                f"the training data has changed since the run was started: prompt {uid!r} was trained on, and the "
                f"data now has {difference}",
                location=paths[0] if len(paths := spec.data.train.paths) == 1 else "data.train",
                hint="restore the data, or continue at the same position of the changed data: "
                f"asyncrl resume {run.argument} --accept-changed-data",
            )


def _archive_journal(run: RunDirectory) -> None:
    """Move the journal's files to ``damaged-N``."""
    if not (files := sorted(run.path.glob(f"{FILE}*"))):
        return
    folders = (run.path / f"damaged-{index}" for index in count(1))
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir()
    # The journal before its -wal: a kill must not leave a journal without -wal, which would look like an older copy.
    for path in files:
        path.rename(folder / path.name)


def _restore_metrics(run: RunDirectory, trained: int) -> None:
    """Make metrics.jsonl agree with the journal: drop steps that will be reported again, and add rows that were never
    written because the driver was killed or the disk was full."""
    rows = {row["step"]: row for row in run.read("metrics.jsonl") if row["step"] <= trained}
    if (run.path / FILE).is_file():
        with reading(run.path / FILE) as connection:
            for row in metrics_rows(connection):
                rows.setdefault(row["step"], row)
    run.write_rows("metrics.jsonl", (rows[step] for step in sorted(rows)))
