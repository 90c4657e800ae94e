"""The HTTP server round the application, in the event loop of whoever starts it."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import quote

import uvicorn

from asyncrl_cli.rollout.chat import ChatFormat
from asyncrl_cli.rollout.gateway.app import Service, create_app
from asyncrl_cli.rollout.session import Session, Sessions
from asyncrl_cli.runs.errors import UserError
from asyncrl_cli.spec.sections import GatewaySpec

START_S = 10.0
STOP_S = 5.0
"""Seconds that starting and stopping may take."""
BACKLOG = 4096
"""Connections that may wait to be accepted, as far as the kernel allows."""
KEEP_ALIVE_S = 75
"""Seconds that a connection may be idle: longer than clients keep theirs, so that it is they who close it."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean every interface, and how to reach them from this host."""


class GatewayError(UserError):
    """The gateway cannot be started."""


class _Server(uvicorn.Server):
    """Leaves signals to the driver, and says when it serves."""

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
    """A gateway that serves until ``stop``."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service = service
        self._listener = listener
        host, port = listener.getsockname()[:2]
        host = ANYWHERE.get(host, host)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.api_key = service.api_key
        config = uvicorn.Config(
            create_app(service),
            log_config=None,
            log_level="critical",  # what clients do wrong is told to them, not to the driver's terminal
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """What clients take as their base URL."""
        return f"{self.url}/v1"

    def session_url(self, session_id: str) -> str:
        """The base URL of a session."""
        return f"{self.url}/sessions/{quote(session_id, safe='')}/v1"

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
            raise GatewayError("the gateway's server did not start", place="rollout.gateway")

    async def stop(self) -> None:
        """End every request and stop to serve, within ``STOP_S``."""
        assert self._task is not None, "it was started"
        self._server.should_exit = True
        self._service.calls.cancel_all()
        await asyncio.wait({self._task}, timeout=STOP_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> Gateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def start_gateway(
    spec: GatewaySpec, chat: ChatFormat, sessions: Sessions, new_session: Callable[[], Session], model: str
) -> Gateway:
    """A gateway that serves, in this event loop, under a new API key.

    ``new_session`` makes the session of a call that names none; ``model`` is the name that clients use. Raises
    ``GatewayError`` when the address cannot be had.
    """
    service = Service(
        sessions=sessions,
        new_session=new_session,
        chat=chat,
        model=model,
        api_key=secrets.token_urlsafe(32),
        max_body_bytes=spec.max_body_mb * 2**20,
    )
    gateway = Gateway(service, listen(spec.host, spec.port))
    await gateway.start()
    return gateway


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. Raises ``GatewayError`` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
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
            place="rollout.gateway.port",
            mend="Set rollout.gateway.port to 0 for a free one, and rollout.gateway.host to an address of this host",
        ) from None
    listener.setblocking(False)
    return listener
