"""The ready task ``unit_tests``: Python code in the response, judged by tests in the row, in a sandbox.

A row's ``tests`` are code, or a list of codes, that use the names of the response's code. A code with functions named
``test_...`` counts as one test for each of them, any other as one test; a test passes if it raises nothing.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.tasks.base import RewardResult
from asyncrl_cli.tasks.matching import texts_field
from asyncrl_cli.tasks.sandbox import Check, Limits, Wanted, choose, run

FENCE = "```"


class UnitTests:
    """The task ``unit_tests``."""

    def __init__(
        self,
        field: str = "tests",
        partial: bool = False,
        time_s: float = 10.0,
        memory_mb: int = 1024,
        disk_mb: int = 64,
        processes: int = 32,
        sandbox: Wanted = "auto",
    ) -> None:
        """Args:
            field: of the row, with the tests.
            partial: the reward is the share of tests that pass; else 1.0 if all do.
            time_s: seconds for the code and all its tests; keep it below ``task.reward_timeout_s``.
            memory_mb: MiB of its memory (address space).
            disk_mb: MiB of its files.
            processes: threads that it may have at a time; it is one process.
            sandbox: ``auto`` is the strongest that works here, of ``bubblewrap`` and ``seccomp``; either name demands
                that one; ``none`` runs the code with all that this user may do.

        Raises ``ValueError`` for impossible values, and ``TaskError`` when the sandbox does not work here.
        """
        numbers = {"time_s": time_s, "memory_mb": memory_mb, "disk_mb": disk_mb, "processes": processes}
        for name, number in numbers.items():
            if not number > 0:
                raise ValueError(f"{name} must be more than 0, not {number}")
        self._field = field
        self._partial = partial
        self._limits = Limits(time_s, memory_mb, disk_mb, processes)
        self._sandbox = choose(sandbox)
        if self._sandbox != "bubblewrap":
            print(f"unit_tests: the code of the model runs in the sandbox `{self._sandbox}`", file=sys.stderr)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``MissingField`` for a row without tests, and ``SyntaxError`` for its impossible ones."""
        self._tests(prompt)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> RewardResult:
        """1.0 if all tests pass (or the share that does), with the metric ``tests_passed``, a share.

        Raises ``MissingField``, ``SyntaxError`` for a row's impossible tests, and ``SandboxError`` when no sandbox can
        be started.
        """
        tests = self._tests(prompt)
        code = code_in(response)
        passed = run(code, tests, self._limits, self._sandbox) if _compiles(code) else [False]
        share = sum(passed) / len(passed)
        return RewardResult(share if self._partial else float(all(passed)), {"tests_passed": share})

    def _tests(self, prompt: Prompt) -> list[Check]:
        return [test for code in texts_field(prompt, self._field) for test in tests_in(code)]


def code_in(response: str) -> str:
    """The last fenced block of a response, or all of it."""
    last, block = response, None
    for line in response.split("\n"):
        marker = line.strip(" \t\r")
        if block is None:
            if marker.startswith(FENCE) and "`" not in marker[len(FENCE) :]:
                block = ""
        elif marker == FENCE:
            last, block = block, None
        else:
            block += f"{line}\n"
    return last


def tests_in(code: str) -> list[Check]:
    """The tests of one code. Raises ``SyntaxError``."""
    functions = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    named = [name for name in functions if name.startswith("test_")]
    return [Check(code, name) for name in named] or [Check(code)]


def _compiles(code: str) -> Any:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
