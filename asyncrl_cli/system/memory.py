"""The memory that this host has for new programs."""

from __future__ import annotations

import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""The control group of this container (version 2)."""


def available_memory() -> int:
    """Bytes available to new programs, estimated by the kernel; in a container at most the rest of its limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        # The kernel drops the file cache when it needs the memory.
        return free if limit == "max" else min(free, max(0, int(limit) - int(used) + int(cached[1] if cached else 0)))
    except (OSError, ValueError):
        return free
