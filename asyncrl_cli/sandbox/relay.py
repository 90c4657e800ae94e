"""From a port inside a sandbox to the gateway, and to nothing else.

The socket that listens was made in the sandbox's network and handed to the worker, which accepts its connections: in
the sandbox no process, and no file, leads outside.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

from asyncrl_cli.sandbox.settings import GATEWAY_PORT

PIECE = 2**16


def inner_url(gateway: str) -> str:
    """The gateway's base URL as seen inside."""
    return urlunsplit(urlsplit(gateway)._replace(scheme="http", netloc=f"127.0.0.1:{GATEWAY_PORT}"))


class Relay:
    """Copies bytes between connections from inside and connections to the gateway."""

    def __init__(self, gateway: str) -> None:
        """``gateway``: its base URL."""
        url = urlsplit(gateway)
        self._tls = url.scheme == "https"
        self._host, self._port = url.hostname or "127.0.0.1", url.port or (443 if self._tls else 80)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket) -> None:
        """Accept connections from now on."""
        self._server = await asyncio.start_server(self._connected, sock=listening)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None)
            writers.append(far_writer)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the connection ends; whoever waits for an answer sees that
        finally:
            self._connections.discard(task)
            for one in writers:
                one.close()

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for task in (left := list(self._connections)):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE):
        writer.write(piece)
        await writer.drain()
    with suppress(OSError, NotImplementedError):  # TLS has no half-closed connections
        writer.write_eof()
