"""From what lies on disk to how a run goes on.

Invariant: nothing is changed on disk before it is clear that the run can go on.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl_cli.buffer.schema import FILE, check, open_for_reading
from asyncrl_cli.pipeline.launch import MODEL, Start
from asyncrl_cli.runs.checkpoints import Checkpoint, newest_sound
from asyncrl_cli.runs.directory import RunDirectory, RunError
from asyncrl_cli.spec.sections import ExperimentSpec


def prepare(run: RunDirectory, spec: ExperimentSpec, step: int | None, note: str, without_journal: bool) -> Start:
    """How this run goes on; ``step`` names a checkpoint, ``note`` is for the journal.

    Raises ``RunError`` when there is nothing to do or the checkpoint is damaged, ``JournalError`` when the journal is.
    """
    checkpoint = newest_sound(run, step) if step != 0 else None
    journal = run.path / FILE
    if without_journal:
        return _without_journal(run, journal, checkpoint, note)
    if journal.is_file():
        check(journal)
        taken = _steps_taken(journal)
        if taken >= spec.stop.steps and (run.path / MODEL / "config.json").is_file() and run.state.phase == "finished":
            raise RunError(
                f"the run has done its {taken} steps",
                place=run.run_id,
                mend=f"To train on, say how far: asyncrl resume {run.run_id} --steps {2 * taken}",
            )
        if taken > spec.stop.steps:
            raise RunError(
                f"the run has taken {taken} steps already, more than {spec.stop.steps}",
                place=run.run_id,
                mend="Say a later step",
            )
        _forget_untrained_metrics(run, journal)
    elif checkpoint is not None:
        raise RunError(
            "the run has checkpoints, and its journal is gone",
            place=str(journal),
            mend=f"Bring it back, or go on from step {checkpoint.step} alone: "
            f"asyncrl resume {run.run_id} --without-journal",
        )
    return Start("resume", note, checkpoint)


def _without_journal(run: RunDirectory, journal: Path, checkpoint: Checkpoint | None, note: str) -> Start:
    for path in sorted(run.path.glob(f"{FILE}*")):
        number = 1
        while (aside := path.with_name(f"damaged-{number}-{path.name}")).exists():
            number += 1
        path.rename(aside)
    base = checkpoint.state() if checkpoint else None
    run.forget_after("metrics.jsonl", checkpoint.step if checkpoint else 0)
    return Start("resume", ", ".join(filter(None, ["without the old journal", note])), checkpoint, base)


def _steps_taken(journal: Path) -> int:
    connection = open_for_reading(journal)
    try:
        (steps,) = connection.execute("SELECT coalesce(max(step) + 1, 0) FROM batches").fetchone()
    finally:
        connection.close()
    return int(steps)


def _forget_untrained_metrics(run: RunDirectory, journal: Path) -> None:
    """Drop what metrics.jsonl says of steps that the journal does not know as trained: they are reported again."""
    connection = open_for_reading(journal)
    try:
        query = "SELECT coalesce(max(step) + 1, 0) FROM batches WHERE trained_at IS NOT NULL"
        (trained,) = connection.execute(query).fetchone()
    finally:
        connection.close()
    run.forget_after("metrics.jsonl", int(trained))
