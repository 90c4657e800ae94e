"""From what lies on disk to how a run goes on.

Invariant: nothing is changed on disk before it is clear that the run can go on.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from asyncrl_cli.buffer.durable import DurableLedger
from asyncrl_cli.buffer.rollout_rows import prompt_texts
from asyncrl_cli.buffer.schema import FILE, check, explained, open_for_reading, open_for_writing
from asyncrl_cli.data.loader import PromptLoader
from asyncrl_cli.pipeline.fleet import buffer_settings
from asyncrl_cli.pipeline.launch import Experiment, Start
from asyncrl_cli.runs.checkpoints import newest_sound, set_aside_later
from asyncrl_cli.runs.directory import MODEL, RunDirectory, RunError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.checkpoints import check_layout

COMPARED_ROWS = 1000
"""Prompts, the newest in the journal, that are compared with the data."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run goes on, and what of the past has to be put away first.

    Args:
        trained: steps known as trained; metrics of later ones are dropped, as they are reported again.
        again: whether steps after the checkpoint are trained again although there may be later checkpoints.
        without_journal: whether the journal is given up.
    """

    start: Start
    trained: int
    again: bool
    without_journal: bool

    def carry_out(self, run: RunDirectory) -> Start:
        """Put away what does not belong to the run from here on, and say how it starts."""
        first = self.start.checkpoint.step if self.start.checkpoint else 0
        notes = [self.start.note]
        if self.without_journal:
            number = next(number for number in count(1) if not [*run.path.glob(f"damaged-{number}-*")])
            for path in list(run.path.glob(f"{FILE}*")):
                path.rename(path.with_name(f"damaged-{number}-{path.name}"))
            run.update(step=first)  # otherwise the new journal would seem to be cut short
            notes.insert(0, "without the old journal")
        aside = set_aside_later(run.path / "checkpoints", first) if self.again else None
        if aside is not None:
            notes.append(f"checkpoints after step {first} are in {aside.relative_to(run.path)}")
        if (run.path / FILE).is_file():
            _restore_metrics(run, run.path / FILE, self.trained)
        else:
            run.forget_after("metrics.jsonl", self.trained)
        return replace(self.start, note=", ".join(filter(None, notes)))


def prepare(run: RunDirectory, spec: ExperimentSpec, step: int | None, note: str, without_journal: bool) -> Plan:
    """How this run goes on; ``step`` names a checkpoint, ``note`` is for the journal.

    Raises ``RunError`` when there is nothing to do or the checkpoint is damaged, ``JournalError`` when the journal is,
    or when it forbids a change of the spec.
    """
    checkpoint = newest_sound(run, step) if step != 0 else None
    if checkpoint is not None:
        check_layout(checkpoint, spec.trainer)
    if without_journal:
        first, base = (checkpoint.step, checkpoint.state()) if checkpoint else (0, None)
        return Plan(Start("resume", note, checkpoint, base), first, again=True, without_journal=True)
    journal = run.path / FILE
    instead = f"Restore it, or resume without it: asyncrl resume {run.argument} --without-journal"
    taken, trained = 0, 0
    if journal.is_file():
        open_for_writing(journal).close()  # one that was never begun, or is older, gets the present schema
        check(journal)
        taken, trained = _steps_done(journal)
    elif checkpoint is not None or run.state.step:
        raise RunError("the run's journal is gone", place=str(journal), mend=instead)
    if taken >= spec.stop.steps and (run.path / MODEL / "config.json").is_file() and run.state.phase == "finished":
        raise RunError(
            f"the run has done its {taken} steps",
            place=run.run_id,
            mend=f"To train on, say how far: asyncrl resume {run.argument} --steps {2 * taken}",
        )
    if taken > spec.stop.steps:
        raise RunError(
            f"the run has taken {taken} steps already, more than {spec.stop.steps}",
            place=run.run_id,
            mend="Say a later step",
        )
    # Batches are in the journal before they are trained, so nothing else can know of a later step.
    known = {"the newest checkpoint": checkpoint.step if checkpoint else 0, "state.json": run.state.step}
    for source, later in known.items():
        if later > taken:
            raise RunError(
                f"the journal ends at step {taken}, and {source} is of step {later}: {FILE}-wal is missing or cut "
                "short, or the journal is an older copy",
                place=str(journal),
                mend=instead,
            )
    if journal.is_file():
        _read_through(run, spec, checkpoint.step if checkpoint else 0, taken)
    return Plan(Start("resume", note, checkpoint), trained, again=step is not None, without_journal=False)


def _read_through(run: RunDirectory, spec: ExperimentSpec, first: int, taken: int) -> None:
    """Read what the run needs of its journal: where it stands, what is unfinished, and the batches from step ``first``
    on, which are trained again. Changes nothing."""
    book = DurableLedger(run.path / FILE, buffer_settings(spec))
    with closing(book.journal):
        book.opening()
        for step in range(first, taken):
            try:
                book.journal.batch(step)
            except LookupError as error:
                raise RunError(
                    f"the steps after step {first} cannot be trained again: {error.args[0]}",
                    place=run.run_id,
                    mend="Resume from a later checkpoint: `asyncrl checkpoint list` shows them",
                ) from None


def check_data(run: RunDirectory, experiment: Experiment) -> None:
    """Compare the prompts that the journal has last with the data, row by row.

    Raises ``RunError`` when the data is not that which the run was started with: the place in it would mean other rows.
    """
    path = run.path / FILE
    if not path.is_file():
        return
    with explained(path), closing(open_for_reading(path)) as connection:
        rows = connection.execute(
            "SELECT epoch, position, uid, prompt, fields FROM groups WHERE serial > :not_from_data "
            "ORDER BY id DESC LIMIT :rows",
            {"not_from_data": len(_base(connection).get("prompts", ())), "rows": COMPARED_ROWS},
        ).fetchall()
    spec = experiment.spec
    loader = PromptLoader(experiment.train_prompts, spec.seed, spec.data.shuffle, experiment.stages)
    for epoch, position, uid, *recorded in rows:
        loader.restore({"epoch": epoch, "position": position})
        found = loader.newest()
        if [found.uid, *prompt_texts(found)] != [uid, *recorded]:
            now = "other contents" if found.uid == uid else f"prompt {found.uid!r} in its place"
            raise RunError(
                f"the training data has changed since the run was started: prompt {uid!r} was trained on, and the "
                f"data now has {now}",
                place=spec.data.train.path or "data.train",
                mend="Restore the data, or continue at the same position of the changed data: "
                f"asyncrl resume {run.argument} --accept-changed-data",
            )


def _restore_metrics(run: RunDirectory, journal: Path, trained: int) -> None:
    """Bring metrics.jsonl in line with the journal: steps that are not known as trained are reported again, and rows
    that were never written (the driver was killed, the disk was full) are in the journal."""
    rows = {row["step"]: row for row in run.read("metrics.jsonl") if row["step"] <= trained}
    with closing(open_for_reading(journal)) as connection:
        for step, at, metrics, version in connection.execute(
            "SELECT step + 1, trained_at, metrics, "
            "(SELECT coalesce(max(version), 0) FROM publishes WHERE publishes.step <= batches.step + 1) "
            "FROM batches WHERE metrics IS NOT NULL"
        ):
            rows.setdefault(step, {"step": step, "version": version, "time": at, **json.loads(metrics)})
    run.write_text("metrics.jsonl", "".join(json.dumps(rows[step]) + "\n" for step in sorted(rows)))


def _steps_done(journal: Path) -> tuple[int, int]:
    """Steps that are taken, and steps that are known as trained; those before the journal began count."""
    with closing(open_for_reading(journal)) as connection:
        first = _base(connection).get("step", 0)
        taken, trained = connection.execute(
            "SELECT coalesce(max(step) + 1, 0), coalesce(max(step) FILTER (WHERE trained_at IS NOT NULL) + 1, 0) "
            "FROM batches"
        ).fetchone()
    return max(taken, first), max(trained, first)


def _base(connection: sqlite3.Connection) -> dict[str, Any]:
    """Where the journal's history begins, if that is a checkpoint."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'base'").fetchone()
    base: dict[str, Any] = json.loads(row[0]) if row else {}
    return base
