"""Finds all descendants of a process, even if they left its session or group or lost their parents (Linux).

Invariant: all descendants of a living process that called ``adopt_orphans`` are below it in the process tree, because
the kernel gives an orphan to its nearest ancestor that adopts. If that process is killed, its descendants are found
below the next ancestor that adopts.

One exception: container engines' processes for an episode's container (``is_engine``) are left alone. The container
ends by itself with its supervisor (``sandbox/container.py``), and only a living engine removes it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_TIMEOUT_S = 10.0
"""Seconds that the kernel may take to end processes after SIGKILL."""
ENGINE_PROCESSES = ("podman", "docker", "conmon")
CONTAINER_NAME = re.compile(rb"asyncrl-sandbox-[0-9a-f]{16}")
"""Names of episodes' containers."""


class ProcessEntry(NamedTuple):
    """One process. ``is_zombie``: it has ended, and its parent has not waited for it yet."""

    pid: int
    parent: int
    is_zombie: bool


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent with the pid ``parent`` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its parent."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(roots: Iterable[int], excluded: Iterable[int] = ()) -> list[ProcessEntry]:
    """The descendants of all ``roots``, without the roots, and without ``excluded`` and their descendants.

    Processes of episodes' containers are not among them.
    """
    # Not psutil: it reads all of /proc for each root and excluded process, and a supervisor starts faster without it.
    children: dict[int, list[ProcessEntry]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has just ended
                # The line is "pid (name) state parent ...", and the name may hold parentheses and spaces.
                name, _, line_end = (entry / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
                if name in ENGINE_PROCESSES and is_engine((entry / "cmdline").read_bytes()):
                    continue
                fields = line_end.split()
                process = ProcessEntry(int(entry.name), int(fields[1]), fields[0] in "ZX")
                children.setdefault(process.parent, []).append(process)
    result, parents, excluded_pids = [], list(roots), frozenset(excluded)
    while parents:
        direct_children = [process for process in children.pop(parents.pop(), ()) if process.pid not in excluded_pids]
        result += direct_children
        parents += (process.pid for process in direct_children)
    return result


def is_engine(command_line: bytes) -> bool:
    """True for the process of a container engine that starts, holds or removes an episode's container."""
    return any(CONTAINER_NAME.fullmatch(word) for word in command_line.split(b"\0"))


def kill_descendants(excluded: Iterable[int] = ()) -> None:
    """Kill the descendants of this process, except ``excluded`` and their descendants, until none is left."""
    excluded = frozenset(excluded)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        processes = descendants([os.getpid()], excluded)
        reap(process.pid for process in processes if process.is_zombie and process.parent == os.getpid())
        if all(process.is_zombie for process in processes):
            return
        for process in processes:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.005)


def reap(pids: Iterable[int]) -> None:
    """Remove ended children from the process table."""
    for pid in pids:
        with suppress(OSError):
            os.waitpid(pid, os.WNOHANG)
