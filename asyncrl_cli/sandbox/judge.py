"""Running and testing unreviewed Python code.

    run -> a sandbox with the tests  <- questions ->  a sandbox with the code

The two processes share nothing but two pipes: the code sees no test, no expected value and no report, only the names
and arguments of the calls that it is asked to make (``calls``). ``process`` has the kinds of sandbox.

Invariants: when ``run`` returns, no process of the code lives, and its files are gone. A sandbox that did not start
raises ``SandboxError``; it never counts as wrong code.
"""

from __future__ import annotations

import os
import select
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from asyncrl_cli.sandbox.bubblewrap import SandboxError
from asyncrl_cli.sandbox.process import Kind, Limits, SandboxProcess
from asyncrl_cli.sandbox.program import BEGAN, PASSED

__all__ = ["Check", "Kind", "Limits", "SandboxError", "run"]

START_S = 30.0
"""Seconds that starting may take, on a busy machine."""
LOOK_S = 0.05
"""Seconds between two checks of the number of threads and of the size of files."""


@dataclass(frozen=True, slots=True)
class Check:
    """Code to run with the solution's names, and the name of a function of it to call (or none)."""

    code: str
    call: str | None = None


def run(code: str, tests: Sequence[Check], limits: Limits, kind: Kind) -> list[bool]:
    """For each test, whether it passes after ``code``: ends without an exception, before a limit is reached.

    Raises ``SandboxError`` when the sandbox does not start.
    """
    report, their_report = os.pipe()
    (asked, asking), (answered, answering) = os.pipe(), os.pipe()
    test_order = {"report": their_report, "code": code, "tests": [[test.code, test.call] for test in tests]}
    processes: list[SandboxProcess] = []
    with ExitStack() as stack:
        stack.callback(os.close, report)
        try:
            for reading, writing, order in ((asked, answering, {"report": None}), (answered, asking, test_order)):
                folder = ""
                if kind != "bubblewrap":  # which has one in memory
                    temporary = tempfile.TemporaryDirectory(prefix="asyncrl-sandbox-", ignore_cleanup_errors=True)
                    folder = stack.enter_context(temporary)
                process = SandboxProcess(kind, limits, folder, reading, writing, order)
                # Ended before its folder is removed, in the reverse order: a living process could still write to it.
                stack.callback(process.end)
                processes.append(process)
        finally:
            for descriptor in (their_report, asked, asking, answered, answering):
                os.close(descriptor)
        results = _watch(report, processes, limits, len(tests))
        if results is None:
            errors = [process.last_line() for process in processes]
            reason = "; ".join(filter(None, errors)) or f"no answer within {START_S:.0f} s"
            raise SandboxError(f"the {kind} sandbox did not start: {reason}")
    return [results[index : index + 1] == PASSED for index in range(len(tests))]


def _watch(report: int, processes: Sequence[SandboxProcess], limits: Limits, tests: int) -> bytes | None:
    """What the process with the tests reports until it has ended, its time is over or a process exceeds a limit; None
    when it does not begin."""
    received, deadline, looked = b"", time.monotonic() + START_S, 0.0
    readable = select.poll()  # select.select takes no descriptor from 1024 on
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
    return received.removeprefix(BEGAN) if received.startswith(BEGAN) else None
