"""The protocol between the tests' process and the process of the code they judge: one question at a time, in JSON.

    tests (a Peer)  -- ["ask", action, arguments, named] -->  code (a Peer)
                   <-- ["value", ...] or ["error", ...] --

Before it answers, the code may ask back: to print, or to call a function that a test passed to it. The tests' side
answers no other questions, so the code can use only the values and functions that a test passes.

Decoding executes nothing: plain values and the types in ``RECIPES`` are rebuilt with the reader's own types. Any other
value is sent as a reference, which ``Codec.refer`` makes and ``Codec.resolve`` reads.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import json
import os
import re
import resource
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl_cli.sandbox import confine, wire

MAX_MESSAGE_BYTES = 2**26
"""Bytes of the longest message."""
SEQUENCES: dict[str, type[Any]] = {
    sequence_type.__name__: sequence_type for sequence_type in (list, tuple, set, frozenset)
}
BYTES: dict[str, type[Any]] = {"bytes": bytes, "bytearray": bytearray}
RECIPES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (dict(value),),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.time": lambda value: (value.hour, value.minute, value.second, value.microsecond, value.tzinfo),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "uuid.UUID": lambda value: (str(value),),
    "pathlib.PosixPath": lambda value: (str(value),),
    "pathlib.PurePosixPath": lambda value: (str(value),),
}
"""Types by their full names, with the arguments that build an equal value."""
EXCEPTIONS = frozenset(
    """
json.decoder.JSONDecodeError statistics.StatisticsError decimal.InvalidOperation decimal.DivisionByZero _queue.Empty
queue.Full struct.error re.error _csv.Error dataclasses.FrozenInstanceError asyncio.exceptions.CancelledError
asyncio.queues.QueueEmpty asyncio.queues.QueueFull graphlib.CycleError binascii.Error zlib.error copy.Error
""".split()  # noqa: SIM905
)
"""Exceptions of the standard library that keep their type on the other side."""
INTEGER_BITS = 1024
"""Longer integers are sent in hexadecimal, for which Python has no limit on digits."""
ARRAY_TYPE = re.compile(r"[<>|][biufcUS][0-9]{1,9}")
"""NumPy's data types, except objects."""

UNARY = ("abs", "reversed", "format", "len", "iter", "next", "str", "repr", "bool", "int", "float", "hash", "round")
KEYED = ("getitem", "setitem", "delitem")
BINARY = (
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
)
OPERATORS = ("neg", "pos", "invert", "index")
IN_PLACE = tuple(f"i{name}" for name in BINARY[6:])
"""Names of the special methods that tests may call on the code's objects, like the names above."""


class ProtocolError(Exception):
    """The other side ended, or sent an invalid message."""


class Codec:
    """Encodes values as JSON and decodes them. Subclasses define references, for values that are not plain data."""

    def refer(self, value: Any) -> list[Any]:
        """Return a reference to a value that is not plain data. Raises ``TypeError`` if the value may not be shared."""
        raise NotImplementedError

    def resolve(self, reference_type: str, fields: list[Any]) -> Any:
        """Return the value behind a reference. Raises ``ValueError`` for anything else."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Encode a value as JSON."""
        value_type: type[Any] = type(value)
        if value is None or value_type in (bool, str, float):
            return value
        if value_type is int:
            return value if value.bit_length() <= INTEGER_BITS else ["int", hex(value)]
        if value_type in SEQUENCES.values():
            return [value_type.__name__, *map(self.encode, value)]
        if value_type in (dict, collections.defaultdict):
            return ["dict", *([self.encode(key), self.encode(item)] for key, item in value.items())]
        if value_type in BYTES.values():
            return [value_type.__name__, value.hex()]
        if (recipe := RECIPES.get(name := _full_name(value_type))) is not None:
            return ["new", name, *map(self.encode, recipe(value))]
        if isinstance(value, BaseException):
            plain = (bool, int, float, str, type(None), list, tuple, dict)
            attributes = [[key, self.encode(item)] for key, item in vars(value).items() if isinstance(item, plain)]
            return ["raised", self.encode(value_type), str(value), self.encode(list(value.args)), attributes]
        if isinstance(value, type) and _is_shared(name := _full_name(value)) and _imported(name) is value:
            return ["type", name]
        if value_type.__module__ == "numpy" and hasattr(value, "dtype"):
            if not (hasattr(value, "tolist") and ARRAY_TYPE.fullmatch(value.dtype.str)):
                return self.refer(value)
            plain_array = self.encode(value.tolist())
            return ["array", value.dtype.str, plain_array] if value_type.__name__ == "ndarray" else plain_array
        for base in (int, float, str):  # members of an enumeration, NumPy's numbers
            if isinstance(value, base):
                return self.encode(getattr(base, f"__{base.__name__}__")(value))
        fields = getattr(value_type, "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            return ["named", value_type.__name__, list(fields), *map(self.encode, value)]
        return self.refer(value)

    def decode(self, data: Any) -> Any:
        """Decode the JSON of ``encode``. Raises ``ValueError`` or ``TypeError`` for any other."""
        if isinstance(data, dict):
            raise ValueError("not a value")
        if not isinstance(data, list):
            return data
        tag, *fields = data
        if tag in SEQUENCES:
            return SEQUENCES[tag](map(self.decode, fields))
        if tag == "dict":
            return {self.decode(key): self.decode(item) for key, item in fields}
        if tag in BYTES:
            return BYTES[tag].fromhex(fields[0])
        if tag == "int":
            return int(fields[0], 16)
        if tag == "new" and fields[0] in RECIPES:
            return _imported(fields[0])(*map(self.decode, fields[1:]))
        if tag == "type" and _is_shared(fields[0]) and isinstance(shared_type := _imported(fields[0]), type):
            return shared_type
        if tag == "named":
            return collections.namedtuple(fields[0], fields[1])(*map(self.decode, fields[2:]))
        if tag == "array" and ARRAY_TYPE.fullmatch(fields[0]):
            return importlib.import_module("numpy").array(self.decode(fields[1]), dtype=fields[0])
        if tag == "raised":
            return self._decode_exception(*fields)
        return self.resolve(tag, fields)

    def _decode_exception(self, encoded_type: Any, text: str, arguments: Any, attributes: list[Any]) -> BaseException:
        type_ = self.decode(encoded_type)
        if not (isinstance(type_, type) and issubclass(type_, BaseException)):
            raise ValueError("not an exception")
        try:
            error = type_(*self.decode(arguments))
        except Exception:
            error = type_.__new__(type_, text)
        vars(error).update((str(name), self.decode(value)) for name, value in attributes)
        return error


class Peer(Codec):
    """One end of the two pipes. Subclasses answer the questions that they allow the other side."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._reading, self._writing = order["reading"], order["writing"]
        self._lock = threading.RLock()
        self._exported_values: list[Any] = []
        self._references: dict[int, int] = {}
        self._broken = False

    def answer(self, action: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Answer a question of the other side, by its decoded arguments."""
        raise NotImplementedError

    def export(self, value: Any) -> int:
        """Number a value that stays on this side; the same object keeps its number."""
        if id(value) not in self._references:
            self._references[id(value)] = len(self._exported_values)
            self._exported_values.append(value)  # kept alive: Python may give the id of a freed object to another one
        return self._references[id(value)]

    def exported(self, reference: int) -> Any:
        """Return the exported value with this number. Raises ``IndexError``."""
        if reference < 0:
            raise IndexError(reference)
        return self._exported_values[reference]

    def ask(self, action: str, *arguments: Any, **keywords: Any) -> Any:
        """Ask the other side, and return its answer. Its changes to mutable arguments are made here, too.

        Raises the exception that the other side raised, and ``ProtocolError``.
        """
        with self._lock:
            self.send(["ask", action, self.encode(list(arguments)), self.encode(keywords)])
            while (message := self.receive())[0] == "ask":
                self.reply(*message[1:])
            try:
                answer_type, value, changed_arguments = message
                result = self.decode(value)
                if changed_arguments is not None:
                    update([list(arguments), keywords], self.decode(changed_arguments))
            except Exception as error:
                raise ProtocolError(f"an invalid answer: {error}") from None
        if answer_type == "error" and isinstance(result, BaseException):
            if isinstance(result, (StopIteration, StopAsyncIteration)) and action != "next":
                # Unchanged, it would end a test's own loop early, as if every item had been compared.
                raise RuntimeError(f"the other side raised {type(result).__name__}")
            raise result
        return result

    def reply(self, action: str, arguments: Any, keywords: Any) -> None:
        """Answer a question, with the exception if answering it raises one."""
        try:
            values = [self.decode(arguments), self.decode(keywords)]
            value = self.encode(self.answer(action, *values))
            changed_values = self.encode(values)
            message = ["value", value, changed_values if changed_values != ["list", arguments, keywords] else None]
        except BaseException as error:
            try:
                message = ["error", self.encode(error), None]
            except Exception:
                message = ["error", self.encode(Exception(type(error).__name__)), None]
        self.send(message)

    def send(self, message: list[Any]) -> None:
        """Send one message. Raises ``ProtocolError`` if the other side has ended."""
        data = memoryview(wire.packed([json.dumps(message).encode()]))
        try:
            while data:
                data = data[os.write(self._writing, data) :]
        except OSError as error:
            raise ProtocolError(str(error)) from None

    def receive(self) -> list[Any]:
        """Wait for the next message. After a ``ProtocolError`` every later call raises one, too: the start of the next
        message is then unknown."""
        try:
            if self._broken:
                raise ProtocolError("no message")
            (text,) = wire.received(partial(os.read, self._reading), MAX_MESSAGE_BYTES)
            message = json.loads(text)
            if not isinstance(message, list) or not message:
                raise ProtocolError("not a message")
        except (ValueError, RecursionError, EOFError, ProtocolError) as error:
            self._broken = True
            raise ProtocolError(str(error)) from None
        return message


def run_confined(serve: Callable[[dict[str, Any]], None]) -> None:
    """Read an order (JSON) from standard input, confine this process accordingly, and serve it. Does not return."""
    order = json.loads(sys.stdin.buffer.read())
    os.chdir(order["folder"])
    confine.confine(confine.Confinement(**order["confinement"]))
    del sys.path[0]  # the folder of this package, which unreviewed code must not import from
    sys.path.extend(order["packages"])
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    status = 0
    try:
        serve(order)
    except ProtocolError as error:
        print(error, file=sys.stderr)
        status = 1
    finally:
        os._exit(status)


def silence(order: dict[str, Any]) -> None:
    """Print nothing more, and limit the memory.

    Until this call a failure is the sandbox's and is printed; from here on it is the fault of the code or the tests.
    The limit on address space bounds all memory, because the process may have no children and no unmapped memory.
    """
    os.dup2(1, 2)
    confine.limit(resource.RLIMIT_AS, order["memory"])


def is_builtin(value: Any) -> bool:
    """True if the object is the builtin that its name refers to."""
    name = getattr(value, "__name__", None)
    return isinstance(name, str) and name in vars(builtins) and vars(builtins)[name] is value


def update(target: Any, replacement: Any) -> Any:
    """Make a mutable value equal to ``replacement`` in place and return it; return ``replacement`` for other values."""
    if type(target) is not type(replacement):
        return replacement
    if isinstance(target, list):
        target[:] = (
            [update(*pair) for pair in zip(target, replacement, strict=True)]
            if len(target) == len(replacement)
            else replacement
        )
    elif isinstance(target, dict):
        items = {key: update(target[key], item) if key in target else item for key, item in replacement.items()}
        target.clear()
        target.update(items)
    elif isinstance(target, (set, collections.deque)):
        target.clear()
        target.update(replacement) if isinstance(target, set) else target.extend(replacement)
    elif isinstance(target, bytearray):
        target[:] = replacement
    elif isinstance(target, tuple) and len(target) == len(replacement):
        return (
            tuple(update(*pair) for pair in zip(target, replacement, strict=True))
            if type(target) is tuple
            else replacement
        )
    elif type(target).__name__ == "ndarray" and target.shape == replacement.shape:
        target[...] = replacement
    else:
        return replacement
    return target


def _is_shared(full_name: str) -> bool:
    """True for types that both sides have: the builtin types, and exceptions of the standard library."""
    module, _, name = full_name.rpartition(".")
    return (module == "builtins" and hasattr(builtins, name)) or full_name in EXCEPTIONS


def _full_name(value_type: type[Any]) -> str:
    return f"{value_type.__module__}.{value_type.__qualname__}"


def _imported(full_name: str) -> Any:
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(module), name)
