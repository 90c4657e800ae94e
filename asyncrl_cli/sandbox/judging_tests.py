"""The process of the tests: it runs each of them, and reports whether it passes. It asks the code's process for each
name, call and operator of the code."""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import linecache
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
KNOWN = sys.stdlib_module_names | MODULES.keys()
"""Modules that a test may use without importing them."""
BEGAN, PASSED, FAILED = b"b", b"1", b"0"
"""The report: that both processes are confined, and then each test in turn."""
MOST_LENT = 8
"""Attributes that are watched for changes by a test: those that it asked for last."""


def main() -> None:
    """Confine this process, and run the tests."""
    run_confined(_run_tests)


def _run_tests(order: dict[str, Any]) -> None:
    report = order["report"]
    peer = Tests(order)
    if peer.receive() != ["ready"]:
        raise ProtocolError("the process of the code has not started")
    os.write(report, BEGAN)  # before the memory limit: a failure until here is the sandbox's, later ones are the code's
    silence(order)
    try:
        solution = peer.ask("run", order["code"])
    except BaseException:
        return
    sys.modules["solution"] = solution
    for number, (source, call) in enumerate(order["tests"]):
        peer.failed = False
        # A test that names nothing to call may stand behind `if __name__ == "__main__"`.
        names = _Names("__main__" if call is None else f"test_{number}", solution, source)
        os.write(
            report,
            PASSED
            if _passes(names, source=source, file=f"test_{number}.py", call=call) and not peer.failed
            else FAILED,
        )


class Tests(Peer):
    """The side of the tests."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        self._seen: dict[int, Any] = {}
        self._stdin: Any = sys.__stdin__
        self._lent: dict[tuple[int, str], tuple[tuple[Any, ...], Any, Any]] = {}
        self.failed = False
        """Whether an assertion has failed in a function of the test that the code called."""

    def ask(self, action: str, *arguments: Any, **named: Any) -> Any:
        """As in ``Peer``. The code reads the rest of ``sys.stdin``, if a test has replaced it. Lists and dicts that are
        attributes of the code's objects are changed there, too, if the test has changed them."""
        if action == "call":
            before, self._stdin = self._stdin, sys.stdin
            text = "" if sys.stdin is sys.__stdin__ else sys.stdin.read()
            if text or self._stdin is not before:
                super().ask("input", text)
        lent, self._lent = self._lent, {}
        for key, (path, value, encoded) in lent.items():
            after = self.encode(value)
            if after != encoded:
                super().ask("update", *path, value)
            self._lent[key] = path, value, after
        result = super().ask(action, *arguments, **named)
        if action == "getattr" and isinstance(result, (list, dict, set)):
            key = arguments[0]._number, arguments[1]  # the hash of a Remote would be the code's
            self._lent.pop(key, None)
            self._lent[key] = arguments, result, self.encode(result)
            if len(self._lent) > MOST_LENT:
                self._lent.pop(next(iter(self._lent)))
        return result

    def answer(self, action: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Print, call a function that a test handed over, or take the next value of such an iterator."""
        if action == "print":
            return sys.stdout.write(str(arguments[0]))  # a test may have redirected it
        if id(arguments[0]) in self._numbers and action in ("call", "next"):
            try:
                return next(arguments[0]) if action == "next" else arguments[0](*arguments[1:], **named)
            except AssertionError:  # whatever the code does with it; its text may tell what was expected
                self.failed = True
                raise AssertionError from None
        raise TypeError(f"the tests do not answer {action}")

    def refer(self, value: Any) -> list[Any]:
        """Values of the code go back to it; functions and iterators of a test may be called from there."""
        if isinstance(value, Remote):
            return ["yours", value._number]
        if isinstance(number := getattr(value, "__asyncrl_number__", None), int):
            return ["yours", number]
        if is_builtin(value):
            return ["builtin", value.__name__]
        if callable(value) or hasattr(value, "__next__"):
            return ["given", self.export(value)]
        raise TypeError(f"a test cannot hand over a {type(value).__name__}: give the code plain values or functions")

    def resolve(self, kind: str, rest: list[Any]) -> Any:
        """Stand-ins for values of the code."""
        number = rest[0]
        if kind == "yours":
            return self.own(number)
        if kind == "coroutine":
            return self._coroutine(Remote(self, number))
        if number not in self._seen:
            if kind == "object":
                self._seen[number] = Remote(self, number)
            elif kind == "exception" and issubclass(base := self.decode(rest[2]), BaseException):
                self._seen[number] = type(str(rest[1]), (base,), {"__asyncrl_number__": number})
            else:
                raise ValueError(f"not a value: {kind}")
        return self._seen[number]

    async def _coroutine(self, remote: Remote) -> Any:
        return self.ask("await", remote)


class Remote:
    """A value of the code that is not plain data, as the tests see it.

    Operators take another value of the code only. Against a plain value ``==`` is false and the others raise
    ``TypeError``: were the code asked, it would be shown the expected value before it answers.
    """

    __slots__ = ("_number", "_peer")
    _number: int

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the value; of Python's special ones the name only."""
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the value."""
        _ask(self, "setattr", name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        """``isinstance`` with a class of the code: plain values are never its instances."""
        return isinstance(instance, Remote) and _ask(instance, "isinstance", self) is True

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        """Tracebacks stay here: they lead to the tests.

        The code may suppress what a test raises on purpose, but neither a failed assertion nor an error that its own
        values can cause: the rest of the test would be skipped.
        """
        if kind is None or (not issubclass(kind, AssertionError) and _is_meant(traceback)):
            return _ask(self, "exit", kind, error, None)
        _ask(self, "exit", None, None, None)
        return False


def _ask(remote: Remote, action: str, *arguments: Any, **named: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer.ask(action, remote, *arguments, **named)


def _forwarded(action: str) -> Any:
    return lambda self, *arguments, **named: _ask(self, action, *arguments, **named)


def _between_remotes(action: str) -> Any:
    return lambda self, other: _ask(self, action, other) if isinstance(other, Remote) else NotImplemented


for _name in ("call", "enter", *UNARY, *OPERATORS, *KEYED):
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in (*BINARY, *IN_PLACE):
    setattr(Remote, f"__{_name}__", _between_remotes(_name))


def _is_meant(traceback: types.TracebackType) -> bool:
    """Whether an exception comes from a ``raise`` in a test, or from a line with no names except builtins."""
    if traceback.tb_next is not None:
        return False
    source = "".join(linecache.getlines(traceback.tb_frame.f_code.co_filename))
    line = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    line = [node for node in line if node.lineno <= traceback.tb_lineno <= (node.end_lineno or node.lineno)]
    return bool(line) and all(
        isinstance(node, ast.Raise)
        or all(hasattr(builtins, name.id) for name in ast.walk(node) if isinstance(name, ast.Name))
        for node in line
    )


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
        if name in KNOWN and _is_used_as_module(name, self._source):
            try:
                return importlib.import_module(MODULES.get(name, name))
            except ImportError:
                raise KeyError(name) from None
        try:
            return getattr(self._solution, name)
        except AttributeError:
            raise KeyError(name) from None


def _is_used_as_module(name: str, source: str) -> bool:
    """Whether the test only uses attributes of this name."""
    nodes = [*ast.walk(ast.parse(source))]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return len(uses) == sum(isinstance(node, ast.Attribute) and node.value in uses for node in nodes)


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
    import inspect  # here: most tests do not need these, and a start should be quick
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
    """Run the result of an asynchronous test, or of one that yields, to its end."""
    if isinstance(result, types.CoroutineType):
        import asyncio

        asyncio.run(result)
    elif isinstance(result, types.GeneratorType):
        collections.deque(result, maxlen=0)
    return not isinstance(result, types.AsyncGeneratorType)
