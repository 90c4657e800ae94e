"""The mover that works everywhere: HTTP/1.1 over TCP, under the run's token, straight from and into mapped memory.

    GET /weights/VERSION                        a byte for each chunk: 1 when it is here
    GET /weights/VERSION/chunks/INDEX/DIGEST    the bytes of a chunk

Both ends use plain sockets and threads: the bytes go from the mapped memory to the socket, and from there into mapped
memory, in a few system calls that Python's lock does not cover. ``http_server.py`` has the other end.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from asyncrl_cli.system.network import family_of
from asyncrl_cli.weights.http_server import WeightServer
from asyncrl_cli.weights.manifest import Endpoint
from asyncrl_cli.weights.movers import HolderFault
from asyncrl_cli.weights.replica import Replica
from asyncrl_cli.weights.wire import ANSWER_S, SILENCE_S, read_head, receive, send

CONNECT_S = 5.0
"""Seconds that a connection may take."""
ANSWER = re.compile(r"HTTP/1\.1 (\d{3}) ")
LENGTH = re.compile(r"\r\ncontent-length: *(\d{1,12})\r\n", re.IGNORECASE)


class HttpMover:
    """Serves one replica, and connects to those of other hosts."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._server: WeightServer | None = None

    def serve(self, replica: Replica, address: str) -> str:
        self._server = WeightServer(replica, self._token, address)
        return self._server.url

    def connect(self, holder: Endpoint) -> HttpLink:
        return HttpLink(holder.url, self._token)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class HttpLink:
    """A connection to one holder, opened when it is needed and kept until a fault."""

    def __init__(self, url: str, token: str) -> None:
        address = urlsplit(url)
        self._address = (address.hostname or "", address.port or 80)
        self._family = family_of(self._address[0])
        self._headers = f"Host: {address.netloc}\r\nAuthorization: Bearer {token}\r\n\r\n"
        self._socket: socket.socket | None = None
        self._aborted = False

    def held(self, version: int, count: int) -> bytes:
        answer = bytearray(count)
        self._get(f"/weights/{version}", [memoryview(answer)])
        return bytes(answer)

    def fetch(self, version: int, index: int, digest: str, into: Sequence[memoryview]) -> None:
        self._get(f"/weights/{version}/chunks/{index}/{digest}", into)

    def abort(self) -> None:
        self._aborted = True
        if (connection := self._socket) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits; ``close`` would not

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        self._socket = socket.socket(self._family, socket.SOCK_STREAM)
        if self._aborted:  # once the socket is there, ``abort`` finds it
            raise HolderFault
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(CONNECT_S)
        self._socket.connect(self._address)

    def _get(self, path: str, into: Sequence[memoryview]) -> None:
        deadline = time.monotonic() + ANSWER_S
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            send(self._socket, [f"GET {path} HTTP/1.1\r\n{self._headers}".encode()], deadline)
            head, rest = read_head(self._socket, SILENCE_S)
            _check(head, sum(len(view) for view in into))
            receive(self._socket, into, rest, deadline)
        except (OSError, ValueError, HolderFault) as error:
            self.close()
            raise HolderFault("it was slower than another" if self._aborted else _reason(error)) from None


def _check(head: str, expected: int) -> None:
    status, length = ANSWER.match(head), LENGTH.search(head)
    if status is None or length is None:
        raise HolderFault("its answer is not HTTP/1.1 with a length")
    if status[1] == "404":
        raise HolderFault("it does not have the chunk")
    if status[1] == "401":
        raise HolderFault("it refuses the run's token")
    if status[1] != "200":
        raise HolderFault(f"it answered with HTTP status {status[1]}")
    if int(length[1]) != expected:
        raise HolderFault(f"it answered with {length[1]} bytes, expected are {expected}")


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return getattr(error, "strerror", None) or str(error)
