"""Serves the checked chunks of a replica to those who have the run's token, and nothing else to anyone.

Each connection has a thread. What a client without the token can cost is bounded: a head of 2 KiB, ten seconds, and one
of a fixed number of connections.
"""

from __future__ import annotations

import hmac
import re
import socket
import time
from contextlib import suppress
from threading import Lock, Thread

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.system.network import family_of
from asyncrl_cli.weights.replica import Replica
from asyncrl_cli.weights.wire import ANSWER_S, SILENCE_S, read_head, send

IDLE_S = 60.0
"""Seconds that a connection is kept without a request, once it has shown the token."""
CONNECTIONS = 512
"""Connections at a time; more are closed at once."""
REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]{0,255}) HTTP/1\.1")
PATH = re.compile(r"/weights/(\d{1,12})(?:/chunks/(\d{1,9})/([0-9a-f]{64}))?")
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}


class WeightServer:
    """Serves from its creation until ``close``."""

    def __init__(self, replica: Replica, token: str, address: str) -> None:
        """Listen on a free port of the address. Raises ``RunError`` when the host does not have it."""
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
                except OSError:  # a client that is gone already, or no file descriptors
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
            patience = SILENCE_S
            while self._answer(connection, patience):
                patience = IDLE_S
        except OSError:
            pass  # the client is gone, or too slow: it asks again, here or elsewhere
        finally:
            self._drop(connection)

    def _answer(self, connection: socket.socket, patience_s: float) -> bool:
        """Read one request and answer it; returns whether another may follow."""
        try:
            head, rest = read_head(connection, patience_s)
            method, path, headers = _parse(head)
        except ValueError:
            return self._refuse(connection, 400)
        # Before anything else is looked at: without the token there is nothing to learn here.
        if not hmac.compare_digest(headers.get("authorization", "").encode(), self._authorization):
            return self._refuse(connection, 401, "WWW-Authenticate: Bearer\r\n")
        if method != "GET":
            return self._refuse(connection, 405, "Allow: GET\r\n")
        if rest or headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return self._refuse(connection, 400)  # a request has no body, and waits for the last answer
        wanted = PATH.fullmatch(path)
        if wanted is None:
            return self._refuse(connection, 404)
        keep = headers.get("connection", "").lower() != "close"
        version, index, digest = int(wanted[1]), wanted[2], wanted[3]
        if index is None:
            _send(connection, 200, [memoryview(self._replica.held(version))])
            return keep
        with self._replica.lent(version, int(index), digest) as views:
            _send(connection, 404 if views is None else 200, views or [])
        return keep

    def _refuse(self, connection: socket.socket, status: int, header: str = "") -> bool:
        _send(connection, status, [], f"{header}Connection: close\r\n")
        return False


def _parse(head: str) -> tuple[str, str, dict[str, str]]:
    """Method, path and headers, names in lower case. Raises ``ValueError``."""
    first, *lines = head.removesuffix("\r\n").split("\r\n")
    request = REQUEST_LINE.fullmatch(first)
    if request is None:
        raise ValueError("not a request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            raise ValueError("not a header")
        headers[name.lower()] = value.strip()
    return request[1], request[2], headers


def _send(connection: socket.socket, status: int, body: list[memoryview], headers: str = "") -> None:
    length = sum(len(view) for view in body)
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Length: {length}\r\n{headers}\r\n"
    send(connection, [head.encode(), *body], time.monotonic() + ANSWER_S)
