"""Checkpoints as pages: which there are, what is wrong with them, and why each is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.filesize import decimal

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.inspect.pages import Page, duration, moment, table
from asyncrl_cli.runs.checkpoints import Checkpoint, Damage, verify
from asyncrl_cli.runs.directory import RunDirectory

NOT_KEPT = "nothing: `prune` removes it"


def list_page(
    run: RunDirectory,
    checkpoints: Sequence[Checkpoint],
    reasons: Mapping[int, Sequence[str]],
    accuracies: Mapping[int, float],
    saved: Mapping[int, float],
) -> Page:
    """All checkpoints of a run; ``saved``: unix times by step, from the journal. Only names and sizes of their files
    are looked at."""
    document = [_document(checkpoint, reasons, accuracies, saved) for checkpoint in checkpoints]
    now = time.time()
    rows = [
        (
            str(row["step"]),
            decimal(row["bytes"]),
            duration(now - row["saved_at"]),
            f"{len(row['damages'])} damaged" if row["damages"] else "ok",
            "-" if row["accuracy"] is None else f"{row['accuracy']:.3f}",
            ", ".join(row["kept"]) or NOT_KEPT,
        )
        for row in document
    ]
    lines = table(("step", "size", "age", "files", "greedy", "kept because"), rows, left=(3, 5))
    return Page(
        {"run": run.run_id, "checkpoints": document}, lines if rows else [f"{run.run_id} has no checkpoint yet"]
    )


def show_page(
    run: RunDirectory,
    checkpoint: Checkpoint,
    reasons: Mapping[int, Sequence[str]],
    accuracies: Mapping[int, float],
    saved: Mapping[int, float],
) -> Page:
    """One checkpoint with its files. Only names and sizes of them are looked at."""
    row = _document(checkpoint, reasons, accuracies, saved)
    trainer = checkpoint.trainer()
    files = {
        path.relative_to(checkpoint.folder).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.folder.rglob("*"))
        if path.is_file()
    }
    lines = [
        f"run         {run.run_id}",
        f"step        {checkpoint.step}",
        f"folder      {row['folder']}",
        f"saved       {moment(row['saved_at'])}, {duration(time.time() - row['saved_at'])} ago",
        f"trainer     {counted(trainer.ranks, 'rank')}, ZeRO-{trainer.zero_stage}, {trainer.dtype}",
        f"greedy      {'not evaluated' if row['accuracy'] is None else format(row['accuracy'], '.3f')}",
        f"kept        {', '.join(row['kept']) or NOT_KEPT}",
        f"files       {damage_text(verify(checkpoint, contents=False)) or 'ok'}",
        "",
        *table(("file", "size"), [(name, decimal(size)) for name, size in files.items()]),
    ]
    return Page({"run": run.run_id, **row, "trainer": asdict(trainer), "files": files}, lines)


def damage_text(damages: Sequence[Damage]) -> str:
    """What is damaged, in one line; empty when nothing is."""
    return "; ".join(map(str, damages))


def _document(
    checkpoint: Checkpoint,
    reasons: Mapping[int, Sequence[str]],
    accuracies: Mapping[int, float],
    saved: Mapping[int, float],
) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "folder": str(checkpoint.folder.absolute()),
        "bytes": checkpoint.size,
        # The journal's time: a copied folder has the time of its copy.
        "saved_at": saved.get(checkpoint.step, checkpoint.saved_at),
        "damages": [asdict(damage) for damage in verify(checkpoint, contents=False)],
        "accuracy": accuracies.get(checkpoint.step),
        "kept": list(reasons[checkpoint.step]),
    }
