"""Measure and end the other processes of a sandbox, from the first process of its namespace, which sees no others."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_SOCKETS = 2000
"""Limit on the sockets of all processes, because their buffers count as no process's memory."""
MAX_FILES = 100_000
"""Limit on the files and folders of a file system: each takes about a KiB in addition to its content."""
MIN_FREE_PAGES = 16
"""A disk with fewer free pages is full."""


def exceeded(memory: int, max_processes: int) -> bytes:
    """Return the limit that has been reached, or b"": ``memory`` in bytes, ``max_processes`` processes and threads."""
    resident, threads, pids = 0, 0, []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"):
        try:
            fields = _file(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        except OSError:  # it has just ended
            continue
        pids.append(pid)
        threads += int(fields[17])
        resident += int(fields[21]) * PAGE
    if threads >= max_processes:
        return b"processes"
    # Resident sizes count shared pages several times. Proportional sizes do not, but cost more, so they come second.
    if resident > memory and sum(map(_proportional, pids)) > memory:
        return b"memory"
    if int(_file("/proc/net/sockstat").split(maxsplit=3)[2]) > MAX_SOCKETS:
        return b"memory"
    return b""


def full(disks: Sequence[str]) -> bool:
    """True if one of the file systems has no space left, or too many files."""
    file_systems = map(os.statvfs, disks)
    return any(disk.f_bavail < MIN_FREE_PAGES or disk.f_files - disk.f_ffree > MAX_FILES for disk in file_systems)


def reap(pid: int) -> int | None:
    """Reap all children that have ended. Returns the exit status of ``pid`` if it is one of them."""
    status = None
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            if child[0] == pid:
                code = os.waitstatus_to_exitcode(child[1])
                status = code if code >= 0 else 128 - code
    except ChildProcessError:
        pass
    return status


def end_all() -> None:
    """Kill all processes and wait until they are gone."""
    with suppress(ChildProcessError):
        while True:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)


def _proportional(pid: int) -> int:
    """Bytes of a process; a page that n processes share counts 1/n."""
    try:
        for line in _file(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # it hides its memory, or has ended
        return int(_file(f"/proc/{pid}/statm").split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def _file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
