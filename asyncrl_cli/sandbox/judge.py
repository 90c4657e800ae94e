"""Run and test unreviewed Python code (decision 0021).

    run -> a sandbox with the tests  <- questions ->  a sandbox with the code

The two processes share only two pipes (``exchange``). The code sees no test, expected value or report, only the names
and arguments of the calls that it must make. The kinds of sandbox:

- ``bubblewrap``: bwrap starts the process in new namespaces without a network, in an empty file system with Python and
  its packages, read-only, and one writable folder in memory. seccomp refuses every system call that ``filters`` does
  not list.
- ``none``: nothing is confined, but the limits on time, memory, the size of a file, and threads hold.

Invariants: when ``run`` returns, no process of the code lives, and its files are gone. A sandbox that does not start
raises ``SandboxError``; it never counts as wrong code.
"""

from __future__ import annotations

import base64
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

__all__ = ["Check", "Limits", "SandboxError", "SandboxKind", "run"]

SandboxKind = Literal["bubblewrap", "none"]
START_S = 30.0
"""Seconds that a start may take on a busy machine."""
LIMIT_CHECK_S = 0.05
"""Seconds between two checks of the number of threads and the size of files."""
OPEN_FILES = 64
"""Descriptors that the code may open. Their pipes hold up to 2 MiB, in addition to the memory limit."""
MAX_FILES = 10_000
"""Files and folders that the code may make."""


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


def run(code: str, tests: Sequence[Check], limits: Limits, sandbox_kind: SandboxKind) -> list[bool]:
    """Run ``code``, then each test; True for a test that ends without an exception before a limit is reached.

    Raises ``SandboxError`` if the sandbox does not start.
    """
    report, report_writer = os.pipe()
    (question_reader, question_writer), (answer_reader, answer_writer) = os.pipe(), os.pipe()
    code_order: dict[str, Any] = {"reading": question_reader, "writing": answer_writer}
    tests_order: dict[str, Any] = {"reading": answer_reader, "writing": question_writer, "report": report_writer}
    tests_order |= {"code": code, "tests": [[test.code, test.call] for test in tests]}
    processes: list[_Process] = []
    with ExitStack() as stack:
        stack.callback(os.close, report)
        try:
            for module, order in ((judged_code, code_order), (judging_tests, tests_order)):
                folder = ""
                if sandbox_kind != "bubblewrap":  # bwrap makes one in memory
                    temporary = tempfile.TemporaryDirectory(prefix="asyncrl-sandbox-", ignore_cleanup_errors=True)
                    folder = stack.enter_context(temporary)
                process = _Process(module.__name__, order, sandbox_kind=sandbox_kind, limits=limits, folder=folder)
                # The stack ends the process before it removes the folder: a living process could still write there.
                stack.callback(process.close)
                stack.callback(process.end)
                processes.append(process)
        except OSError as error:
            raise SandboxError(f"the sandbox cannot be started: {error}") from error
        finally:
            for descriptor in (report_writer, question_reader, question_writer, answer_reader, answer_writer):
                os.close(descriptor)
        results = _watch(report, processes=processes, limits=limits, tests=len(tests))
        if results is None:
            errors = [process.failure() for process in processes]
            reason = "; ".join(filter(None, errors)) or f"no answer within {START_S:.0f} s"
            raise SandboxError(f"the {sandbox_kind} sandbox did not start: {reason}")
    return [results[index : index + 1] == judging_tests.PASSED for index in range(len(tests))]


def _watch(report: int, processes: Sequence[_Process], limits: Limits, tests: int) -> bytes | None:
    """Read the report until the tests' process ends, its time is over or a process exceeds a limit; None if the report
    does not begin."""
    received, deadline, limits_checked_s = b"", time.monotonic() + START_S, 0.0
    readable = select.poll()  # select.select refuses descriptors from 1024 on
    readable.register(report, select.POLLIN)
    while (remaining_s := deadline - (now_s := time.monotonic())) > 0 and len(received) <= tests:
        if received and now_s - limits_checked_s >= LIMIT_CHECK_S:
            limits_checked_s = now_s
            if any(process.exceeds_limits() for process in processes):
                break
        if not readable.poll(1000 * min(remaining_s, LIMIT_CHECK_S)):
            continue
        if not (chunk := os.read(report, 2**16)):
            break
        if not received:
            deadline = time.monotonic() + limits.time_s
        received += chunk
    return received.removeprefix(judging_tests.STARTED) if received.startswith(judging_tests.STARTED) else None


class _Process(bubblewrap.Process):
    """The process of the code or of the tests."""

    def __init__(
        self, module: str, order: dict[str, Any], *, sandbox_kind: SandboxKind, limits: Limits, folder: str
    ) -> None:
        """``folder``: the writable folder, "" with bubblewrap."""
        in_memory = sandbox_kind == "bubblewrap"
        uid = 0 if sandbox_kind == "none" else bubblewrap.unused_uid()
        folder = folder or "/tmp"
        confinement = confine.Confinement(
            limits={
                "RLIMIT_FSIZE": limits.disk_mb * confine.MEGABYTE,
                "RLIMIT_CPU": int(limits.time_s) + 1,
                "RLIMIT_NOFILE": OPEN_FILES,
            },
            uid=uid,
            processes=limits.processes if uid else 0,  # the kernel would also count an ordinary user's other processes
            filter="" if sandbox_kind == "none" else base64.b64encode(filters.for_code()).decode(),
        )
        inherited_descriptors = [order[name] for name in ("reading", "writing", "report") if name in order]
        order |= {"confinement": asdict(confinement), "folder": folder, "packages": [*bubblewrap.packages()]}
        order["memory"] = limits.memory_mb * confine.MEGABYTE
        self._limits = limits
        stdin = bubblewrap.file_of(json.dumps(order).encode())
        try:
            super().__init__(
                bubblewrap.python(
                    module, bubblewrap.PACKAGE_ROOT_INSIDE if in_memory else str(bubblewrap.PACKAGE_ROOT)
                ),
                bubblewrap.for_code(limits.disk_mb) if in_memory else (),
                inherited_descriptors=inherited_descriptors,
                environment={
                    "HOME": folder,
                    "TMPDIR": folder,
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
                return files.f_files - files.f_ffree > MAX_FILES
        return False
