"""The HTTP server for the application."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.gateway.app import create_app
from asyncrl_cli.gateway.connections import ConnectionLimits, Connections
from asyncrl_cli.gateway.service import Service
from asyncrl_cli.system.network import family_of

START_S = 10.0
STOP_S = 5.0
"""Seconds that a start and a stop may take."""
BACKLOG = 128
"""Connections that may wait to be accepted; also the number accepted at a time."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all interfaces, with the address to reach them from this host."""


class GatewayError(UserError):
    """The gateway cannot start."""


class _Server(uvicorn.Server):
    """Installs no signal handlers, and sets ``serving`` once it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()


class Gateway:
    """Serves in the caller's event loop, from ``start`` to ``stop``."""

    def __init__(self, service: Service, listener: socket.socket, limits: ConnectionLimits) -> None:
        self._service = service
        self._listener = listener
        host, port = listener.getsockname()[:2]
        host = ANYWHERE.get(host, host)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        connections: Any = Connections(limits)
        config = uvicorn.Config(
            create_app(service),
            http=connections.protocol,
            log_config=None,
            log_level="critical",  # the answers tell clients about their errors
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=limits.idle_s,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to serve. Raises ``GatewayError`` if the server does not start."""
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        try:
            async with asyncio.timeout(START_S):
                await self._server.serving.wait()
        except TimeoutError:
            await self.stop()
            raise GatewayError("the gateway's server did not start", location="rollout.gateway") from None

    async def stop(self) -> None:
        """End every request and stop serving, within ``STOP_S``."""
        assert self._task is not None, "it was started"
        self._server.should_exit = True
        for call in self._service.calls:  # each client gets the error that the server is stopping
            call.cancel()
        await asyncio.wait({self._task}, timeout=STOP_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._service.bodies.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ``GatewayError`` if the address is not available."""
    family = family_of(host)
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol. Without it, answers wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise GatewayError(
            f"the gateway cannot listen on {host}:{port}: {reason}",
            location="rollout.gateway.port",
            hint="set rollout.gateway.port to 0 for a free port, and rollout.gateway.host to an address of this host",
        ) from None
    listener.setblocking(False)
    return listener
