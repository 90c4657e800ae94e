"""The memory of gVisor's processes on this machine, looked at while a command runs.

The supervisor adds up what processes inside have. Files, pipes and sockets without number, too, take memory of gVisor
itself, which cannot be seen from inside.
"""

from __future__ import annotations

import asyncio

from asyncrl_cli.tasks.sandbox.confine import MEGABYTE
from asyncrl_cli.tasks.shell_sandbox import processes
from asyncrl_cli.tasks.shell_sandbox.settings import SandboxSettings

LOOK_S = 1.0
"""Seconds between two looks; most commands end before the first."""
OWN_MB = 256
"""What gVisor may take beside the memory and the files of its processes."""


async def exceeded(pid: int, settings: SandboxSettings) -> None:
    """Return when the descendants of a process have more memory than a sandbox may have."""
    most = (settings.memory_mb + 2 * settings.disk_mb + OWN_MB) * MEGABYTE
    used = 0
    while used <= most:
        await asyncio.sleep(LOOK_S)
        used = await asyncio.to_thread(_used, pid)


def _used(pid: int) -> int:
    return sum(map(processes.proportional, processes.below(pid)))
