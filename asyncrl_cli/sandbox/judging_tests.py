"""The process of the tests: it runs each test and reports whether it passes. For every name, call and operator of the
code it asks the code's process."""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import os
import sys
import types
from typing import Any

from asyncrl_cli.sandbox.exchange import (
    BINARY,
    IN_PLACE,
    KEYED,
    OPERATORS,
    UNARY,
    Peer,
    ProtocolError,
    is_builtin,
    run_confined,
    silence,
)

MODULES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "pytest": "pytest"}
IMPLICIT_MODULES = sys.stdlib_module_names | MODULES.keys()
"""Modules that a test may use without importing them."""
STARTED, PASSED, FAILED = b"b", b"1", b"0"
"""The report's bytes: the first says that both processes are confined, then comes one for each test."""
MAX_WATCHED_ATTRIBUTES = 8
"""Number of attributes watched for changes by a test: the last ones that it asked for."""


def main() -> None:
    """Confine this process and run the tests."""
    run_confined(_run_tests)


def _run_tests(order: dict[str, Any]) -> None:
    report = order["report"]
    peer = Tests(order)
    if peer.receive() != ["ready"]:
        raise ProtocolError("the process of the code has not started")
    os.write(report, STARTED)  # until here a failure is the sandbox's; from here on it counts as the code's
    silence(order)
    try:
        solution = peer.ask("run", order["code"])
    except BaseException:
        return
    sys.modules["solution"] = solution
    for index, (source, call) in enumerate(order["tests"]):
        peer.failed = False
        # A test without a function to call may be guarded by `if __name__ == "__main__"`.
        names = _Names("__main__" if call is None else f"test_{index}", solution, source)
        os.write(
            report,
            PASSED if _passes(names, source=source, file=f"test_{index}.py", call=call) and not peer.failed else FAILED,
        )


class Tests(Peer):
    """The tests' side of the exchange."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        self._values: dict[int, Any] = {}
        self._stdin: Any = sys.__stdin__
        self._watched_attributes: dict[tuple[int, str], tuple[tuple[Any, ...], Any, Any]] = {}
        self.failed = False
        """True if an assertion failed in a test's function that the code called: the code may hide the exception."""

    def ask(self, action: str, *arguments: Any, **keywords: Any) -> Any:
        """As in ``Peer``. If a test replaced ``sys.stdin``, the code reads the rest of it. If a test changed a list,
        dict or set that it got as an attribute of the code's object, the object's attribute changes, too."""
        if action == "call":
            previous_stdin, self._stdin = self._stdin, sys.stdin
            text = "" if sys.stdin is sys.__stdin__ else sys.stdin.read()
            if text or self._stdin is not previous_stdin:
                super().ask("input", text)
        watched_attributes, self._watched_attributes = self._watched_attributes, {}
        for key, (path, value, encoded) in watched_attributes.items():
            encoded_now = self.encode(value)
            if encoded_now != encoded:
                super().ask("update", *path, value)
            self._watched_attributes[key] = path, value, encoded_now
        result = super().ask(action, *arguments, **keywords)
        if action == "getattr" and isinstance(result, (list, dict, set)):
            key = arguments[0]._number, arguments[1]  # hashing a Remote would run the code's __hash__
            self._watched_attributes.pop(key, None)
            self._watched_attributes[key] = arguments, result, self.encode(result)
            if len(self._watched_attributes) > MAX_WATCHED_ATTRIBUTES:
                self._watched_attributes.pop(next(iter(self._watched_attributes)))
        return result

    def answer(self, action: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Print, call a function that a test passed to the code, or take the next value of such an iterator."""
        if action == "print":
            return sys.stdout.write(str(arguments[0]))  # a test may have redirected it
        if id(arguments[0]) in self._references and action in ("call", "next"):
            try:
                return next(arguments[0]) if action == "next" else arguments[0](*arguments[1:], **keywords)
            except AssertionError:  # recorded, because the code may catch it; its text could show the expected value
                self.failed = True
                raise AssertionError from None
        raise TypeError(f"the tests do not answer {action}")

    def refer(self, value: Any) -> list[Any]:
        """Refer to the code's own values, and to functions and iterators of a test, which the code may call."""
        if isinstance(value, Remote):
            return ["yours", value._number]
        if isinstance(reference := getattr(value, "__asyncrl_number__", None), int):
            return ["yours", reference]
        if is_builtin(value):
            return ["builtin", value.__name__]
        if callable(value) or hasattr(value, "__next__"):
            return ["given", self.export(value)]
        raise TypeError(f"a test cannot pass a {type(value).__name__} to the code: pass plain values or functions")

    def resolve(self, reference_type: str, fields: list[Any]) -> Any:
        """Return a value of this side, or a stand-in for a value of the code."""
        reference = fields[0]
        if reference_type == "yours":
            return self.exported(reference)
        if reference_type == "coroutine":
            return self._coroutine(Remote(self, reference))
        if reference not in self._values:
            if reference_type == "object":
                self._values[reference] = Remote(self, reference)
            elif reference_type == "exception" and issubclass(base := self.decode(fields[2]), BaseException):
                self._values[reference] = type(str(fields[1]), (base,), {"__asyncrl_number__": reference})
            else:
                raise ValueError(f"not a value: {reference_type}")
        return self._values[reference]

    async def _coroutine(self, remote: Remote) -> Any:
        return self.ask("await", remote)


class Remote:
    """Stand-in for a value of the code that is not plain data.

    Operators accept only another value of the code. Against a plain value ``==`` is false and the others raise
    ``TypeError``: the code must not see the expected value before it answers (decision 0021).
    """

    __slots__ = ("_number", "_peer")
    _number: int

    def __init__(self, peer: Peer, reference: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", reference)

    def __getattr__(self, name: str) -> Any:
        """Ask for an attribute; ``__name__`` is the only special one."""
        if name == "__all__":  # `from solution import *` needs it; `_Names` looks up the names that it does not bring
            return ()
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        """Plain values are never instances of the code's classes."""
        return isinstance(instance, Remote) and _ask(instance, "isinstance", self) is True

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> Any:
        """Leave a context of the code, without the traceback, because it leads to the tests.

        The code hears of exceptions except failed assertions. It cannot suppress them: the rest of the test would be
        skipped, also after an error that its own values caused.
        """
        is_shown = error_type is not None and not issubclass(error_type, AssertionError)
        _ask(self, "exit", *((error_type, error) if is_shown else (None, None)), None)
        return False


def _ask(remote: Remote, action: str, *arguments: Any, **keywords: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer.ask(action, remote, *arguments, **keywords)


def _forwarded(action: str) -> Any:
    return lambda self, *arguments, **keywords: _ask(self, action, *arguments, **keywords)


def _between_remotes(action: str) -> Any:
    return lambda self, other_remote: (
        _ask(self, action, other_remote) if isinstance(other_remote, Remote) else NotImplemented
    )


for _name in ("call", "enter", *UNARY, *OPERATORS, *KEYED):
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in (*BINARY, *IN_PLACE):
    setattr(Remote, f"__{_name}__", _between_remotes(_name))


class _Names(dict[str, Any]):
    """Names of a test: its own, builtins, modules that it forgot to import, and the code's."""

    def __init__(self, name: str, solution: Remote, source: str) -> None:
        super().__init__(__name__=name, solution=solution)
        self._solution = solution
        self._source = source

    def __missing__(self, name: str) -> Any:
        """Look up a name of the code. Builtins and modules come first: the code must not replace a test's tools."""
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        if name in IMPLICIT_MODULES and _is_used_as_module(name, self._source):
            try:
                return importlib.import_module(MODULES.get(name, name))
            except ImportError:
                raise KeyError(name) from None
        try:
            return getattr(self._solution, name)
        except AttributeError:
            raise KeyError(name) from None


def _is_used_as_module(name: str, source: str) -> bool:
    """True if the test uses only attributes of this name."""
    nodes = [*ast.walk(ast.parse(source))]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return len(uses) == sum(isinstance(node, ast.Attribute) and node.value in uses for node in nodes)


def _passes(names: _Names, source: str, file: str, call: str | None) -> bool:
    try:
        exec(compile(source, file, "exec", dont_inherit=True), names)
        return call is None or _call(names, call)
    except BaseException:
        return False
    finally:
        sys.stdin, sys.stdout = sys.__stdin__, sys.__stdout__


def _call(names: _Names, call: str) -> bool:
    """Call a test's function ``name`` or method ``Class.name``. Raises its exceptions; returns whether it passes."""
    name, _, method = call.partition(".")
    target = names[name]
    if not method:
        return _finish(target())
    import inspect  # here, because most tests do not need them and every response starts this process
    import unittest

    if issubclass(target, unittest.TestCase):
        result = unittest.TestResult()
        unittest.TestSuite([target(method)]).run(result)
        return result.testsRun == 1 and result.wasSuccessful() and not result.skipped and not result.expectedFailures
    instance = target()
    steps = ("setup_class", "setup_method", method, "teardown_method", "teardown_class")
    for step in (getattr(instance, step) for step in steps if hasattr(instance, step)):
        _finish(step(*[None] * len(inspect.signature(step).parameters)))
    return True


def _finish(result: Any) -> bool:
    """Run the coroutine or generator that a test returned; False for an asynchronous generator, which is not run."""
    if isinstance(result, types.CoroutineType):
        import asyncio

        asyncio.run(result)
    elif isinstance(result, types.GeneratorType):
        collections.deque(result, maxlen=0)
    return not isinstance(result, types.AsyncGeneratorType)
