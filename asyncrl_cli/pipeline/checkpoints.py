"""Checkpoints: the trainer's shards and the conductor's place in the run, as one unit.

    checkpoints/step-000040/
      state/        DeepSpeed's shards, one per rank
      run.json      ledger, data loader, prompts admitted and not trained

A checkpoint is written to a hidden folder, synced, and renamed; a folder called ``step-…`` is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.buffer.ledger import Ledger, LedgerError
from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.pipeline.fleet import Fleet
from asyncrl_cli.runs.directory import RunDirectory, RunError

PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The conductor's part of a checkpoint."""

    folder: Path
    ledger: Ledger
    loader: dict[str, int]
    prompts: tuple[Prompt, ...]


class Checkpoints:
    """Writes checkpoints of one run and keeps the last few."""

    def __init__(self, run: RunDirectory, fleet: Fleet, keep_last: int) -> None:
        self._folder = run.path / "checkpoints"
        self._fleet = fleet
        self._keep_last = keep_last

    async def save(self, ledger: Ledger, loader: dict[str, int], prompts: list[Prompt]) -> Path:
        """Write the checkpoint of the ledger's step; the trainer must be between two steps."""
        name = f"{PREFIX}{ledger.step:06d}"
        final, aside = self._folder / name, self._folder / f".{name}"
        if final.is_dir():
            return final
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        await self._fleet.train("save_checkpoint", str(aside))
        state = {"ledger": ledger.snapshot(), "loader": loader, "prompts": [asdict(prompt) for prompt in prompts]}
        (aside / "run.json").write_text(json.dumps(state))
        _sync_tree(aside)
        os.rename(aside, final)
        _sync_path(self._folder)
        for old in complete_checkpoints(self._folder)[: -self._keep_last]:
            # Hidden first: half of a checkpoint must not look like one if we die in between.
            doomed = old.with_name(f".{old.name}")
            os.rename(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return final


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if (path / "run.json").is_file())


def load_newest(run: RunDirectory, total_steps: int) -> SavedRun:
    """The newest checkpoint's place in the run; groups that were under way start again from their prompts.

    Raises ``RunError`` when there is none.
    """
    found = complete_checkpoints(run.path / "checkpoints")
    if not found:
        raise RunError(
            "the run has no checkpoint to resume from",
            place=run.run_id,
            mend="Start it anew, and set checkpoints.every so that the next one has",
        )
    try:
        state: dict[str, Any] = json.loads((found[-1] / "run.json").read_text())
        ledger = Ledger.restore(state["ledger"] | {"total_steps": total_steps})
    except (OSError, ValueError, TypeError, KeyError, LedgerError) as error:
        raise RunError(
            f"the checkpoint is damaged: {type(error).__name__}: {error}",
            place=str(found[-1]),
            mend="Remove this folder to resume from the checkpoint before it",
        ) from error
    for group_id in (*ledger.running, *ledger.finished):
        ledger.reject(group_id, "interrupted")
    prompts = tuple(
        Prompt(row["uid"], row["content"] if isinstance(row["content"], str) else tuple(row["content"]), row["fields"])
        for row in state["prompts"]
    )
    return SavedRun(found[-1], ledger, state["loader"], prompts)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync_path(path)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
