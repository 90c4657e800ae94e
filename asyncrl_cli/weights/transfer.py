"""Moves chunks between hosts with HTTP/1.1, from and into mapped memory (decision 0038).

    GET /weights/VERSION                        a byte for each chunk: 1 if it is here
    GET /weights/VERSION/chunks/INDEX/DIGEST    the bytes of a chunk

``WeightServer`` serves only the checked chunks of a replica, and only to clients with the run's token. A client without
the token costs it at most 2 KiB, ten seconds, and one of a fixed number of connections. ``Connection`` only moves
bytes; ``pull.py`` chooses holders, checks the bytes and retries.
"""

from __future__ import annotations

import hmac
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from threading import Lock, Thread
from urllib.parse import urlsplit

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.system.network import family_of
from asyncrl_cli.weights.replica import Replica

CONNECT_S = 5.0
"""Seconds to connect."""
SILENCE_S = 10.0
"""Seconds that the other end may pause within a transfer."""
ANSWER_S = 60.0
"""Seconds that a client may take to receive an answer."""
IDLE_S = 60.0
"""Seconds that a connection with the token is kept without a request."""
CONNECTIONS = 512
"""Largest number of open connections; further ones are closed immediately."""
HEAD_BYTES = 2048
"""Largest head of a request."""
VIEWS = 512
"""Ranges in one system call; Linux allows 1024."""
REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]{0,255}) HTTP/1\.1")
PATH = re.compile(r"/weights/(\d{1,12})(?:/chunks/(\d{1,9})/([0-9a-f]{64}))?")
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
REFUSALS = {401: "it refuses the run's token", 404: "it does not have the chunk"}


class HolderFault(Exception):
    """A holder did not send the requested bytes; the text is a short reason."""


class Connection:
    """A connection to one holder, opened when needed and kept until a fault. Only one thread may use it, except for
    ``abort``."""

    def __init__(self, url: str, token: str) -> None:
        address = urlsplit(url)
        self._host = address.hostname or ""
        self._http = HTTPConnection(self._host, address.port)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._aborted = False

    def available_chunks(self, version: int, count: int) -> bytes:
        """One byte for each of the version's ``count`` chunks: 1 if the holder has it. Raises ``HolderFault``."""
        answer = bytearray(count)
        self._get(f"/weights/{version}", [memoryview(answer)])
        return bytes(answer)

    def fetch(self, version: int, index: int, digest: str, into: Sequence[memoryview]) -> None:
        """Write a chunk's bytes into ``into``, which has a view for each of its ranges, without checking them.

        A holder sends only bytes that have this ``digest``. Raises ``HolderFault``.
        """
        self._get(f"/weights/{version}/chunks/{index}/{digest}", into)

    def abort(self) -> None:
        """From another thread: end the current request and all later ones with ``HolderFault``."""
        self._aborted = True
        if (connection := self._http.sock) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the waiting thread; ``close`` would not

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        self._http.close()

    def _get(self, path: str, into: Sequence[memoryview]) -> None:
        try:
            if self._http.sock is None:
                self._connect()
            self._http.request("GET", path, headers=self._headers)
            answer = self._http.getresponse()
            expected = sum(len(view) for view in into)
            if answer.status != 200:
                raise HolderFault(REFUSALS.get(answer.status, f"it answered with HTTP status {answer.status}"))
            if answer.length != expected:
                raise HolderFault(f"it answered with {answer.length} bytes, expected {expected}")
            _receive_body(answer, into, expected)
        except (OSError, HTTPException, HolderFault) as error:
            self.close()
            raise HolderFault("it was slower than another" if self._aborted else _reason(error)) from None

    def _connect(self) -> None:
        self._http.sock = connection = socket.socket(family_of(self._host), socket.SOCK_STREAM)
        if self._aborted:  # checked after the socket is set: a later ``abort`` finds it there
            raise HolderFault
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(CONNECT_S)
        connection.connect((self._host, self._http.port))
        connection.settimeout(SILENCE_S)


def _receive_body(answer: HTTPResponse, into: Sequence[memoryview], expected: int) -> None:
    received_bytes = 0
    for remaining in into:
        while remaining:
            count = answer.readinto(remaining)
            if not count:
                raise HolderFault(f"it ended after {received_bytes} of {expected} bytes")
            remaining = remaining[count:]  # noqa: PLW2901
            received_bytes += count


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, HTTPException) and not isinstance(error, OSError):
        return "its answer is not HTTP/1.1"
    return getattr(error, "strerror", None) or str(error)


class WeightServer:
    """Serves a replica until ``close``, with a thread for each connection."""

    def __init__(self, replica: Replica, token: str, address: str) -> None:
        """Listen on a free port of the address. Raises ``RunError`` if the host does not have the address."""
        self._replica = replica
        self._authorization = f"Bearer {token}".encode()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._lock = Lock()
        self._listener = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            self._listener.bind((address, 0))
            self._listener.listen(CONNECTIONS)
        except OSError as error:
            self._listener.close()
            raise RunError(
                f"weights cannot be served on {address}: {error.strerror}",
                location="weights",
                hint="the address must be one of this host's own",
            ) from None
        port = self._listener.getsockname()[1]
        self.url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        Thread(target=self._accept, name="weights-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._closed = True
        with self._lock:
            for connection in (self._listener, *self._connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # the client has gone, or there are no free file descriptors
                    time.sleep(0.01)
                    continue
                with self._lock:
                    full = self._closed or len(self._connections) >= CONNECTIONS
                    if not full:
                        self._connections.add(connection)
                try:
                    if not full:
                        Thread(target=self._serve, args=(connection,), name="weights-client", daemon=True).start()
                except RuntimeError:  # the host has no more threads
                    full = True
                if full:
                    self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            timeout_s = SILENCE_S
            while self._answer(connection, timeout_s):
                timeout_s = IDLE_S
        except OSError:
            pass  # the client has gone or is too slow; it asks again, here or elsewhere
        finally:
            self._drop(connection)

    def _answer(self, connection: socket.socket, timeout_s: float) -> bool:
        """Read one request and answer it; True if another may follow."""
        try:
            method, path, headers, has_more = _read_request(connection, timeout_s)
        except ValueError:
            return self._refuse(connection, 400)
        # The token first: without it a client must not learn which versions and chunks exist.
        if not hmac.compare_digest(headers.get("authorization", "").encode(), self._authorization):
            return self._refuse(connection, 401, "WWW-Authenticate: Bearer\r\n")
        if method != "GET":
            return self._refuse(connection, 405, "Allow: GET\r\n")
        if has_more or headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return self._refuse(connection, 400)  # neither bodies nor pipelining are supported
        match = PATH.fullmatch(path)
        if match is None:
            return self._refuse(connection, 404)
        version, index, digest = int(match[1]), match[2], match[3]
        if index is None:
            _send(connection, 200, [memoryview(self._replica.available_chunks(version))])
        else:
            with self._replica.lent(version, int(index), digest) as views:
                _send(connection, 404 if views is None else 200, views or [])
        return headers.get("connection", "").lower() != "close"

    def _refuse(self, connection: socket.socket, status: int, header: str = "") -> bool:
        _send(connection, status=status, body=[], headers=f"{header}Connection: close\r\n")
        return False


def _read_request(connection: socket.socket, timeout_s: float) -> tuple[str, str, dict[str, str], bool]:
    """The method, the path, the headers by name in lower case, and True if bytes follow them.

    Raises ``ValueError`` if it is too long or not a request, ``OSError`` if the client closes the connection or takes
    longer than ``timeout_s`` seconds in total.
    """
    deadline = time.monotonic() + timeout_s
    received = b""
    while b"\r\n\r\n" not in received:
        if len(received) >= HEAD_BYTES:
            raise ValueError("the head is too long")
        connection.settimeout(_seconds_left(deadline))
        data = connection.recv(HEAD_BYTES - len(received))
        if not data:
            raise ConnectionError("it closed the connection")
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    request_line, *lines = head.decode("ascii").split("\r\n")
    request = REQUEST_LINE.fullmatch(request_line)
    if request is None:
        raise ValueError("not a request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            raise ValueError("not a header")
        headers[name.lower()] = value.strip()
    return request[1], request[2], headers, bool(body)


def _send(connection: socket.socket, status: int, body: list[memoryview], headers: str = "") -> None:
    """Send an answer. Raises ``OSError``, at the latest after ``ANSWER_S + SILENCE_S`` seconds."""
    length = sum(len(view) for view in body)
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Length: {length}\r\n{headers}\r\n"
    views = [memoryview(head.encode()), *body]
    next_view = 0
    deadline = time.monotonic() + ANSWER_S
    connection.settimeout(SILENCE_S)
    while next_view < len(views):
        _seconds_left(deadline)
        sent = connection.sendmsg(views[next_view : next_view + VIEWS])
        while next_view < len(views) and sent >= len(views[next_view]):
            sent -= len(views[next_view])
            next_view += 1
        if sent:
            views[next_view] = views[next_view][sent:]


def _seconds_left(deadline: float) -> float:
    seconds_left = deadline - time.monotonic()
    if seconds_left <= 0:
        raise TimeoutError
    return seconds_left
