"""Running Python code that nobody has read, with limits on all that it could use up.

    run -> launcher (takes the network and most of the file system away) -> runner (runs the code and its tests)

Where the kernel lets a user make namespaces, the code has no network, sees no processes but its own, and can write
nowhere but in a file system of its own in memory; ``launcher`` has the details. Where it does not (in most containers),
audit hooks of Python refuse sockets, programs and writes elsewhere, which stops accidents and not
ingenuity. Everywhere, the code may read what its user may read.

Invariant: when ``run`` returns, no process of the code's lives, and its files are gone.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl_cli.runs.offspring import below
from asyncrl_cli.tasks import sandbox_launcher

LOOK_S = 0.1
"""Seconds between two looks at how many processes there are."""
END_S = 10.0
"""Seconds that the kernel gets to end processes after SIGKILL."""
PACKAGES = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the code may use: seconds (wall clock, and of each process's CPU), MiB of memory of each process, MiB of
    files, and processes (threads count)."""

    time_s: float = 10.0
    memory_mb: int = 1024
    disk_mb: int = 64
    processes: int = 32


@dataclass(frozen=True, slots=True)
class Check:
    """Code to run after the solution, and the name of a function of it to call (or none)."""

    code: str
    call: str | None = None


def run(code: str, tests: Sequence[Check], limits: Limits) -> list[bool]:
    """Which tests pass after ``code``: those that end without an exception, before a limit is reached.

    Raises ``OSError`` when no process can be started.
    """
    proof = secrets.token_hex(16)  # the code may write what it likes into the pipe, but not this without effort
    order = {
        "code": code,
        "tests": [[test.code, test.call] for test in tests],
        "proof": proof,
        "limits": asdict(limits),
        "python": sys.executable,
    }
    report, theirs = os.pipe()
    with (
        os.fdopen(report, "rb") as reading,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryDirectory(prefix="asyncrl-sandbox-", ignore_cleanup_errors=True) as folder,
    ):
        stdin.write(json.dumps(order).encode())
        stdin.seek(0)
        start = f"import sys; sys.path[:0] = [{str(PACKAGES)!r}]; from {sandbox_launcher.__name__} import main; main()"
        try:
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", start, str(os.getpid()), str(theirs), folder],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs],
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        try:
            _watch(launcher, limits)
        finally:
            _end(launcher)
        os.set_blocking(report, False)
        lines = (reading.read(2**16) or b"").decode(errors="replace").splitlines()
    passed = {line.removeprefix(proof) for line in lines if line.startswith(proof)}
    return [str(index) in passed for index in range(len(tests))]


def _watch(launcher: subprocess.Popen[bytes], limits: Limits) -> None:
    """Wait until the launcher ends, its time is over or it has too many processes."""
    deadline = time.monotonic() + limits.time_s + sandbox_launcher.START_S
    ended = os.pidfd_open(launcher.pid)
    try:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([ended], [], [], min(left, LOOK_S))[0]:
                return
            # The launcher has two processes of its own. The kernel's own limit does not hold for root.
            if len(below([launcher.pid])) > limits.processes + 2:
                return
    finally:
        os.close(ended)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and all that came from it. It adopts orphans, so it goes last."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        left = [process.pid for process in below([launcher.pid]) if not process.ended]
        if not left:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    launcher.kill()
    launcher.wait(END_S)
