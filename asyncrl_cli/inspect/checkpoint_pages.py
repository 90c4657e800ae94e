"""The pages of `asyncrl checkpoint`: a list with damage and the reasons to keep each, and one checkpoint's files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError
from rich.filesize import decimal

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import Page, duration, moment, table
from asyncrl_cli.inspect.resolved import resolved_spec
from asyncrl_cli.journal import events
from asyncrl_cli.journal.progress import accuracies
from asyncrl_cli.journal.schema import FILE, reading
from asyncrl_cli.runs.checkpoints import Checkpoint, complete_checkpoints, keep_reasons, verify
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import CheckpointSpec

NOT_KEPT = "nothing: `prune` removes it"


@dataclass(frozen=True, slots=True)
class Stored:
    """A run's checkpoints, with facts from its journal, by step."""

    run: RunDirectory
    checkpoints: tuple[Checkpoint, ...]
    accuracies: Mapping[int, float]
    """Greedy held-out accuracies."""
    saved: Mapping[int, float]
    """Unix times from the journal: files of a copied folder have the time of the copy."""
    uploads: Mapping[int, str]
    """`done`, or why the last upload failed. A checkpoint without an upload has no entry."""
    retention: CheckpointSpec
    """The retention rules of the run's spec."""

    def reasons(self, retention: CheckpointSpec) -> dict[int, tuple[str, ...]]:
        """Return the reasons to keep each checkpoint, by step. ``prune`` removes checkpoints without a reason."""
        return keep_reasons([checkpoint.step for checkpoint in self.checkpoints], self.accuracies, retention)

    def row(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return a checkpoint's facts for JSON. Checks only the names and sizes of its files, which is fast."""
        return {
            "step": checkpoint.step,
            "folder": str(checkpoint.folder.absolute()),
            "bytes": checkpoint.size,
            "saved_at": self.saved.get(checkpoint.step, checkpoint.saved_at),
            "damages": [asdict(damage) for damage in verify(checkpoint, contents=False)],
            "accuracy": self.accuracies.get(checkpoint.step),
            "upload": self.uploads.get(checkpoint.step),
            "kept": list(self.reasons(self.retention)[checkpoint.step]),
        }


def stored(run: RunDirectory) -> Stored:
    """Read a run's checkpoints. The journal may be missing.

    Raises ``RunError`` for an invalid spec, and ``JournalError`` for a damaged journal.
    """
    greedy: dict[int, float] = {}
    saved: dict[int, float] = {}
    uploads: dict[int, str] = {}
    if (run.path / FILE).is_file():
        with reading(run.path / FILE) as connection:
            greedy = accuracies(connection)
            for one in events.Checkpoint.read(connection):
                saved[one.after_step] = one.at
                if one.uploaded_at is not None or one.upload_failure:
                    uploads[one.after_step] = one.upload_failure or "done"
    try:  # read only this section: others may need environment variables that are set only where the run trains
        retention = CheckpointSpec.model_validate(resolved_spec(run)["checkpoints"])
    except (KeyError, ValidationError):
        raise RunError(
            "the resolved spec has no valid `checkpoints`",
            location=str(run.path / "spec.yaml"),
            hint="restore the file",
        ) from None
    return Stored(
        run,
        checkpoints=tuple(complete_checkpoints(run.path / "checkpoints")),
        accuracies=greedy,
        saved=saved,
        uploads=uploads,
        retention=retention,
    )


def list_page(found: Stored) -> Page:
    rows = [found.row(checkpoint) for checkpoint in found.checkpoints]
    document = {"run": found.run.run_id, "checkpoints": rows}
    if not rows:
        return Page(document, [f"{found.run.run_id} has no checkpoint yet"])
    now = time.time()
    cells = [
        (
            str(row["step"]),
            decimal(row["bytes"]),
            duration(now - row["saved_at"]),
            f"{len(row['damages'])} damaged" if row["damages"] else "ok",
            "-" if row["accuracy"] is None else f"{row['accuracy']:.3f}",
            *(() if found.retention.upload is None else ({None: "-", "done": "done"}.get(row["upload"], "failed"),)),
            ", ".join(row["kept"]) or NOT_KEPT,
        )
        for row in rows
    ]
    header = ["step", "size", "age", "files", "greedy", "kept because"]
    if found.retention.upload is not None:
        header.insert(5, "upload")
    return Page(document, table(header, cells, left=(3, *range(5, len(header)))))


def show_page(found: Stored, checkpoint: Checkpoint) -> Page:
    row = found.row(checkpoint)
    trainer = checkpoint.trainer()
    files = {
        path.relative_to(checkpoint.folder).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.folder.rglob("*"))
        if path.is_file()
    }
    lines = [
        f"run         {found.run.run_id}",
        f"step        {checkpoint.step}",
        f"folder      {row['folder']}",
        f"saved       {moment(row['saved_at'])}, {duration(time.time() - row['saved_at'])} ago",
        f"trainer     {counted(trainer.ranks, 'rank')}, ZeRO-{trainer.zero_stage}, {trainer.dtype}",
        f"greedy      {'not evaluated' if row['accuracy'] is None else format(row['accuracy'], '.3f')}",
        f"kept        {', '.join(row['kept']) or NOT_KEPT}",
        f"upload      {row['upload'] or 'none'}",
        f"files       {'; '.join(map(str, verify(checkpoint, contents=False))) or 'ok'}",
        "",
        *table(("file", "size"), [(name, decimal(size)) for name, size in files.items()]),
    ]
    return Page({"run": found.run.run_id, **row, "trainer": asdict(trainer), "files": files}, lines)
