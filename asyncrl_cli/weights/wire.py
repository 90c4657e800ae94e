"""Bytes between sockets and mapped memory, many ranges in one system call, each wait bounded."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

SILENCE_S = 10.0
"""Seconds that the other end may pause within a transfer."""
ANSWER_S = 60.0
"""Seconds for one answer, at both ends: 70 kB/s at least."""
HEAD_BYTES = 2048
"""The longest head of a request or an answer."""
VIEWS = 512
"""Ranges in one system call; Linux takes 1024."""


def read_head(connection: socket.socket, timeout_s: float) -> tuple[str, bytes]:
    """The head of a message, up to and with its empty line, and what came after it.

    Raises ``ValueError`` when it is too long or not ASCII, ``OSError`` when the other end closes or takes longer than
    ``timeout_s`` seconds for all of it.
    """
    deadline = time.monotonic() + timeout_s
    received = b""
    while b"\r\n\r\n" not in received:
        if len(received) >= HEAD_BYTES:
            raise ValueError("the head is too long")
        connection.settimeout(_left(deadline))
        more = connection.recv(HEAD_BYTES - len(received))
        if not more:
            raise ConnectionError("it closed the connection")
        received += more
    head, _, rest = received.partition(b"\r\n\r\n")
    return head.decode("ascii") + "\r\n", rest


def send(connection: socket.socket, parts: Sequence[bytes | memoryview], deadline: float) -> None:
    """Send all parts. Raises ``OSError``, ``SILENCE_S`` after the deadline at the latest."""
    views = [memoryview(part) for part in parts]
    first = 0
    connection.settimeout(SILENCE_S)
    while first < len(views):
        _left(deadline)
        sent = connection.sendmsg(views[first : first + VIEWS])
        first = _advance(views, first, sent)


def receive(connection: socket.socket, into: Sequence[memoryview], start: bytes, deadline: float) -> None:
    """Fill all views with ``start``, which was read already, and what comes next.

    Raises ``OSError`` when the other end closes before they are full, ``ValueError`` when ``start`` is longer.
    """
    views = list(into)
    total = sum(len(view) for view in views)
    done, first = 0, 0
    connection.settimeout(SILENCE_S)
    while first < len(views):
        if start:
            count = min(len(start), len(views[first]))
            views[first][:count] = start[:count]
            start = start[count:]
        else:
            _left(deadline)
            count = connection.recvmsg_into(views[first : first + VIEWS])[0]
            if count == 0:
                raise ConnectionError(f"it ended after {done} of {total} bytes")
        done += count
        first = _advance(views, first, count)
    if start:
        raise ValueError("it sent more bytes than asked for")


def _advance(views: list[memoryview], first: int, count: int) -> int:
    """Drop ``count`` bytes from the views' beginning; returns the first view that is not done."""
    while first < len(views) and count >= len(views[first]):
        count -= len(views[first])
        first += 1
    if count:
        views[first] = views[first][count:]
    return first


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
