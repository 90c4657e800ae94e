"""Finds out why vLLM's core process has ended, from its exit code and the engine's log.

A killed core writes no cause. A core that fails by itself writes a traceback, or ends with a signal such as SIGSEGV.
"""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.system.remote import ActorDied

CORE_FAILED = re.compile(r"Failed core proc\(s\): (\{.*?\})")
"""vLLM's error text with its processes' exit codes."""
TRACEBACK_END = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)$")
"""The last line of a traceback in a log."""
CONSEQUENCE = re.compile(r"EngineDeadError|EngineCore encountered an issue")
"""vLLM's errors that only say that the core has ended."""
EXIT_S = 2.0
"""Seconds that a core may take to exit after it has reported its failure."""
END_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
"""Signals with which other processes end a process."""


class LogSince:
    """The part of a log that a process and its children write from now on."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._start = path.stat().st_size if path is not None and path.is_file() else 0

    def root_cause(self) -> str | None:
        """Return the error that was written last; None if there is none."""
        if self.path is None:
            return None
        with self.path.open("rb") as file:
            file.seek(self._start)
            lines = file.read().decode(errors="replace").splitlines()
        causes = [match[1] for line in lines if (match := TRACEBACK_END.search(line)) and not CORE_FAILED.search(line)]
        return next((cause for cause in reversed(causes) if not CONSEQUENCE.search(cause)), None)


def start_failure(text: str, log: LogSince) -> RunError | None:
    """Translate vLLM's error ``text`` during a start; None if it is not about the core process.

    The exit code alone is not enough: vLLM may read it before it is set.
    """
    failed = CORE_FAILED.search(text)
    if failed is None:
        return None
    codes: dict[str, Any] = ast.literal_eval(failed[1])
    killed = any(isinstance(code, int) and code < 0 for code in codes.values())
    cause = log.root_cause()
    if killed or (log.path is not None and cause is None):
        return ActorDied(f"vLLM's core process was killed ({failed[1]})", location="engine")
    return RunError(
        f"vLLM does not start: {cause or text}",
        location="rollout",
        hint="change the setting that it names"
        + (f"; {log.path} has vLLM's traceback" if log.path is not None else ""),
    )


def death(children: Iterable[BaseProcess], log: LogSince) -> ActorDied:
    """Return why a started engine died. ``children``: vLLM's processes; waits up to ``EXIT_S`` for each to exit."""
    died, signals = "vLLM's core process has died", set()
    for child in children:
        child.join(EXIT_S)
        if child.exitcode is not None and child.exitcode < 0:
            signals.add(signal.Signals(-child.exitcode))
    if signal.SIGKILL in signals:
        return ActorDied(f"{died}: it was killed", location="engine")
    # vLLM sends SIGTERM to a core that has reported its error.
    cause = log.root_cause() or ", ".join(sorted(signal_number.name for signal_number in signals - END_SIGNALS))
    return ActorDied(f"{died}: {cause}" if cause else died, location="engine")
