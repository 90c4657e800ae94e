"""Messages into and out of sandboxes: lists of byte strings.

    length of the rest (4 bytes) | number of strings (4 bytes) | their lengths (4 bytes each) | the strings

The other side may run code that a model wrote. So reading executes nothing, and the reader limits the size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

MAX_FIELDS = 1000
HEAD = 4
MAX_BYTES = 2**30
"""Bytes of the longest message."""
CHUNK_BYTES = 2**20


class WireError(ValueError):
    """Bytes that are not a message."""


def packed(fields: Sequence[bytes]) -> bytes:
    """Encode a message. Raises ``WireError`` if it is too long."""
    lengths = [len(field) for field in fields]
    size = HEAD * (1 + len(lengths)) + sum(lengths)
    if len(lengths) > MAX_FIELDS or size > MAX_BYTES:
        raise WireError("the message is too long")
    return b"".join((struct.pack(f"!II{len(lengths)}I", size, len(lengths), *lengths), *fields))


def size_of(head: bytes, max_bytes: int = MAX_BYTES) -> int:
    """Number of bytes after a message's first 4. Raises ``WireError`` if the message is too long."""
    size = int.from_bytes(head, "big")
    if size > max_bytes:
        raise WireError("the message is too long")
    return size


def unpacked(data: bytes) -> list[bytes]:
    """Decode a message without its first 4 bytes. Raises ``WireError``."""
    count = int.from_bytes(data[:HEAD], "big")
    start = HEAD * (1 + count)
    if count > MAX_FIELDS or start > len(data):
        raise WireError("too many fields")
    fields = []
    for length in struct.unpack_from(f"!{count}I", data, HEAD):
        fields.append(data[start : start + length])
        start += length
    if len(data) != start:
        raise WireError("not a message")
    return fields


def received(read: Callable[[int], bytes], max_bytes: int = MAX_BYTES) -> list[bytes]:
    """Receive a message; ``read(n)`` returns up to n bytes. Raises ``WireError``, and ``EOFError`` at the end."""

    def exactly(size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (chunk := read(min(size - len(data), CHUNK_BYTES))):
                raise EOFError("the other side has ended")
            data += chunk
        return bytes(data)

    return unpacked(exactly(size_of(exactly(HEAD), max_bytes)))
