"""All descendants of a process, including those that left its session, its group and their parents (Linux).

Invariant: below a living process that calls ``adopt_orphans`` are all processes that it, or one of them, has started:
an orphan is adopted by its nearest ancestor that adopts. So when such a process is killed, its remaining descendants
are found below the next one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_TIMEOUT_S = 10.0
"""Seconds that the kernel may take to end processes after SIGKILL."""
PACKAGES = Path(__file__).parents[2]
NOT_STARTED = 127
"""Exit status when the command cannot be started, as in a shell."""


class Process(NamedTuple):
    """One process. ``ended``: it has ended, and its parent has not waited for it yet."""

    pid: int
    parent: int
    ended: bool


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent with the pid ``parent`` is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """This process becomes the parent of every descendant that loses its own parent."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(roots: Iterable[int], excluded: Iterable[int] = ()) -> list[Process]:
    """The descendants of all ``roots``, without the roots, and without ``excluded`` and their descendants."""
    # Not psutil: it reads all of /proc once per root and per excluded process, and the keeper starts without it.
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                # pid (name) state parent ..., and a name may hold anything.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                process = Process(int(entry.name), int(fields[1]), fields[0] in "ZX")
                children.setdefault(process.parent, []).append(process)
    found, remaining, without = [], list(roots), frozenset(excluded)
    while remaining:
        nearer = [process for process in children.pop(remaining.pop(), ()) if process.pid not in without]
        found += nearer
        remaining += (process.pid for process in nearer)
    return found


def kill_descendants(excluded: Iterable[int] = ()) -> None:
    """Kill the descendants of this process, except ``excluded`` and their descendants, until none is left."""
    excluded = frozenset(excluded)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        found = descendants([os.getpid()], excluded)
        reap(process.pid for process in found if process.ended and process.parent == os.getpid())
        if all(process.ended for process in found):
            return
        for process in found:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.005)


def reap(pids: Iterable[int]) -> None:
    """Reap children that have ended: they leave the process table."""
    for pid in pids:
        with suppress(OSError):
            os.waitpid(pid, os.WNOHANG)


# -- a keeper: a process between an owner and a command, which ensures that no process of the command outlives it


def with_keeper(words: Sequence[str]) -> list[str]:
    """The words that start a command with a keeper, which ends with this process."""
    start = f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); from {__name__} import main; main()"
    return [sys.executable, "-I", "-S", "-c", start, str(os.getpid()), *words]


def main() -> None:
    """The keeper: ``OWNER WORD...`` are its arguments.

    It adopts every orphan of the command, also orphans with another session and environment. When the command
    ends, or the keeper is sent SIGTERM, it kills them all, and ends as the command did.
    """
    owner, words = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, _end)
    die_with(owner)
    adopt_orphans()
    status = NOT_STARTED
    try:
        status = subprocess.Popen(words, start_new_session=True).wait()
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finally:  # also when a SIGTERM that came just before raises: from then on it is ignored
            kill_descendants()
    if status < 0:  # the same signal: the owner sees how it ended
        with suppress(OSError):  # SIGKILL has no handler; Python ignores SIGPIPE
            signal.signal(-status, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _end(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)
