"""The memory that this host has for new programs."""

from __future__ import annotations

import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""The control group of this container (version 2)."""


def available_memory() -> int:
    """Bytes available to new programs, as the kernel estimates; in a container at most what its limit leaves."""
    import psutil

    free = int(psutil.virtual_memory().available)
    return free if (rest := _rest_of_limit(CGROUP)) is None else min(free, rest)


def _rest_of_limit(folder: Path) -> int | None:
    """Bytes that a control group may still use, with the file cache counted as free; None without a limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
        return None if limit == "max" else max(0, int(limit) - int(used) + int(cached[1] if cached else 0))
    except (OSError, ValueError):
        return None
