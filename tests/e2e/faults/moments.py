"""When to inject a fault.

A moment is a generator. It waits until the moment is near and yields once; the caller then takes a snapshot of the
journal and chooses a process. After the yield it waits for the exact moment. Some moments are random; the others aim at
operations that must be atomic: saving a checkpoint, a publish, a commit, a resume, the restart of another part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Protocol

AIM_S = 0.0005
"""Seconds between two checks for the moment."""


class Run(Protocol):
    """What a moment needs to know of a ``DisturbedRun``."""

    random: Random
    steps: int

    @property
    def folder(self) -> Path: ...
    @property
    def journal(self) -> Path: ...
    def trained(self) -> int: ...
    def taken(self) -> int: ...
    def until(self, condition: Callable[[], Any], what: str, poll_s: float = ...) -> Any: ...
    def pause(self, seconds: float) -> None: ...


def settled(run: Run) -> Iterator[None]:
    """Some time after the run has begun to train."""
    _steps_on(run, 3)
    run.pause(run.random.uniform(0, 2))
    yield


def soon(run: Run) -> Iterator[None]:
    """Soon after the last fault, whatever its process does then: it restarts, recovers or catches up."""
    run.pause(run.random.uniform(0, 10))
    yield


def resume(run: Run) -> Iterator[None]:
    """After the start of a new driver, at any time until about its first trained step."""
    run.pause(run.random.uniform(0, 25))
    yield


def save(run: Run) -> Iterator[None]:
    """A checkpoint is being written."""
    _steps_on(run, 1)
    yield
    run.until(lambda: list((run.folder / "checkpoints").glob(".saving-*")), "a checkpoint to be saved", AIM_S)
    run.pause(run.random.uniform(0, 0.12))


def publish(run: Run) -> Iterator[None]:
    """A batch was taken, and about as much time has passed as its training takes: its version is being published."""
    _steps_on(run, 3)
    rows = (run.folder / "metrics.jsonl").read_text().splitlines()[-5:]
    train_s = median(json.loads(row)["time/train_s"] for row in rows)
    yield
    taken = run.taken()
    run.until(lambda: run.taken() > taken, "a batch", AIM_S)
    run.pause(train_s * run.random.uniform(0.9, 1.5))


def around(run: Run) -> Iterator[None]:
    """At any time in the two steps around a publish."""
    _steps_on(run, 1)
    yield
    first = run.trained()
    started = time.monotonic()
    run.until(lambda: run.trained() > first, "a step", AIM_S)
    run.pause(run.random.uniform(0, 2) * (time.monotonic() - started))


def warming(run: Run) -> Iterator[None]:
    """During the supervised steps before reinforcement learning."""
    metrics = run.folder / "metrics.jsonl"
    run.until(lambda: metrics.is_file() and '"warm_start/loss"' in metrics.read_text(), "a supervised step")
    yield
    run.pause(run.random.uniform(0, 3))


def commit(run: Run) -> Iterator[None]:
    """The journal is being written."""
    _steps_on(run, 1)
    run.pause(run.random.uniform(0, 1))
    yield
    log = run.journal.with_name(f"{run.journal.name}-wal")

    def written() -> int:
        return log.stat().st_mtime_ns if log.exists() else 0

    before = written()
    run.until(lambda: written() != before, "a commit", AIM_S)


def last(run: Run) -> Iterator[None]:
    """All steps are trained: only the last evaluation, the last checkpoint and the final model are missing."""
    run.until(lambda: run.trained() == run.steps, "the last step")
    yield
    run.pause(run.random.uniform(0, 1.5))


MOMENTS: dict[str, Callable[[Any], Iterator[None]]] = {
    moment.__name__: moment for moment in (settled, soon, resume, save, publish, around, warming, commit, last)
}


def _steps_on(run: Run, steps: int) -> None:
    """Wait until the run has trained this many more steps."""
    wanted = min(run.trained() + steps, run.steps)
    run.until(lambda: run.trained() >= wanted, f"step {wanted}")
