"""Python values as JSON, between the process of the tests and the process of the code they judge.

Nothing that is decoded is executed: plain values and those in ``RECIPES`` are rebuilt with the reader's own types. Any
other value is sent as a reference, which ``Codec.refer`` makes and ``Codec.resolve`` reads.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import re
from collections.abc import Callable
from typing import Any

SEQUENCES: dict[str, type[Any]] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
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
    "uuid.UUID": lambda value: (str(value),),
    "pathlib.PosixPath": lambda value: (str(value),),
    "pathlib.PurePosixPath": lambda value: (str(value),),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
}
"""Types by their full name, and the arguments that build an equal value."""
EXCEPTIONS = frozenset(
    """
json.decoder.JSONDecodeError statistics.StatisticsError decimal.InvalidOperation decimal.DivisionByZero _queue.Empty
queue.Full struct.error re.error _csv.Error dataclasses.FrozenInstanceError asyncio.exceptions.CancelledError
asyncio.queues.QueueEmpty asyncio.queues.QueueFull graphlib.CycleError binascii.Error zlib.error copy.Error
""".split()  # noqa: SIM905
)
"""The standard library's exceptions that arrive as themselves."""
INTEGER_BITS = 1024
"""Longer integers are sent as hexadecimal text, which has no limit of digits."""
ARRAY_TYPE = re.compile(r"[<>|][biufcUS][0-9]{1,9}")
"""NumPy's data types without objects."""


class Codec:
    """Encodes and decodes. Subclasses say what becomes of the values that are not plain data."""

    def refer(self, value: Any) -> list[Any]:
        """The reference of a value that is not plain data. Raises ``TypeError`` when it has none."""
        raise NotImplementedError

    def resolve(self, kind: str, rest: list[Any]) -> Any:
        """The value of a reference. Raises ``ValueError`` for what is none."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """The JSON of a value."""
        kind: type[Any] = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if value.bit_length() <= INTEGER_BITS else ["int", hex(value)]
        if kind.__name__ in SEQUENCES and kind is SEQUENCES[kind.__name__]:
            return [kind.__name__, *map(self.encode, value)]
        if kind is dict or kind is collections.defaultdict:
            return ["dict", *([self.encode(key), self.encode(item)] for key, item in value.items())]
        if kind in (bytes, bytearray):
            return [kind.__name__, value.hex()]
        if (recipe := RECIPES.get(name := f"{kind.__module__}.{kind.__qualname__}")) is not None:
            return ["new", name, *map(self.encode, recipe(value))]
        if isinstance(value, BaseException):
            return self._encode_exception(value)
        if isinstance(value, type) and is_builtin(value):
            return ["type", value.__name__]
        if isinstance(value, type) and _is_standard(name := f"{value.__module__}.{value.__qualname__}", value):
            return ["exception type", name]
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            if hasattr(value, "tolist") and ARRAY_TYPE.fullmatch(value.dtype.str):
                plain = self.encode(value.tolist())
                return ["array", value.dtype.str, plain] if kind.__name__ == "ndarray" else plain
            return self.refer(value)
        for base in (int, float, str):  # an enumeration's member, a number of NumPy
            if isinstance(value, base):
                return self.encode(getattr(base, f"__{base.__name__}__")(value))
        fields = getattr(kind, "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            return ["named", kind.__name__, list(fields), *map(self.encode, value)]
        return self.refer(value)

    def decode(self, data: Any) -> Any:
        """The value of JSON that ``encode`` made. Raises ``ValueError`` or ``TypeError`` for any other."""
        if isinstance(data, dict):
            raise ValueError("not a value")
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind in SEQUENCES:
            return SEQUENCES[kind](map(self.decode, rest))
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in rest}
        if kind in BYTES:
            return BYTES[kind].fromhex(rest[0])
        if kind == "int":
            return int(rest[0], 16)
        if kind == "new" and rest[0] in RECIPES:
            module, _, name = rest[0].rpartition(".")
            return getattr(importlib.import_module(module), name)(*map(self.decode, rest[1:]))
        if kind == "type":
            return _builtin_type(rest[0])
        if kind == "exception type" and rest[0] in EXCEPTIONS:
            return _exception(rest[0])
        if kind == "named":
            return collections.namedtuple(rest[0], rest[1])(*map(self.decode, rest[2:]))
        if kind == "array" and ARRAY_TYPE.fullmatch(rest[0]):
            return importlib.import_module("numpy").array(self.decode(rest[1]), dtype=rest[0])
        if kind == "raised":
            return self._decode_exception(*rest)
        return self.resolve(kind, rest)

    def _encode_exception(self, error: BaseException) -> Any:
        attributes = []
        for name, value in vars(error).items():
            if isinstance(value, (bool, int, float, str, type(None), list, tuple, dict)):
                attributes.append([name, self.encode(value)])
        return ["raised", self.encode(type(error)), str(error), self.encode(list(error.args)), attributes]

    def _decode_exception(self, kind: Any, text: str, arguments: Any, attributes: list[Any]) -> BaseException:
        type_ = self.decode(kind)
        if not (isinstance(type_, type) and issubclass(type_, BaseException)):
            raise ValueError("not an exception")
        try:
            error = type_(*self.decode(arguments))
        except Exception:
            error = type_.__new__(type_, text)
        vars(error).update((str(name), self.decode(value)) for name, value in attributes)
        return error


def is_builtin(value: Any) -> bool:
    """Whether its name is that of the builtin that it is."""
    name = getattr(value, "__name__", None)
    return isinstance(name, str) and name in vars(builtins) and vars(builtins)[name] is value


def _builtin_type(name: str) -> type[Any]:
    found = getattr(builtins, name)
    if not isinstance(found, type):
        raise ValueError(f"{name} is not a type")
    return found


def _is_standard(name: str, value: Any) -> bool:
    return name in EXCEPTIONS and _exception(name) is value


def _exception(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def update(old: Any, new: Any) -> Any:
    """Make a changeable value equal to ``new`` in place and return it; for any other value return ``new``."""
    if type(old) is not type(new):
        return new
    if isinstance(old, list):
        old[:] = [update(*pair) for pair in zip(old, new, strict=True)] if len(old) == len(new) else new
    elif isinstance(old, dict):
        items = {key: update(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(items)
    elif isinstance(old, (set, collections.deque)):
        old.clear()
        old.update(new) if isinstance(old, set) else old.extend(new)
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, tuple) and len(old) == len(new):
        return tuple(update(*pair) for pair in zip(old, new, strict=True)) if type(old) is tuple else new
    elif type(old).__name__ == "ndarray" and old.shape == new.shape:
        old[...] = new
    else:
        return new
    return old
