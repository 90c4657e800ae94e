"""Moves chunks between hosts with HTTP/1.1, from and into mapped memory (decision 0038).

    GET /weights/VERSION                        a byte for each chunk: 1 if it is here
    GET /weights/VERSION/chunks/INDEX/DIGEST    the bytes of a chunk

``WeightServer`` serves only the checked chunks of a replica, and only to clients with the run's token. A client without
the token costs it at most ten seconds, and one of a fixed number of connections. ``Connection`` only moves
bytes; ``pull.py`` chooses holders, checks the bytes and retries.
"""

from __future__ import annotations

import hmac
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Semaphore, Thread, Timer
from typing import Any
from urllib.parse import urlsplit

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.system.network import family_of
from asyncrl_cli.weights.replica import Replica

CONNECT_S = 5.0
"""Seconds to connect."""
SILENCE_S = 10.0
"""Longest pause of the other end within a transfer, and the time limit for a client to show the token, in seconds."""
IDLE_S = 60.0
"""Seconds that a connection with the token is kept without a request, or without taking more of an answer."""
CONNECTIONS = 512
"""Largest number of open connections; further ones are closed immediately."""
PATH = re.compile(r"/weights/(?P<version>\d{1,12})(?:/chunks/(?P<index>\d{1,9})/(?P<digest>[0-9a-f]{64}))?")
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
            raise HolderFault(_reason(error)) from None

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


class WeightServer(ThreadingTCPServer):
    """Serves a replica until ``close``, with a thread for each connection."""

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, replica: Replica, token: str, address: str) -> None:
        """Listen on a free port of the address. Raises ``RunError`` if the host does not have the address."""
        self.replica = replica
        self.authorization = f"Bearer {token}".encode()
        self.address_family = family_of(address)
        self._free_connections = Semaphore(CONNECTIONS)
        try:
            super().__init__((address, 0), _Handler)
        except OSError as error:
            raise RunError(
                f"weights cannot be served on {address}: {error.strerror}",
                location="weights",
                hint="the address must be one of this host's own",
            ) from None
        port = self.server_address[1]
        self.url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        Thread(target=self.serve_forever, name="weights-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Connections end with their next request."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have gone or are too slow. They ask again, here or elsewhere."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 2**16  # joins small ranges; larger ones are sent from the mapped memory
    server: WeightServer

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(SILENCE_S)
        # In total: a client without the token could send a byte from time to time.
        self._deadline = Timer(SILENCE_S, partial(self.server.shutdown_request, self.connection))
        self._deadline.start()

    def finish(self) -> None:
        self._deadline.cancel()
        super().finish()

    def do_GET(self) -> None:
        # The token first: without it a client must not learn which versions and chunks exist.
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), self.server.authorization):
            self.send_error(401)
            return
        self._deadline.cancel()
        self.connection.settimeout(IDLE_S)
        match = PATH.fullmatch(self.path)
        if match is None:
            self.send_error(404)
        elif match["index"] is None:
            self._send([memoryview(self.server.replica.available_chunks(int(match["version"])))])
        else:
            with self.server.replica.lent(int(match["version"]), int(match["index"]), match["digest"]) as views:
                if views is None:
                    self.send_error(404)
                else:
                    self._send(views)

    def _send(self, views: list[memoryview]) -> None:
        self.send_response_only(200)
        self.send_header("Content-Length", str(sum(len(view) for view in views)))
        self.end_headers()
        for view in views:
            self.wfile.write(view)

    def log_message(self, *_: object) -> None:
        """Log nothing: requests are too many."""
