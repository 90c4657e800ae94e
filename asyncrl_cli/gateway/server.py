"""The HTTP server around the application."""

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
"""Seconds that starting and stopping may take."""
BACKLOG = 128
"""Connections that may wait to be accepted, and that are accepted at a time."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean every interface, and how to reach them from this host."""


class GatewayError(UserError):
    """The gateway cannot be started."""


class _Server(uvicorn.Server):
    """Leaves signals to the process, and sets ``serving`` when it serves."""

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
            log_level="critical",  # clients' errors are in their answers
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
        """Serve from now on. Raises ``GatewayError`` when that does not work."""
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        ready = asyncio.create_task(self._server.serving.wait())
        try:
            await asyncio.wait({self._task, ready}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._server.serving.is_set():
            await self.stop()
            raise GatewayError("the gateway's server did not start", location="rollout.gateway")

    async def stop(self) -> None:
        """End every request and stop serving, within ``STOP_S``."""
        assert self._task is not None, "it was started"
        self._server.should_exit = True
        for generation in self._service.generations:  # their clients get an error that the server stops
            generation.cancel()
        await asyncio.wait({self._task}, timeout=STOP_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._service.bodies.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. Raises ``GatewayError`` when the address is not available."""
    family = family_of(host)
    # Only sockets that name their protocol get TCP_NODELAY from asyncio; without it answers wait 40 ms for an ACK.
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
            hint="set rollout.gateway.port to 0 for a free one, and rollout.gateway.host to an address of this host",
        ) from None
    listener.setblocking(False)
    return listener
