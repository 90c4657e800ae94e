"""Messages between the worker and the supervisor in a sandbox: lists of byte strings over a stream.

    how many (4 bytes) | each one's length (4 bytes each) | all of them

Nothing in them is executed, and the reader limits their size: the other side may run code that a model wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

MOST_FIELDS = 1000
LONGEST = 2**30
"""Bytes of the longest message."""


class WireError(ValueError):
    """Bytes that are not a message."""


def packed(fields: Sequence[bytes]) -> bytes:
    """The bytes of a message. Raises ``WireError`` for one that is too long."""
    if len(fields) > MOST_FIELDS or sum(map(len, fields)) > LONGEST:
        raise WireError("the message is too long")
    return b"".join((struct.pack(f"!I{len(fields)}I", len(fields), *map(len, fields)), *fields))


def field_count(head: bytes) -> int:
    """How many fields the message has that begins with these 4 bytes. Raises ``WireError``."""
    (count,) = struct.unpack("!I", head)
    if count > MOST_FIELDS:
        raise WireError("too many fields")
    return int(count)


def field_lengths(lengths: bytes) -> tuple[int, ...]:
    """The fields' lengths, from 4 bytes each. Raises ``WireError``."""
    unpacked = struct.unpack(f"!{len(lengths) // 4}I", lengths)
    if sum(unpacked) > LONGEST:
        raise WireError("the message is too long")
    return unpacked


def split(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    """The fields."""
    fields, start = [], 0
    for length in lengths:
        fields.append(data[start : start + length])
        start += length
    return fields


def received(read: Callable[[int], bytes]) -> list[bytes]:
    """The next message; ``read`` returns exactly so many bytes. Raises ``WireError``, and what ``read`` raises."""
    lengths = field_lengths(read(4 * field_count(read(4))))
    return split(read(sum(lengths)), lengths)
