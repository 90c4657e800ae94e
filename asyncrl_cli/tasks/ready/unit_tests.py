"""The ready task ``unit_tests``: the row's tests judge Python code in the response, in a sandbox.

A row's ``tests`` are a piece of code, or a list of pieces, that uses names of the response's code. Each function named
``test_...``, and each such method of a test class, is a test. Code without any is one test. A test passes if it raises
nothing.
"""

from __future__ import annotations

import ast
import sys
import time
from dataclasses import replace
from importlib.machinery import PathFinder

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.sandbox.bubblewrap import packages
from asyncrl_cli.sandbox.judge import Check, Limits, SandboxKind, run
from asyncrl_cli.sandbox.trial import check_judge
from asyncrl_cli.tasks.base import RewardResult
from asyncrl_cli.tasks.ready.matching import texts_field

FENCE = "```"
LANGUAGES = ("", "python", "python3", "py")
"""Labels of fenced blocks with Python code."""
ENTRY_POINT = "entry_point"
"""The row's field with the name of the function to pass to ``check(candidate)``, as in HumanEval."""
ROWS_TRIED, TRY_S = 50, 10.0
"""When the data is opened, the tests of so many rows run without any code, for so many seconds in total at most."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class UnusableTests(ValueError):
    """The tests cannot tell right code from wrong; the message says why."""


class UnitTests:
    """The task ``unit_tests``."""

    def __init__(
        self,
        field: str = "tests",
        partial: bool = False,
        time_s: float = 10.0,
        memory_mb: int = 1024,
        sandbox: SandboxKind = "bubblewrap",
    ) -> None:
        """docs/tasks.md describes the options. ``time_s``, the limit for the code and all its tests, should be below
        ``task.reward_timeout_s``.

        Raises ``ValueError`` for invalid options, and ``TaskError`` if the sandbox does not work here.
        """
        for name, limit in {"time_s": time_s, "memory_mb": memory_mb}.items():
            if not limit > 0:
                raise ValueError(f"{name} must be more than 0, not {limit}")
        self._field = field
        self._partial = partial
        self._limits = Limits(time_s=time_s, memory_mb=memory_mb)
        check_judge(sandbox)
        self._sandbox = sandbox
        self._to_try, self._try_s = ROWS_TRIED, TRY_S
        if self._sandbox != "bubblewrap":
            print("unit_tests: the model's code runs without a sandbox (`sandbox: none`)", file=sys.stderr)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``MissingField`` for a row without tests, ``SyntaxError`` for invalid tests, and ``UnusableTests`` for
        tests that check nothing. The tests of the first rows run without any code, and must fail."""
        tests = self._tests(prompt)
        if self._to_try <= 0 or self._try_s <= 0:
            return
        started = time.monotonic()
        limits = replace(self._limits, time_s=min(self._limits.time_s, self._try_s))
        passed = run("", tests, limits=limits, sandbox_kind=self._sandbox)
        self._to_try, self._try_s = self._to_try - 1, self._try_s - (time.monotonic() - started)
        if all(passed):
            raise UnusableTests("the tests pass without any code")

    def reward(self, prompt: Prompt, response: str, finished: bool) -> RewardResult:
        """1.0 if all tests pass, else 0.0; with ``partial``, the share that passes. The metric ``tests_passed`` is the
        share.

        Raises like ``check_prompt``, and ``SandboxError`` if no sandbox starts.
        """
        tests = self._tests(prompt)
        code = code_in(response)
        passed = run(code, tests, limits=self._limits, sandbox_kind=self._sandbox) if _compiles(code) else [False]
        share = sum(passed) / len(passed)
        return RewardResult(share if self._partial else float(all(passed)), {"tests_passed": share})

    def _tests(self, prompt: Prompt) -> list[Check]:
        entry = prompt.fields.get(ENTRY_POINT)
        codes = texts_field(prompt, self._field)
        return [test for code in codes for test in tests_in(code, entry if isinstance(entry, str) else None)]


def code_in(response: str) -> str:
    """The last fenced block of Python that parses, otherwise the last block, or the whole response without a fence.

    The last block may lack its end. If the response continues a block of the prompt, its code ends at the first fence.
    """
    blocks: list[tuple[str, str]] = []
    text = ""
    language: str | None = None
    for line in response.split("\n"):
        marker = line.strip(" \t\r")
        if language is None and marker.startswith(FENCE) and "`" not in (label := marker[len(FENCE) :]):
            # Prose may parse as Python, too, but only as expressions.
            tree = None if label or blocks else _compiles(text)
            if tree is not None and not all(isinstance(node, ast.Expr) for node in tree.body):
                blocks.append(("", text))
            else:
                language = label.strip().lower()
            text = ""
        elif language is not None and marker == FENCE:
            blocks.append((language, text))
            language, text = None, ""
        else:
            text += f"{line}\n"
    if language is not None:
        blocks.append((language, text))
    if not blocks:
        return response
    python = [block for label, block in blocks if label in LANGUAGES]
    return next((block for block in reversed(python) if _compiles(block)), (python or [blocks[-1][1]])[-1])


def tests_in(code: str, entry_point: str | None) -> list[Check]:
    """The tests in a piece of code. Raises ``SyntaxError``, and ``UnusableTests`` if they would execute nothing or
    would reject right code."""
    tree = ast.parse(code)
    _check_replaced_builtins(tree)
    if "sys.modules" not in code:  # a test may define modules there
        _check_imports(tree)
    functions = [node for node in tree.body if isinstance(node, Function)]
    tests = [(node.name, node, 0) for node in functions if node.name == "test" or node.name.startswith("test_")]
    for holder in tree.body:
        if isinstance(holder, ast.ClassDef) and (
            # The classes in which pytest and unittest look for tests.
            holder.name.startswith("Test") or any(ast.unparse(base).endswith("TestCase") for base in holder.bases)
        ):
            methods = [node for node in holder.body if isinstance(node, Function) and node.name.startswith("test")]
            tests += [(f"{holder.name}.{node.name}", node, 1) for node in methods]
    for _, node, self_arguments in tests:
        _check_arguments(node, self_arguments)
    if tests:
        return [Check(code, name) for name, _, _ in tests]
    uses = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if any(node.name == "check" and len(node.args.args) == 1 for node in functions) and "check" not in uses:
        if not (entry_point or "").isidentifier():
            raise UnusableTests(f"nothing calls check(candidate), and the row has no field `{ENTRY_POINT}`")
        return [Check(f"{code}\n\ncheck(solution.{entry_point})\n")]
    if all(map(_is_definition, tree.body)):
        raise UnusableTests("the tests define things and execute nothing")
    return [Check(code)]


def _check_arguments(node: Function, passed_arguments: int) -> None:
    """Raise ``UnusableTests`` if a test needs more arguments than ``passed_arguments``, which only pytest could
    pass."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    required_arguments = (
        len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults) + node.args.kw_defaults.count(None)
    )
    if (required_arguments > passed_arguments and not decorators) or any(
        "parametrize" in decorator for decorator in decorators
    ):
        raise UnusableTests(f"{node.name} takes arguments: pytest's fixtures and parameters are not supported")


def _check_imports(tree: ast.Module) -> None:
    """Raise ``UnusableTests`` for a module that the sandbox lacks. An import in a ``try`` statement may fail."""
    guarded = {node for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if node in guarded or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        else:
            modules = [alias.name for alias in node.names]
        for module in modules:
            name = module.partition(".")[0]
            if name not in {"solution", *sys.stdlib_module_names} and not PathFinder.find_spec(name, packages()):
                raise UnusableTests(
                    f"the tests import {module}, which is not installed: install it, or write `solution` for the "
                    "response's code"
                )


def _check_replaced_builtins(tree: ast.Module) -> None:
    """Raise ``UnusableTests`` for a patched builtin: the patch would not reach the code's process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(("patch", "patch.object")):
            target = ast.unparse(node.args[0]).strip("'\"")
            if target.partition(".")[0] == "builtins":
                raise UnusableTests(
                    f"the tests patch {target}, but the code runs in another process: replace sys.stdin or sys.stdout"
                )


def _is_definition(node: ast.stmt) -> bool:
    """True if a statement only defines or imports something."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)):
        return isinstance(node, (Function, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass))
    names = [child for child in ast.walk(node) if isinstance(child, ast.Name)]
    calls = any(isinstance(child, ast.Call) for child in ast.walk(node))
    return not calls and all(isinstance(name.ctx, ast.Store) for name in names)


def _compiles(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
