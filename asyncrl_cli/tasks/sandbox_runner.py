"""The program in a sandbox: it confines itself, and then runs either the tests or the code that they judge.

Its order is JSON on standard input. The code's process learns nothing from it but its limits; its code, and later each
argument, come from the process of the tests.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from typing import Any

from asyncrl_cli.tasks.sandbox_calls import Code, ProtocolError, Remote, Tests
from asyncrl_cli.tasks.sandbox_confine import confine, limit_memory

BEGAN, PASSED, FAILED = b"b", b"1", b"0"
"""What the tests' process reports: that both processes are confined, and then each test in turn."""


def main() -> None:
    """Do what the order says."""
    setup = json.loads(sys.stdin.buffer.read())
    packages = confine(setup)
    del sys.path[0]  # this program's own
    sys.path.extend(packages)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    status = 0
    try:
        if setup["report"] is not None:
            _judge(setup)
        else:
            _serve(setup)
    except ProtocolError as error:
        print(error, file=sys.stderr)
        status = 1
    finally:
        os._exit(status)


def _silence(setup: dict[str, Any]) -> None:
    """From here on it is the code's, or the tests', own fault what happens."""
    os.dup2(1, 2)
    limit_memory(setup["limits"]["memory_mb"])


# -- the process of the code


def _serve(setup: dict[str, Any]) -> None:
    module = types.ModuleType("solution")

    def run(source: str) -> types.ModuleType:
        sys.modules["solution"] = module
        exec(compile(source, "solution.py", "exec", dont_inherit=True), vars(module))
        return module

    peer = Code(setup["reading"], setup["writing"], run)
    peer.send(["ready"])
    sys.argv = ["solution.py"]
    sys.path.insert(0, setup["folder"])
    _silence(setup)
    peer.serve()


# -- the process of the tests


class _Names(dict[str, Any]):
    """The names of a test: its own, Python's builtins, and the code's, in this order."""

    def __init__(self, number: int, solution: Remote) -> None:
        super().__init__(__name__=f"test_{number}", solution=solution)
        self._solution = solution

    def __missing__(self, name: str) -> Any:
        """A name of the code. A builtin is never taken from there: code could replace what the tests compare with."""
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        try:
            return getattr(self._solution, name)
        except AttributeError:
            raise KeyError(name) from None


def _judge(setup: dict[str, Any]) -> None:
    report = setup["report"]
    peer = Tests(setup["reading"], setup["writing"])
    if peer.receive() != ["ready"]:
        raise ProtocolError("the process of the code has not started")
    os.write(report, BEGAN)
    _silence(setup)
    try:
        solution = peer.ask("run", setup["code"])
    except BaseException:
        return
    sys.modules["solution"] = solution
    for number, (source, call) in enumerate(setup["tests"]):
        os.write(report, PASSED if _passes(_Names(number, solution), source, number, call) else FAILED)


def _passes(names: _Names, source: str, number: int, call: str | None) -> bool:
    try:
        exec(compile(source, f"test_{number}.py", "exec", dont_inherit=True), names)
        if call is not None:
            names[call]()
    except BaseException:
        return False
    finally:
        sys.stdin, sys.stdout = sys.__stdin__, sys.__stdout__
    return True
