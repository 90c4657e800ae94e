"""Saves and prunes checkpoints during a run.

Ranks copy their states between two steps, and write the copies with their checksums while they train (decision 0106).
All other slow work runs on a thread. The driver's event loop never waits for a disk, so generation continues.
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
    seal,
    sweep,
    verify,
)
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec

T = TypeVar("T")


class Checkpoints:
    """Writes the checkpoints of one run, and deletes those that the spec does not keep. Call one method at a time."""

    def __init__(self, run: RunDirectory, trainers: TrainerRanks, spec: ExperimentSpec) -> None:
        trainer = spec.trainer
        self._folder = run.path / "checkpoints"
        self._trainers = trainers
        self._layout = TrainerLayout(
            trainer.ranks, zero_stage=trainer.zero_stage, dtype=trainer.dtype, expert_parallel=trainer.expert_parallel
        )
        self._retention = spec.checkpoints

    async def copy(self, step: int, in_background: bool) -> None:
        """Have the ranks copy what the checkpoint of ``step`` needs, for ``write``. The trainer must be between two
        steps, and may continue when this returns. Unless ``in_background``, the ranks write their files now.

        A step is saved once: if it has an undamaged checkpoint, nothing is done.
        """
        final, unfinished = self._places(step)

        def is_saved(check: Check) -> bool:
            if final.folder.is_dir():
                if not verify(final, check=check):
                    return True
                remove(final)
            sweep(self._folder)
            unfinished.mkdir(parents=True)
            return False

        if not await _in_thread(is_saved):
            await self._trainers.save_checkpoint(unfinished, in_background)

    async def write(self, step: int, state: Mapping[str, Any]) -> Checkpoint:
        """Complete the checkpoint that ``copy`` began; it is on disk when this returns.

        ``state`` is what the driver needs to resume, serializable as JSON; the trainer's layout is added as
        ``trainer``. When the call is cancelled, its thread ends within moments and no checkpoint appears.
        """
        final, unfinished = self._places(step)
        if not unfinished.is_dir():  # the step has a checkpoint
            return final
        written = await self._trainers.write_checkpoint(unfinished)

        def complete(check: Check) -> None:
            (unfinished / RUN_FILE).write_text(json.dumps({**state, "trainer": asdict(self._layout)}) + "\n")
            seal(unfinished, check, written)
            check()
            # Last, when every byte is synced: the name makes it a checkpoint (decision 0011).
            rename(unfinished, final.folder)

        await _in_thread(complete)
        return final

    def _places(self, step: int) -> tuple[Checkpoint, Path]:
        """The checkpoint of a step, and the folder where it is written."""
        name = checkpoint_name(step)
        return Checkpoint(self._folder / name, step), self._folder / f".saving-{name}"

    def prune(
        self, accuracies: Mapping[int, float], awaited: Collection[int] = (), uploading: Collection[int] = ()
    ) -> list[int]:
        """Delete the checkpoints that the spec does not keep; returns their steps. May block.

        ``accuracies``: greedy held-out accuracy by step; ``awaited``: steps with a running evaluation;
        ``uploading``: steps with a running upload.
        """
        found = complete_checkpoints(self._folder)
        reasons = keep_reasons(
            [checkpoint.step for checkpoint in found],
            accuracies=accuracies,
            keep=self._retention,
            awaited=awaited,
            uploading=uploading,
        )
        removed = [checkpoint for checkpoint in found if not reasons[checkpoint.step]]
        for checkpoint in removed:
            remove(checkpoint)
        return [checkpoint.step for checkpoint in removed]


async def _in_thread(work: Callable[[Check], T]) -> T:
    """The result of ``work``, which is given a check that raises ``Cancelled`` once this call is cancelled."""
    cancelled = Event()

    def check() -> None:
        if cancelled.is_set():
            raise Cancelled

    try:
        return await asyncio.to_thread(work, check)
    except asyncio.CancelledError:
        cancelled.set()
        raise
