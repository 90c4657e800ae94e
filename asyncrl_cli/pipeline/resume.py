"""From what lies on disk to how a run goes on.

Invariant: nothing is changed on disk before it is clear that the run can go on.
"""

from __future__ import annotations

import json
from contextlib import closing
from itertools import count
from pathlib import Path

from asyncrl_cli.buffer.schema import FILE, check, open_for_reading, open_for_writing
from asyncrl_cli.pipeline.launch import Start
from asyncrl_cli.runs.checkpoints import Checkpoint, newest_sound, remove_later
from asyncrl_cli.runs.directory import MODEL, RunDirectory, RunError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.train.checkpoints import check_layout


def prepare(run: RunDirectory, spec: ExperimentSpec, step: int | None, note: str, without_journal: bool) -> Start:
    """How this run goes on; ``step`` names a checkpoint, ``note`` is for the journal.

    Raises ``RunError`` when there is nothing to do or the checkpoint is damaged, ``JournalError`` when the journal is.
    """
    checkpoint = newest_sound(run, step) if step != 0 else None
    if checkpoint is not None:
        check_layout(checkpoint, spec.trainer)
    journal = run.path / FILE
    if without_journal:
        return _without_journal(run, checkpoint, note)
    if journal.is_file():
        open_for_writing(journal).close()  # one that was never begun, or is older, gets the present schema
        check(journal)
        taken, trained = _steps_done(journal)
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
        if checkpoint is not None and taken < checkpoint.step:
            raise RunError(
                f"the journal knows of {taken} steps, and the checkpoint of step {checkpoint.step} is newer: it is an "
                "older copy, or cut off",
                place=str(journal),
                mend=f"Bring the right one back, or go on from the checkpoint alone: "
                f"asyncrl resume {run.argument} --without-journal",
            )
        _restore_metrics(run, journal, trained)
    elif checkpoint is not None:
        raise RunError(
            "the run has checkpoints, and its journal is gone",
            place=str(journal),
            mend=f"Bring it back, or go on from step {checkpoint.step} alone: "
            f"asyncrl resume {run.argument} --without-journal",
        )
    return Start("resume", note, checkpoint)


def _without_journal(run: RunDirectory, checkpoint: Checkpoint | None, note: str) -> Start:
    base = checkpoint.state() if checkpoint else None
    step = checkpoint.step if checkpoint else 0
    number = next(number for number in count(1) if not [*run.path.glob(f"damaged-{number}-*")])
    for path in list(run.path.glob(f"{FILE}*")):
        path.rename(path.with_name(f"damaged-{number}-{path.name}"))
    remove_later(run.path / "checkpoints", step)
    run.forget_after("metrics.jsonl", step)
    return Start("resume", ", ".join(filter(None, ["without the old journal", note])), checkpoint, base)


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
        base = connection.execute("SELECT value FROM meta WHERE key = 'base'").fetchone()
        taken, trained = connection.execute(
            "SELECT coalesce(max(step) + 1, 0), coalesce(max(step) FILTER (WHERE trained_at IS NOT NULL) + 1, 0) "
            "FROM batches"
        ).fetchone()
    first = json.loads(base[0]).get("step", 0) if base else 0
    return max(taken, first), max(trained, first)
