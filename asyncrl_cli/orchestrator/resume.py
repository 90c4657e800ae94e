"""Decides from the files of a run how it is resumed.

Invariant: nothing on disk is changed before it is known that the run can be resumed.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count

from asyncrl_cli.core.errors import DataError, RunError
from asyncrl_cli.data.images import ImageError
from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.journal.durable import DurableLedger
from asyncrl_cli.journal.file import prepare_resume
from asyncrl_cli.journal.history import metrics_rows
from asyncrl_cli.journal.progress import base as base_of
from asyncrl_cli.journal.progress import loader_position, newest_prompts, steps_taken, steps_trained
from asyncrl_cli.journal.rollout_rows import prompt_texts
from asyncrl_cli.journal.schema import FILE, check, is_begun, reading
from asyncrl_cli.journal.writer import Journal
from asyncrl_cli.orchestrator.actors import buffer_settings
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.orchestrator.launch import Start
from asyncrl_cli.runs.checkpoints import archive_later, verified_checkpoint
from asyncrl_cli.runs.directory import MODEL, RunDirectory
from asyncrl_cli.spec.changes import training_changes
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.checkpoints import check_layout

COMPARED_ROWS = 1000
"""Number of the journal's newest prompts that are compared with the data."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run is resumed, and what has to be archived first."""

    start: Start
    trained: int
    """Number of steps recorded as trained; metrics of later steps are dropped, as they are reported again."""
    again: bool
    """True if the steps after the checkpoint are trained and reported again although later checkpoints may exist and
    the journal has these steps as trained: their weights may become other ones."""
    without_journal: bool
    """True if the run starts a new journal."""
    takes_data: bool = True
    """False if the journal has every group that the run trains: then no row of the training data is needed."""
    changed: str = ""
    """Which steps are trained again to other weights, because settings of the training have changed."""

    def carry_out(self, run: RunDirectory, accept_changed_data: bool = False) -> Start:
        """Archive what does not belong to the resumed run; returns how it starts.

        With ``accept_changed_data`` the prompts recorded so far are never compared with the data again.
        """
        first = self.start.checkpoint.step if self.start.checkpoint else 0
        notes = [self.start.note]
        if self.without_journal:
            _archive_journal(run)
            # Before a new journal begins: if state.json had a later step, the new journal would look damaged.
            run.update(step=first)
            notes.insert(0, "without the old journal")
        if self.changed:
            notes.append(self.changed)
        archive = archive_later(run.path / "checkpoints", first if self.again else None)
        if archive is not None:
            notes.append(f"checkpoints after step {first} are in {archive.relative_to(run.path)}")
        if (run.path / FILE).is_file():
            prepare_resume(run.path / FILE, first if self.again else None, accept_changed_data)
        _restore_metrics(run, self.trained)
        return replace(self.start, note=", ".join(filter(None, notes)))


def prepare(run: RunDirectory, spec: ExperimentSpec, step: int | None, note: str, without_journal: bool) -> Plan:
    """How this run is resumed; ``step`` names a checkpoint, ``note`` is for the journal.

    Raises ``RunError`` when there is nothing to do or the checkpoint is damaged, ``JournalError`` when the journal is,
    or when it forbids a change of the spec.
    """
    checkpoint = verified_checkpoint(run, step) if step != 0 else None
    if checkpoint is not None:
        check_layout(checkpoint, spec.trainer)
    if without_journal:
        first, base = (checkpoint.step, checkpoint.state()) if checkpoint else (0, None)
        return Plan(
            Start("resume", note=note, checkpoint=checkpoint, base=base), first, again=True, without_journal=True
        )
    journal = run.path / FILE
    instead = f"restore it, or resume without it: asyncrl resume {run.argument} --without-journal"
    taken, trained, begun = 0, 0, False
    if journal.is_file():
        if begun := is_begun(journal):
            check(journal)
            with reading(journal) as connection:
                before = base_of(connection).get("step", 0)  # steps before the journal began
                taken, trained = max(steps_taken(connection), before), max(steps_trained(connection), before)
    elif checkpoint is not None or run.state.step:
        raise RunError("the run's journal is gone", location=str(journal), hint=instead)
    if taken > spec.stop.total:
        raise RunError(
            f"the run has taken {taken} steps, more than {spec.stop.total}",
            location=run.run_id,
            hint=f"to train further: asyncrl resume {run.argument} --steps {2 * taken}",
        )
    if taken >= spec.stop.total and (run.path / MODEL / "config.json").is_file() and run.state.phase == "finished":
        raise RunError(
            f"run already completed {taken} of {spec.stop.total} steps",
            location=run.run_id,
            hint=f"to train further: asyncrl resume {run.argument} --steps {2 * taken}",
        )
    # A batch is in the journal before it is trained, so no other file can have a later step (decision 0013).
    known = {"the newest checkpoint": checkpoint.step if checkpoint else 0, "state.json": run.state.step}
    for source, later in known.items():
        if later > taken:
            raise RunError(
                f"the journal ends at step {taken}, and {source} is of step {later}: {FILE}-wal is missing or "
                "truncated, or the journal is an older copy",
                location=str(journal),
                hint=instead,
            )
    first = checkpoint.step if checkpoint else 0
    takes_data = not begun or _read_through(run, spec=spec, first=first, taken=taken)
    # The batches stay; with other settings they are trained to other weights, and their reports would be stale.
    differ = first < trained and bool(training_changes(note))
    steps = f"step {first + 1} is" if trained == first + 1 else f"steps {first + 1} to {trained} are"
    changed = f"{steps} trained again with the new settings, and their weights will differ" if differ else ""
    again = differ or step is not None
    return Plan(
        Start("resume", note, checkpoint),
        trained=min(trained, first) if again else trained,
        again=again,
        without_journal=False,
        takes_data=takes_data,
        changed=changed,
    )


def _read_through(run: RunDirectory, spec: ExperimentSpec, first: int, taken: int) -> bool:
    """Read the parts of the journal that a resume needs: the position, unfinished groups, and the batches from step
    ``first`` on, which are trained again. Changes nothing. Returns whether prompts are missing for the last step."""
    journal = Journal(run.path / FILE, to_write=False)
    with closing(journal):
        book = DurableLedger(run.path / FILE, buffer_settings(spec), journal=journal)
        waiting = len(book.opening().waiting)
        for step in range(first, taken):
            try:
                book.batch(step)
            except LookupError as error:
                raise RunError(
                    f"the steps after step {first} cannot be trained again: {error.args[0]}",
                    location=run.run_id,
                    hint=f"resume from a later checkpoint: `asyncrl checkpoint list {run.argument}` shows them",
                ) from None
        return book.ledger.admitted + waiting < spec.stop.total * spec.pipeline.groups_per_step


def check_data(run: RunDirectory, experiment: Experiment, plan: Plan, accept_changed_data: bool = False) -> None:
    """Compare the newest prompts of the journal with the data, row by row, unless changes are accepted.

    Raises ``RunError`` when the data has changed, as the loader's position would mean other rows, and ``DataError``
    when there is no such position.
    """
    path = run.path / FILE
    spec = experiment.spec
    loader = PromptLoader(experiment.train_prompts, seed=spec.seed, shuffle=spec.data.shuffle, stages=experiment.stages)
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
            found = loader.newest()
        except DataError as error:
            if isinstance(error.__context__, ImageError):
                continue  # the file of an image is gone, and the journal has it
            raise
        if [found.uid, *prompt_texts(found)] != [uid, *recorded]:
            now = "other contents" if found.uid == uid else f"prompt {found.uid!r} at its position"
            raise RunError(
                f"the training data has changed since the run was started: prompt {uid!r} was trained on, and the "
                f"data now has {now}",
                location=paths[0] if len(paths := spec.data.train.paths) == 1 else "data.train",
                hint="restore the data, or continue at the same position of the changed data: "
                f"asyncrl resume {run.argument} --accept-changed-data",
            )


def _archive_journal(run: RunDirectory) -> None:
    """Move the journal and its accompanying files to ``damaged-N``; completes a move that a kill interrupted."""
    files = sorted(run.path.glob(f"{FILE}*"))
    if not files:
        return
    number = next(number for number in count(1) if not (run.path / f"damaged-{number}").exists())
    folder, last = run.path / f"damaged-{number}", run.path / f"damaged-{number - 1}"
    if files[0].name != FILE and last.is_dir() and not any((last / path.name).exists() for path in files):
        folder = last
    folder.mkdir(exist_ok=True)
    # The journal first: a journal without its -wal, left by a kill in between, would look like an older copy.
    for path in files:
        path.rename(folder / path.name)


def _restore_metrics(run: RunDirectory, trained: int) -> None:
    """Make metrics.jsonl agree with the journal, if there is one: drop steps that are not recorded as trained, which
    are reported again, and add rows that were never written (the driver was killed, the disk was full)."""
    rows = {row["step"]: row for row in run.read("metrics.jsonl") if row["step"] <= trained}
    if (run.path / FILE).is_file():
        with reading(run.path / FILE) as connection:
            for row in metrics_rows(connection):
                rows.setdefault(row["step"], row)
    run.write_rows("metrics.jsonl", (rows[step] for step in sorted(rows)))
