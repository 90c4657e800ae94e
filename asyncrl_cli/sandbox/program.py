"""The program in a sandbox: it confines itself, and then runs either the tests or the code that they judge.

Its order is JSON on standard input. The code's process learns nothing from it but its limits; its code, and later each
argument, come from the process of the tests.
"""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import json
import linecache
import os
import resource
import sys
import types
from typing import Any

from asyncrl_cli.sandbox.calls import Code, ProtocolError, Remote, Tests
from asyncrl_cli.sandbox.confine import Confinement, View, confine, held, limit

MODULES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "pytest": "pytest"}
KNOWN = sys.stdlib_module_names | MODULES.keys()
"""Modules that a test may use without importing them."""
BEGAN, PASSED, FAILED = b"b", b"1", b"0"
"""What the tests' process reports: that both processes are confined, and then each test in turn."""


def main() -> None:
    """Do what the order says."""
    order = json.loads(sys.stdin.buffer.read())
    confinement, view = Confinement(**order["confinement"]), View(**order["view"])
    os.chdir(view.folder)
    if confinement.uid and order["landlock"]:
        view = held(view)
        os.environ["HOME"] = os.environ["TMPDIR"] = view.folder
    confine(confinement, view if order["landlock"] else None)
    del sys.path[0]  # this program's own
    sys.path.extend(view.packages)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    status = 0
    try:
        if "report" in order:
            _run_tests(order)
        else:
            _serve(order, view.folder)
    except ProtocolError as error:
        print(error, file=sys.stderr)
        status = 1
    finally:
        os._exit(status)


def _silence(memory: int) -> None:
    """From here on, whatever happens is caused by the code or the tests: no output, and limited memory. The process has
    no children, and no memory that it does not map."""
    os.dup2(1, 2)
    limit(resource.RLIMIT_AS, memory)


# -- the process of the code


def _serve(order: dict[str, Any], folder: str) -> None:
    module = types.ModuleType("solution")

    def run(source: str) -> types.ModuleType:
        sys.modules["solution"] = module
        exec(compile(source, "solution.py", "exec", dont_inherit=True), vars(module))
        return module

    peer = Code(order["reading"], order["writing"], run)
    peer.send(["ready"])
    sys.argv = ["solution.py"]
    sys.path.insert(0, folder)
    _silence(order["memory"])
    peer.serve()


# -- the process of the tests


class _Names(dict[str, Any]):
    """The names of a test: its own, Python's builtins, modules that it forgot to import, and the code's."""

    def __init__(self, name: str, solution: Remote, source: str) -> None:
        super().__init__(__name__=name, solution=solution)
        self._solution = solution
        self._source = source

    def __missing__(self, name: str) -> Any:
        """A name of the code, but no builtin and no module: code could replace what the tests compare with."""
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        module = MODULES.get(name, name)
        if (module != name or name in KNOWN) and _is_used_as_module(name, self._source):
            try:
                return importlib.import_module(module)
            except ImportError:
                raise KeyError(name) from None
        try:
            return getattr(self._solution, name)
        except AttributeError:
            raise KeyError(name) from None


def _is_used_as_module(name: str, source: str) -> bool:
    """Whether all uses of a name are those of its attributes."""
    nodes = [*ast.walk(ast.parse(source))]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return len(uses) == sum(isinstance(node, ast.Attribute) and node.value in uses for node in nodes)


def _run_tests(order: dict[str, Any]) -> None:
    report = order["report"]
    peer = Tests(order["reading"], order["writing"])
    if peer.receive() != ["ready"]:
        raise ProtocolError("the process of the code has not started")
    os.write(report, BEGAN)  # before the memory limit: a failure until here is the sandbox's, later ones are the code's
    _silence(order["memory"])
    try:
        solution = peer.ask("run", order["code"])
    except BaseException:
        return
    sys.modules["solution"] = solution
    for number, (source, call) in enumerate(order["tests"]):
        peer.failed = False
        # A test that names nothing to call may stand behind `if __name__ == "__main__"`.
        names = _Names("__main__" if call is None else f"test_{number}", solution, source)
        os.write(report, PASSED if _passes(names, source, f"test_{number}.py", call) and not peer.failed else FAILED)


def _passes(names: _Names, source: str, file: str, call: str | None) -> bool:
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        exec(compile(source, file, "exec", dont_inherit=True), names)
        return call is None or _call(names, call)
    except BaseException:
        return False
    finally:
        sys.stdin, sys.stdout = sys.__stdin__, sys.__stdout__


def _call(names: _Names, call: str) -> bool:
    """Whether a function ``name`` or a method ``Class.name`` of a test passes. Raises what it raises."""
    name, _, method = call.partition(".")
    target = names[name]
    if not method:
        return _finish(target())
    import inspect  # here: starting is to be quick, and most tests do not need these
    import unittest

    if issubclass(target, unittest.TestCase):
        result = unittest.TestResult()
        unittest.TestSuite([target(method)]).run(result)
        return result.testsRun == 1 and result.wasSuccessful() and not result.skipped and not result.expectedFailures
    one = target()
    steps = ("setup_class", "setup_method", method, "teardown_method", "teardown_class")
    for step in (getattr(one, step) for step in steps if hasattr(one, step)):
        _finish(step(*[None] * len(inspect.signature(step).parameters)))
    return True


def _finish(result: Any) -> bool:
    """Run what an asynchronous test, or one that yields, has returned to its end."""
    if isinstance(result, types.CoroutineType):
        import asyncio

        asyncio.run(result)
    elif isinstance(result, types.GeneratorType):
        collections.deque(result, maxlen=0)
    return not isinstance(result, types.AsyncGeneratorType)
