"""Running Python code that nobody has read, and judging it by tests.

    run -> a sandbox with the tests  <- questions ->  a sandbox with the code

The two processes share nothing but two pipes: the code sees no test, no expected value and no report, only the names
and arguments that it is asked with (``sandbox.calls``). ``sandbox.process`` says what a sandbox is.

Invariants: when ``run`` returns, no process of the code's lives, and its files are gone. A sandbox that did not start
raises ``SandboxError``; it never counts as wrong code.
"""

from __future__ import annotations

import functools
import os
import select
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, get_args

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.tasks.sandbox.process import Box, Kind, Limits, SandboxError, missing
from asyncrl_cli.tasks.sandbox.program import BEGAN, PASSED

__all__ = ["Check", "Kind", "Limits", "SandboxError", "Wanted", "choose", "run"]

Wanted = Literal["auto", "bubblewrap", "seccomp", "none"]
START_S = 30.0
"""Seconds that starting may take, on a busy machine."""
LOOK_S = 0.05
"""Seconds between two looks at threads and files."""


@dataclass(frozen=True, slots=True)
class Check:
    """Code to run with the solution's names, and the name of a function of it to call (or none)."""

    code: str
    call: str | None = None


@functools.cache
def choose(wanted: Wanted = "auto") -> Kind:
    """The kind of sandbox that works here: the one that is ``wanted``, or the strongest. It is tried.

    Raises ``TaskError`` if it does not work.
    """
    if wanted not in get_args(Wanted):
        raise TaskError(
            f"there is no sandbox {wanted!r}",
            location="task.options.sandbox",
            hint=f"choose one of {', '.join(get_args(Wanted))}",
        )
    kinds: tuple[Kind, ...] = ("bubblewrap", "seccomp") if wanted == "auto" else (wanted,)
    reasons = []
    for kind in kinds:
        if not (reason := missing(kind)):
            try:
                run("", [Check("")], Limits(), kind)
                return kind
            except SandboxError as error:
                reason = str(error)
        reasons.append(f"{kind}: {reason}")
    raise TaskError(
        f"no sandbox for the code of the model ({'; '.join(reasons)})",
        hint="install bubblewrap (Debian, Ubuntu: apt install bubblewrap libseccomp2), or allow user namespaces; "
        "with the option `sandbox: none` the code runs without a sandbox, with all that your user may do",
    )


def run(code: str, tests: Sequence[Check], limits: Limits, kind: Kind | None = None) -> list[bool]:
    """Which tests pass after ``code``: those that end without an exception, before a limit is reached.

    ``kind`` None is what ``choose`` finds. Raises ``SandboxError`` when the sandbox does not start, and ``TaskError``
    where there is none.
    """
    kind = kind or choose()
    report, theirs = os.pipe()
    (asked, asking), (answered, answering) = os.pipe(), os.pipe()
    boxes: list[Box] = []
    with ExitStack() as stack:
        stack.callback(os.close, report)
        try:
            folders = [""] * 2
            if kind != "bubblewrap":
                folders = [
                    stack.enter_context(
                        tempfile.TemporaryDirectory(prefix="asyncrl-sandbox-", ignore_cleanup_errors=True)
                    )
                    for _ in range(2)
                ]
            judging = {"report": theirs, "code": code, "tests": [[test.code, test.call] for test in tests]}
            for folder, reading, writing, order in (
                (folders[0], asked, answering, {"report": None}),
                (folders[1], answered, asking, judging),
            ):
                box = Box(kind, limits, folder, reading, writing, order)
                stack.callback(box.end)
                boxes.append(box)
        finally:
            for descriptor in (theirs, asked, asking, answered, answering):
                os.close(descriptor)
        told = _watch(report, boxes, limits, len(tests))
        if told is None:
            said = "; ".join(filter(None, (box.said() for box in boxes))) or f"no answer within {START_S:.0f} s"
            raise SandboxError(f"the {kind} sandbox did not start: {said}")
    return [told[index : index + 1] == PASSED for index in range(len(tests))]


def _watch(report: int, boxes: Sequence[Box], limits: Limits, tests: int) -> bytes | None:
    """What the tests' process reports until it has ended, its time is over or a sandbox exceeds a limit; None when it
    does not begin."""
    told, deadline, looked = b"", time.monotonic() + START_S, 0.0
    while (left := deadline - (now := time.monotonic())) > 0 and len(told) <= tests:
        if told and now - looked >= LOOK_S:
            looked = now
            if any(box.exceeds() for box in boxes):
                break
        if not select.select([report], [], [], min(left, LOOK_S))[0]:
            continue
        if not (piece := os.read(report, 2**16)):
            break
        if not told:
            deadline = time.monotonic() + limits.time_s
        told += piece
    return told.removeprefix(BEGAN) if told.startswith(BEGAN) else None
