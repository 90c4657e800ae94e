"""Run and test unreviewed Python code (decision 0021).

    run -> a sandbox with the tests  <- questions ->  a sandbox with the code

The two processes share only two pipes (``exchange``). The code sees no test, expected value or report, only the names
and arguments of the calls that it must make. The kinds of sandbox:

- ``bubblewrap``: bwrap starts the process in new namespaces without a network, in an empty file system with Python and
  its packages, read-only, and one writable folder in memory.
- ``seccomp``: for machines without namespaces. Landlock closes the file system except the same files and a folder.
- ``none``: nothing is confined, but the limits on time, memory, files and threads hold.

In the first two, seccomp refuses every system call that ``filters`` does not list.

Invariants: when ``run`` returns, no process of the code lives, and its files are gone. A sandbox that does not start
raises ``SandboxError``; it never counts as wrong code.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import select
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.sandbox import bubblewrap, confine, filters, judged_code, judging_tests
from asyncrl_cli.sandbox.bubblewrap import SandboxError

__all__ = ["Check", "Kind", "Limits", "SandboxError", "run"]

Kind = Literal["bubblewrap", "seccomp", "none"]
START_S = 30.0
"""Seconds that a start may take on a busy machine."""
LOOK_S = 0.05
"""Seconds between two checks of the number of threads and the size of files."""
OPEN_FILES = 64
"""Descriptors that the code may open. Their pipes hold up to 2 MiB, in addition to the memory limit."""
MOST_FILES = 10_000
"""Files and folders that the code may make."""
CAP_SYS_PTRACE = 19


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the code: seconds (wall clock, and CPU), MiB of memory, MiB of files, and threads."""

    time_s: float = 10.0
    memory_mb: int = 1024
    disk_mb: int = 64
    processes: int = 32


@dataclass(frozen=True, slots=True)
class Check:
    """A test: code that runs with the solution's names, and the name of a function in it to call, if any."""

    code: str
    call: str | None = None


def run(code: str, tests: Sequence[Check], limits: Limits, kind: Kind) -> list[bool]:
    """Run ``code``, then each test; True for a test that ends without an exception before a limit is reached.

    Raises ``SandboxError`` if the sandbox does not start.
    """
    report, their_report = os.pipe()
    (asked, asking), (answered, answering) = os.pipe(), os.pipe()
    for_code: dict[str, Any] = {"reading": asked, "writing": answering}
    for_tests: dict[str, Any] = {"reading": answered, "writing": asking, "report": their_report}
    for_tests |= {"code": code, "tests": [[test.code, test.call] for test in tests]}
    processes: list[_Process] = []
    with ExitStack() as stack:
        stack.callback(os.close, report)
        try:
            for module, order in ((judged_code, for_code), (judging_tests, for_tests)):
                folder = ""
                if kind != "bubblewrap":  # bwrap makes one in memory
                    temporary = tempfile.TemporaryDirectory(prefix="asyncrl-sandbox-", ignore_cleanup_errors=True)
                    folder = stack.enter_context(temporary)
                process = _Process(module.__name__, order, kind=kind, limits=limits, folder=folder)
                # The stack ends the process before it removes the folder: a living process could still write there.
                stack.callback(process.close)
                stack.callback(process.end)
                processes.append(process)
        except OSError as error:
            raise SandboxError(f"the sandbox cannot be started: {error}") from error
        finally:
            for descriptor in (their_report, asked, asking, answered, answering):
                os.close(descriptor)
        results = _watch(report, processes=processes, limits=limits, tests=len(tests))
        if results is None:
            errors = [process.failure() for process in processes]
            reason = "; ".join(filter(None, errors)) or f"no answer within {START_S:.0f} s"
            raise SandboxError(f"the {kind} sandbox did not start: {reason}")
    return [results[index : index + 1] == judging_tests.PASSED for index in range(len(tests))]


def _watch(report: int, processes: Sequence[_Process], limits: Limits, tests: int) -> bytes | None:
    """Read the report until the tests' process ends, its time is over or a process exceeds a limit; None if the report
    does not begin."""
    received, deadline, looked = b"", time.monotonic() + START_S, 0.0
    readable = select.poll()  # select.select refuses descriptors from 1024 on
    readable.register(report, select.POLLIN)
    while (left := deadline - (now := time.monotonic())) > 0 and len(received) <= tests:
        if received and now - looked >= LOOK_S:
            looked = now
            if any(process.exceeds_limits() for process in processes):
                break
        if not readable.poll(1000 * min(left, LOOK_S)):
            continue
        if not (piece := os.read(report, 2**16)):
            break
        if not received:
            deadline = time.monotonic() + limits.time_s
        received += piece
    return received.removeprefix(judging_tests.BEGAN) if received.startswith(judging_tests.BEGAN) else None


class _Process(bubblewrap.Process):
    """The process of the code or of the tests."""

    def __init__(self, module: str, order: dict[str, Any], *, kind: Kind, limits: Limits, folder: str) -> None:
        """``folder``: the writable folder, "" with bubblewrap."""
        in_memory = kind == "bubblewrap"
        uid = 0 if kind == "none" else bubblewrap.unused_uid()
        view = confine.View(
            readable=[*bubblewrap.readable()],
            packages=[*bubblewrap.packages()],
            folder="/tmp" if in_memory else folder,
            removes=not uid or _sees_other_users(),
        )
        confinement = confine.Confinement(
            limits={
                "RLIMIT_FSIZE": limits.disk_mb * confine.MEGABYTE,
                "RLIMIT_CPU": int(limits.time_s) + 1,
                "RLIMIT_NOFILE": OPEN_FILES,
            },
            uid=uid,
            processes=limits.processes if uid else 0,  # the kernel would also count an ordinary user's other processes
            filter="" if kind == "none" else base64.b64encode(filters.for_code()).decode(),
        )
        passed = [order[name] for name in ("reading", "writing", "report") if name in order]
        order |= {"confinement": asdict(confinement), "view": asdict(view), "landlock": kind == "seccomp"}
        order["memory"] = limits.memory_mb * confine.MEGABYTE
        if uid and not in_memory:
            os.chown(folder, uid, uid)
        self._folder = os.path.realpath(folder) if kind == "seccomp" else None
        self._hidden: set[int] = set()
        self._limits = limits
        stdin = bubblewrap.file_of(json.dumps(order).encode())
        try:
            super().__init__(
                bubblewrap.python(module, bubblewrap.OWN if in_memory else str(bubblewrap.PACKAGES)),
                bubblewrap.for_code(limits.disk_mb) if in_memory else (),
                passed=passed,
                environment={
                    "HOME": view.folder,
                    "TMPDIR": view.folder,
                    "PATH": "/usr/bin:/bin",
                    "LANG": "C.UTF-8",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                stdin=stdin,
            )
        finally:
            os.close(stdin)

    def failure(self) -> str:
        """The last line that the process printed before it was ready, or how it ended."""
        status = self._process.poll()
        return self.last_line() or ("" if status is None else f"exit status {status}")

    def exceeds_limits(self) -> bool:
        """True if the process has too many threads, or too many or too large files in its folder."""
        with suppress(OSError):  # it has just ended
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children")  # the namespace's first process is bwrap's
            pids = [self.pid, *children.read_text().split()] if children.exists() else [self.pid]
            if sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids) - len(pids) + 1 > self._limits.processes:
                return True
        if self._in_namespaces:  # the size of its file system is limited, but empty files use further memory
            with suppress(OSError):
                files = os.statvfs(f"/proc/{self.pid}/root/tmp")
                return files.f_files - files.f_ffree > MOST_FILES
        return self._folder is not None and self._uses_too_much(self._folder)

    def _uses_too_much(self, folder: str) -> bool:
        """True if the files in its folder, and removed files that it still has open, are too many or too large.

        The size of a file that is removed and closed but still mapped is unknown. So a file in this state at two checks
        counts as too large.
        """
        names = [os.path.join(folder, name) for name in os.listdir(folder)]
        mapped: set[int] = set()
        with suppress(OSError):
            names += [f"/proc/{self.pid}/fd/{name}" for name in os.listdir(f"/proc/{self.pid}/fd")]
            mapped = _removed_and_mapped(self.pid, folder)
        found: dict[int, int] = {}
        for name in names:
            with suppress(OSError):  # it has just been removed or closed
                entry = os.stat(name, follow_symlinks=not name.startswith(folder))
                if name.startswith(folder) or entry.st_nlink == 0:
                    found[entry.st_ino] = entry.st_blocks * 512
        before, self._hidden = self._hidden, mapped - found.keys()
        too_large = sum(found.values()) > self._limits.disk_mb * confine.MEGABYTE
        return too_large or len(found) > MOST_FILES or bool(before & self._hidden)


def _removed_and_mapped(pid: int, folder: str) -> set[int]:
    """Inodes of a folder's removed files that a process has mapped."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
        if len(fields) == 6 and fields[5].startswith(folder) and fields[5].endswith(" (deleted)"):
            found.add(int(fields[4]))
    return found


@functools.cache
def _sees_other_users() -> bool:
    """True if this process may read the open files of another user's process."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_PTRACE & 1)
