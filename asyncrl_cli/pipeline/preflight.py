"""What this machine must have before a local run starts: memory and disk. Checked first, since it takes no time."""

from __future__ import annotations

import shutil
from pathlib import Path

from asyncrl_cli.runs.directory import RunError
from asyncrl_cli.spec.sections import ExperimentSpec

GIB = 2**30
ENGINE_BYTES = int(1.2 * GIB)
"""A vLLM CPU engine without weights and cache: frontend and engine core, measured."""
RANK_BYTES = int(0.6 * GIB)
"""A trainer rank with its imports, without weights."""
OTHER_BYTES = int(1.2 * GIB)
"""Driver, Ray's own processes, scorer and MLflow."""
LEAST_DISK_BYTES = 1 * GIB


def check_machine(spec: ExperimentSpec) -> None:
    """Raises ``RunError`` when a local run surely does not fit into memory, or the disk is nearly full."""
    if spec.cluster.address is None:
        needed = spec.rollout.engines * ENGINE_BYTES + spec.trainer.ranks * RANK_BYTES + OTHER_BYTES
        available = available_memory()
        if available < needed:
            raise RunError(
                f"the run needs about {needed / GIB:.1f} GiB of memory before its weights, and "
                f"{available / GIB:.1f} GiB are available",
                place="this machine",
                mend="Stop other programs, or lower rollout.engines or trainer.ranks",
            )
    free = shutil.disk_usage(existing(spec.runs_dir.absolute())).free
    if free < LEAST_DISK_BYTES:
        raise RunError(
            f"{free / GIB:.1f} GiB are free on its disk, less than {LEAST_DISK_BYTES / GIB:.0f} GiB",
            place=str(spec.runs_dir),
            mend="Remove old runs, or set runs_dir to another disk",
        )


def available_memory() -> int:
    """Bytes that new programs can have, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    while not path.exists():
        path = path.parent
    return path
