"""All processes that come from one, also those that left its session, its group and their parents (Linux).

Invariant: below a living process that ``adopt_orphans`` are all processes that it, or one of them, has started: an
orphan goes to its nearest ancestor that adopts. So when such a process is killed, what it leaves is found below the
next one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 10.0
"""Seconds that the kernel gets to end processes after SIGKILL."""


class Process(NamedTuple):
    """One process. ``ended``: nobody has waited for it yet."""

    pid: int
    parent: int
    session: int
    ended: bool


def adopt_orphans() -> None:
    """This process becomes the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def below(roots: Iterable[int], spared: Iterable[int] = ()) -> list[Process]:
    """What comes from any of ``roots``, without these, without ``spared`` and without what comes from ``spared``."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                # pid (name) state parent group session ..., and a name may hold anything.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                process = Process(int(entry.name), int(fields[1]), int(fields[3]), fields[0] in "ZX")
                children.setdefault(process.parent, []).append(process)
    found, looking, without = [], list(roots), frozenset(spared)
    while looking:
        nearer = [process for process in children.pop(looking.pop(), ()) if process.pid not in without]
        found += nearer
        looking += (process.pid for process in nearer)
    return found


def kill_below(spared: Iterable[int] = ()) -> None:
    """Kill what comes from this process, until none of it is left but what is ``spared``."""
    spared = frozenset(spared)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = below([os.getpid()], spared)
        see_off(process.pid for process in found if process.ended and process.parent == os.getpid())
        if all(process.ended for process in found):
            return
        for process in found:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.005)


def see_off(pids: Iterable[int]) -> None:
    """Wait for children that have ended, so that they leave the table of processes."""
    for pid in pids:
        with suppress(OSError):
            os.waitpid(pid, os.WNOHANG)
