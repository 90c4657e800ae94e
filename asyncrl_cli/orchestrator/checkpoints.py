"""Saves and prunes checkpoints during a run.

Ranks copy their states between two steps, and write the copies with checksums while they train (decision 0009). The
driver's slow work runs on a thread: its event loop never waits for a disk, so generation continues.
``runs.checkpoints`` describes the format.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from asyncrl_cli.core.files import rename
from asyncrl_cli.orchestrator.trainers import TrainerRanks
from asyncrl_cli.runs.checkpoints import (
    RUN_FILE,
    Cancelled,
    Check,
    Checkpoint,
    TrainerLayout,
    checkpoint_name,
    complete_checkpoints,
    keep_reasons,
    remove,
    remove_unread,
    seal,
    sweep,
    verify,
)
from asyncrl_cli.spec.sections import ExperimentSpec

T = TypeVar("T")


class Checkpoints:
    """Writes checkpoints to one folder, and deletes those that no retention rule keeps. Call one method at a time."""

    def __init__(self, folder: Path, trainers: TrainerRanks, spec: ExperimentSpec) -> None:
        trainer = spec.trainer
        self._folder = folder
        self._trainers = trainers
        self._layout = TrainerLayout(
            trainer.ranks, zero_stage=trainer.zero_stage, dtype=trainer.dtype, expert_parallel=trainer.expert_parallel
        )
        self._retention = spec.checkpoints

    async def copy(self, step: int) -> bool:
        """Have the ranks copy their states for ``write``. Call it between two steps; afterwards training may continue.
        Returns False, without a copy, if the step has an undamaged checkpoint."""
        final, unfinished = self._places(step)

        def is_saved(check: Check) -> bool:
            if final.folder.is_dir():
                if not verify(final, check=check):
                    return True
                remove(final)
            check()  # the next call may have begun its files
            sweep(self._folder)
            unfinished.mkdir(parents=True)
            return False

        if await _in_thread(is_saved):
            return False
        await self._trainers.save_checkpoint(unfinished)
        return True

    async def write(self, step: int, state: Mapping[str, Any]) -> Checkpoint:
        """Complete the checkpoint that ``copy`` began; it is on disk when this returns.

        ``state``: the driver's state for a resume, as JSON values; the trainer's layout is added as ``trainer``. If the
        call is cancelled, its thread ends within moments and no checkpoint appears.
        """
        final, unfinished = self._places(step)
        digests = await self._trainers.write_checkpoint(unfinished)

        def complete(check: Check) -> None:
            (unfinished / RUN_FILE).write_text(json.dumps({**state, "trainer": asdict(self._layout)}) + "\n")
            seal(unfinished, check, digests)
            check()
            # Last, after every byte is synced: a folder with this name is a complete checkpoint (decision 0009).
            rename(unfinished, final.folder)

        await _in_thread(complete)
        return final

    def _places(self, step: int) -> tuple[Checkpoint, Path]:
        name = checkpoint_name(step)
        return Checkpoint(self._folder / name, step), self._folder / f".saving-{name}"

    def prune(
        self, accuracies: Mapping[int, float], awaited: Collection[int] = (), uploading: Collection[int] = ()
    ) -> list[int]:
        """Delete checkpoints without a reason (see ``keep_reasons``) that no other process reads; returns their steps.
        May block."""
        checkpoints = complete_checkpoints(self._folder)
        reasons = keep_reasons(
            [checkpoint.step for checkpoint in checkpoints],
            accuracies=accuracies,
            keep=self._retention,
            awaited=awaited,
            uploading=uploading,
        )
        return [
            checkpoint.step for checkpoint in checkpoints if not reasons[checkpoint.step] and remove_unread(checkpoint)
        ]


async def _in_thread(blocking_work: Callable[[Check], T]) -> T:
    """The result of ``blocking_work`` in a thread. If this call is cancelled, the check that ``blocking_work`` gets
    raises ``Cancelled``: a thread cannot be stopped from outside."""
    cancelled = Event()

    def check() -> None:
        if cancelled.is_set():
            raise Cancelled

    try:
        return await asyncio.to_thread(blocking_work, check)
    except asyncio.CancelledError:
        cancelled.set()
        raise
