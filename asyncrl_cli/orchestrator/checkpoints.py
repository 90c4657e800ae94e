"""Saves and prunes checkpoints during a run.

Ranks write their shards and compute checksums between two steps; all other slow work runs on a thread. The driver's
event loop never waits for a disk, so generation continues. ``runs.checkpoints`` describes the format.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict
from threading import Event
from typing import Any

from asyncrl_cli.core.files import rename
from asyncrl_cli.orchestrator.trainers import TrainerRanks
from asyncrl_cli.runs.checkpoints import (
    RUN_FILE,
    Cancelled,
    Checkpoint,
    Digest,
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

    async def save(self, step: int, state: Mapping[str, Any]) -> Checkpoint:
        """Write the checkpoint of ``step``; it is on disk when this returns. The trainer must be between two steps.

        ``state`` is what the driver needs to resume, serializable as JSON; the trainer's layout is added as
        ``trainer``. A step is saved once: a second call returns the existing checkpoint, unless it is damaged. When the
        call is cancelled, its thread ends within moments and no checkpoint appears.
        """
        final = Checkpoint(self._folder / checkpoint_name(step), step)
        unfinished = self._folder / f".saving-{final.folder.name}"
        cancelled = Event()

        def check() -> None:
            if cancelled.is_set():
                raise Cancelled

        def is_saved() -> bool:
            if final.folder.is_dir():
                if not verify(final, check=check):
                    return True
                remove(final)
            sweep(self._folder)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            return False

        def complete(written: Mapping[str, Digest]) -> None:
            (unfinished / RUN_FILE).write_text(json.dumps({**state, "trainer": asdict(self._layout)}) + "\n")
            seal(unfinished, check, written)
            check()
            # Last, when every byte is synced: the name makes it a checkpoint (decision 0011).
            rename(unfinished, final.folder)

        try:
            if not await asyncio.to_thread(is_saved):
                await asyncio.to_thread(complete, await self._trainers.save_checkpoint(unfinished))
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return final

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
