"""The process of the judged code: it answers the tests' questions.

Its order has only limits. The code, and later every argument, come from the tests' process.
"""

from __future__ import annotations

import builtins
import io
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from asyncrl_cli.sandbox.exchange import BINARY, IN_PLACE, KEYED, OPERATORS, UNARY, Peer, run_confined, silence, update

MAX_PRINTED = 2**20
"""Characters printed during one call that the tests can see."""


def main() -> None:
    """Confine this process and answer the tests' questions."""
    run_confined(_serve)


def _serve(order: dict[str, Any]) -> None:
    code = Code(order)
    code.send(["ready"])
    sys.argv = ["solution.py"]
    sys.path.insert(0, order["folder"])
    silence(order)
    while True:
        _, *question = code.receive()
        code.reply(*question)


class Code(Peer):
    """The judged code's side of the exchange."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        self._solution = types.ModuleType("solution")
        self._actions = ACTIONS | {"run": self._run, "input": self._take_input}
        self._out = sys.stdout = _text_file("")

    def answer(self, action: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Do one of ``ACTIONS``, run the code, or replace standard input. Output is passed to the tests' process."""
        try:
            return self._actions[action](*arguments, **keywords)
        finally:
            self._out.seek(0)
            text = self._out.read(MAX_PRINTED)
            self._out.seek(0)
            self._out.truncate()
            if text:
                self.ask("print", text)

    def refer(self, value: Any) -> list[Any]:
        """Refer to any value except modules."""
        if isinstance(value, RemoteFunction):
            return ["yours", value.reference]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", self.export(value), value.__name__, self.encode(value.__base__)]
        if isinstance(value, types.ModuleType) and value is not sys.modules.get("solution"):
            raise TypeError(f"the code's module {value.__name__} is not shared: tests import modules themselves")
        return ["coroutine" if isinstance(value, types.CoroutineType) else "object", self.export(value)]

    def resolve(self, reference_type: str, fields: list[Any]) -> Any:
        """Find a value of this side, a function of the tests, or a builtin."""
        if reference_type == "builtin":
            return getattr(builtins, fields[0])
        return self.exported(fields[0]) if reference_type == "yours" else RemoteFunction(self, fields[0])

    def _run(self, source: str) -> types.ModuleType:
        sys.modules["solution"] = self._solution
        exec(compile(source, "solution.py", "exec", dont_inherit=True), vars(self._solution))
        return self._solution

    def _take_input(self, text: str) -> None:
        sys.stdin = _text_file(text)


class RemoteFunction:
    """Stand-in for a function or an iterator of a test."""

    def __init__(self, peer: Peer, reference: int) -> None:
        self._peer, self.reference = peer, reference

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.ask("call", self, *arguments, **keywords)

    def __iter__(self) -> RemoteFunction:
        return self

    def __next__(self) -> Any:
        return self._peer.ask("next", self)


def _text_file(text: str) -> io.TextIOWrapper:
    """A text file in memory with a binary buffer, like ``sys.stdin`` and ``sys.stdout``."""
    data = io.BytesIO(text.encode(errors="surrogatepass"))
    return io.TextIOWrapper(data, "utf-8", "surrogatepass", newline="\n", write_through=True)


def _await(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


ACTIONS: dict[str, Callable[..., Any]] = {
    "update": lambda value, name, new_value: update(getattr(value, name), new_value),
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "await": _await,
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": isinstance,
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *error: type(value).__exit__(value, *error),
    **{name: getattr(builtins, name) for name in UNARY},
    **{name: getattr(operator, f"__{name}__") for name in (*KEYED, *OPERATORS, *BINARY, *IN_PLACE)},
}
