"""How the process of the tests asks the process of the code: one question at a time over two pipes, in JSON.

    Tests (a Peer)  -- ["ask", action, arguments, ...] -->  Code (a Peer)
                   <-- ["value", ...] or ["error", ...] --

Before it answers, the code may ask back: it calls a function that a test has given it. The tests' side answers only
such questions, so of the tests the code reaches only what they hand over.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import linecache
import operator
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from asyncrl_cli.sandbox import wire
from asyncrl_cli.sandbox.values import Codec, is_builtin, update

LARGEST = 2**26
"""Bytes of the longest message."""
MOST_LENT = 8
"""Attributes that are watched for changes by a test: those that it asked for last."""
MOST_PRINTED = 2**20
"""Characters of what the code prints during one call that the tests can see."""


class ProtocolError(Exception):
    """The other side has ended, or sent an invalid message."""


class Peer(Codec):
    """One end of the two pipes. ``answer`` says what the other side may ask for."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._lock = threading.RLock()
        self._mine: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._broken = False

    def answer(self, action: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Do what the other side asks for."""
        raise NotImplementedError

    def export(self, value: Any) -> int:
        """The number of a value that stays here. The same value has the same number."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._mine)
            self._mine.append(value)  # kept, so that its id stays its own
        return self._numbers[id(value)]

    def own(self, number: int) -> Any:
        """The value of a number. Raises ``IndexError``."""
        if number < 0:
            raise IndexError(number)
        return self._mine[number]

    def ask(self, action: str, *arguments: Any, **named: Any) -> Any:
        """The other side's answer. Lists and other changeable arguments are changed as the other side changed them.

        Raises what the other side raised, and ``ProtocolError``.
        """
        with self._lock:
            text = self.given_input() if action == "call" else None
            self.send(["ask", action, self.encode(list(arguments)), self.encode(named), text])
            while (message := self.receive())[0] == "ask":
                self.send(self._reply(*message[1:]))
            try:
                kind, value, changed, printed = message
                result = self.decode(value)
                if changed is not None:
                    update([list(arguments), named], self.decode(changed))
                self.show(str(printed))
            except Exception as error:
                raise ProtocolError(f"an invalid answer: {error}") from None
        if kind == "error" and isinstance(result, BaseException):
            if isinstance(result, (StopIteration, StopAsyncIteration)) and action != "next":
                # It would end a loop over a test's own iterator, as if all had been compared.
                raise RuntimeError(f"the other side raised {type(result).__name__}")
            raise result
        return result

    def serve(self) -> None:
        """Answer questions until the other side has ended."""
        while True:
            self.send(self._reply(*self.receive()[1:]))

    def given_input(self) -> str | None:
        """What goes to the other side as its standard input, if anything."""
        return None

    def take_input(self, text: str | None) -> None:
        """Use this as standard input."""

    def printed(self) -> str:
        """What has been printed since the last time."""
        return ""

    def show(self, text: str) -> None:
        """Print what the other side has printed."""

    def _reply(self, action: str, arguments: Any, named: Any, text: str | None) -> list[Any]:
        try:
            self.take_input(text)
            values = [self.decode(arguments), self.decode(named)]
            value = self.encode(self.answer(action, *values))
            after = self.encode(values)
            return ["value", value, after if after != ["list", arguments, named] else None, self.printed()]
        except BaseException as error:
            try:
                return ["error", self.encode(error), None, self.printed()]
            except Exception:
                return ["error", ["raised", ["type", "Exception"], type(error).__name__, ["list"], []], None, ""]

    def send(self, message: list[Any]) -> None:
        """Send one message. Raises ``ProtocolError`` when the other side has ended."""
        data = memoryview(wire.packed([json.dumps(message).encode()]))
        try:
            while data:
                data = data[os.write(self._writing, data) :]
        except OSError as error:
            raise ProtocolError(str(error)) from None

    def receive(self) -> list[Any]:
        """The next message. After a ``ProtocolError`` each later call raises it too: where the next one begins is
        unknown."""
        try:
            if self._broken:
                raise ProtocolError("no message")
            (text,) = wire.received(self._read, LARGEST)
            message = json.loads(text)
            if not isinstance(message, list) or not message:
                raise ProtocolError("not a message")
        except (ValueError, RecursionError, ProtocolError) as error:
            self._broken = True
            raise ProtocolError(str(error)) from None
        return message

    def _read(self, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            if not (piece := os.read(self._reading, size - len(read))):
                raise ProtocolError("the other side has ended")
            read += piece
        return bytes(read)


# -- the side of the code


class Code(Peer):
    """The side of the judged code: it does what the tests ask for."""

    def __init__(self, reading: int, writing: int, run: Callable[[str], Any]) -> None:
        super().__init__(reading, writing)
        self._actions = ACTIONS | {"run": run}
        self._out = sys.stdout = _text_file("")

    def answer(self, action: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        """One of ``ACTIONS``, or running the code."""
        return self._actions[action](*arguments, **named)

    def refer(self, value: Any) -> list[Any]:
        """Everything may be referred to."""
        if isinstance(value, Given):
            return ["yours", value.number]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", self.export(value), value.__name__, self.encode(value.__base__)]
        if isinstance(value, types.ModuleType) and value is not sys.modules.get("solution"):
            raise TypeError(f"the module {value.__name__} of the code is not for the tests: they import it themselves")
        return ["coroutine" if isinstance(value, types.CoroutineType) else "object", self.export(value)]

    def resolve(self, kind: str, rest: list[Any]) -> Any:
        """References to own values, functions of the tests and Python's builtins."""
        if kind == "builtin":
            return getattr(builtins, rest[0])
        return self.own(rest[0]) if kind == "yours" else Given(self, rest[0])

    def take_input(self, text: str | None) -> None:
        """Let the code read it from ``sys.stdin``."""
        if text is not None:
            sys.stdin = _text_file(text)

    def printed(self) -> str:
        """What the code has printed to ``sys.stdout`` as it found it."""
        self._out.seek(0)
        text = self._out.read(MOST_PRINTED)
        self._out.seek(0)
        self._out.truncate()
        return text


def _text_file(text: str) -> io.TextIOWrapper:
    """A file in memory with the bytes behind it, as ``sys.stdin`` and ``sys.stdout`` have them."""
    data = io.BytesIO(text.encode(errors="surrogatepass"))
    return io.TextIOWrapper(data, "utf-8", "surrogatepass", newline="\n", write_through=True)


class Given:
    """In the code's process: a function or an iterator of a test."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer, self.number = peer, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Have the test's process call it."""
        return self._peer.ask("call", self, *arguments, **named)

    def __iter__(self) -> Given:
        """It is its own iterator."""
        return self

    def __next__(self) -> Any:
        """Have the test's process take the next value."""
        return self._peer.ask("next", self)


def _await(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


UNARY = ("abs", "reversed", "format", "len", "iter", "next", "str", "repr", "bool", "int", "float", "hash", "round")
KEYED = ("getitem", "setitem", "delitem")
BINARY = (
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
)
OPERATORS = ("neg", "pos", "invert", "index")
IN_PLACE = tuple(f"i{name}" for name in BINARY[6:])
ACTIONS: dict[str, Callable[..., Any]] = {
    "update": lambda value, name, new: update(getattr(value, name), new),
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "await": _await,
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": isinstance,
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *error: type(value).__exit__(value, *error),
    **{name: getattr(builtins, name) for name in UNARY},
    **{name: getattr(operator, f"__{name}__") for name in (*KEYED, *OPERATORS, *BINARY, *IN_PLACE)},
}


# -- the side of the tests


class Tests(Peer):
    """The tests' side."""

    def __init__(self, reading: int, writing: int) -> None:
        super().__init__(reading, writing)
        self._seen: dict[int, Any] = {}
        self._stdin: Any = sys.__stdin__
        self._lent: dict[tuple[int, str], tuple[tuple[Any, ...], Any, Any]] = {}
        self.failed = False
        """Whether an assertion has failed in a function of the test that the code called."""

    def ask(self, action: str, *arguments: Any, **named: Any) -> Any:
        """As in ``Peer``. Lists and dicts that are attributes of the code's objects are changed there, too, if the test
        has changed them."""
        lent, self._lent = self._lent, {}
        for key, (path, value, before) in lent.items():
            after = self.encode(value)
            if after != before:
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
        """Call a function, or take the next value of an iterator, that a test handed over."""
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

    def given_input(self) -> str | None:
        """The rest of ``sys.stdin``, where a test has replaced it. What was sent before is not sent again."""
        before, self._stdin = self._stdin, sys.stdin
        text = "" if sys.stdin is sys.__stdin__ else sys.stdin.read()
        return text if text or self._stdin is not before else None

    def show(self, text: str) -> None:
        """Print it here, where a test may have redirected ``sys.stdout``."""
        if text:
            sys.stdout.write(text)


class Remote:
    """In the tests' process: a value of the code that is not plain data.

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


def _is_meant(traceback: types.TracebackType) -> bool:
    """Whether an exception comes from a ``raise`` in a test, or from a line with none but names of builtins."""
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
