"""The page of `asyncrl checkpoint list`: damage, and the reasons to keep each checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError
from rich.filesize import decimal

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.inspect.pages import Page, duration, table
from asyncrl_cli.inspect.resolved import resolved_spec
from asyncrl_cli.journal import history
from asyncrl_cli.journal.schema import FILE, reading
from asyncrl_cli.runs.checkpoints import Checkpoint, complete_checkpoints, keep_reasons, verify
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import CheckpointSpec

NOT_KEPT = "nothing: `prune` removes it"


@dataclass(frozen=True, slots=True)
class Stored:
    """A run's checkpoints, with facts from its journal, by step.

    Args:
        accuracies: greedy held-out accuracies.
        recorded: the journal's rows. Files of a copied folder have the time of the copy.
        retention: the retention rules of the run's spec.
    """

    run: RunDirectory
    checkpoints: tuple[Checkpoint, ...]
    accuracies: Mapping[int, float]
    recorded: Mapping[int, history.CheckpointRecord]
    retention: CheckpointSpec

    def reasons(self, retention: CheckpointSpec) -> dict[int, tuple[str, ...]]:
        """Return the reasons to keep each checkpoint, by step. ``prune`` removes checkpoints without a reason."""
        return keep_reasons([checkpoint.step for checkpoint in self.checkpoints], self.accuracies, retention)

    def row(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return a checkpoint's facts for JSON. Checks only the names and sizes of its files, which is fast."""
        record = self.recorded.get(checkpoint.step)
        return {
            "step": checkpoint.step,
            "folder": str(checkpoint.folder.absolute()),
            "bytes": checkpoint.size,
            "saved_at": record.at if record else checkpoint.saved_at,
            "damages": [asdict(damage) for damage in verify(checkpoint, contents=False)],
            "accuracy": self.accuracies.get(checkpoint.step),
            "kept": list(self.reasons(self.retention)[checkpoint.step]),
            # `done`, or why the last upload failed.
            "upload": record and (record.upload_failure or (record.uploaded_at and "done")),
        }


def stored(run: RunDirectory) -> Stored:
    """Read a run's checkpoints. The journal may be missing.

    Raises ``RunError`` for an invalid spec, and ``JournalError`` for a damaged journal.
    """
    greedy: dict[int, float] = {}
    recorded: dict[int, history.CheckpointRecord] = {}
    if (run.path / FILE).is_file():
        with reading(run.path / FILE) as connection:
            greedy = history.greedy_accuracies(connection)
            recorded = {record.after_step: record for record in history.checkpoints(connection)}
    try:  # read only this section: others may need environment variables that are set only where the run trains
        retention = CheckpointSpec.model_validate(resolved_spec(run)["checkpoints"])
    except (KeyError, ValidationError):
        raise RunError(
            "the resolved spec has no valid `checkpoints`",
            location=str(run.path / "spec.yaml"),
            hint="restore the file",
        ) from None
    return Stored(run, tuple(complete_checkpoints(run.path / "checkpoints")), greedy, recorded, retention)


def list_page(run_checkpoints: Stored) -> Page:
    rows = [run_checkpoints.row(checkpoint) for checkpoint in run_checkpoints.checkpoints]
    document = {"run": run_checkpoints.run.run_id, "checkpoints": rows}
    if not rows:
        return Page(document, [f"{run_checkpoints.run.run_id} has no checkpoint yet"])
    cells = [
        (
            str(row["step"]),
            decimal(row["bytes"]),
            duration(time.time() - row["saved_at"]),
            f"{len(row['damages'])} damaged" if row["damages"] else "ok",
            "-" if row["accuracy"] is None else f"{row['accuracy']:.3f}",
            {None: "-", "done": "done"}.get(row["upload"], "failed"),
            ", ".join(row["kept"]) or NOT_KEPT,
        )
        for row in rows
    ]
    header = ("step", "size", "age", "files", "greedy", "upload", "kept because")
    return Page(document, table(header, cells, left_aligned=(3, 5, 6)))
