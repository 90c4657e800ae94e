"""Limits on client connections: deadlines, and a maximal number (decision 0016).

uvicorn closes a connection only between two requests. Here a request's head has a deadline, and so does a client that
does not read its answer. Above the maximal number, the connection that has been idle longest is closed.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 8192


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    head_s: float = 10.0
    """Seconds for a request's head, from its first byte or the connection's start."""
    body_s: float = 60.0
    """Seconds for a request's body."""
    idle_s: int = 75
    """Seconds that a connection may be idle; longer than most clients keep theirs, which leaves the closing to them."""
    unread_s: float = 60.0
    """Seconds within which a client must read some of its answer."""
    max_connections: int = MAX_CONNECTIONS
    """Maximal number of open connections."""


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit on open files to the hard limit; returns how many may be connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft // 2, MAX_CONNECTIONS)


class Connections:
    """The open connections of a server. A connection that serves no request is idle."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # in the order they became idle

    def protocol(self, **arguments: Any) -> Connection:
        return Connection(self, **arguments)

    def opened(self, connection: Connection) -> None:
        """Count a connection. If there are too many, close the one that has been idle longest, perhaps this one."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self.limits.max_connections:
            next(iter(self._idle)).abort()

    def note(self, connection: Connection) -> None:
        if connection.serving:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle.setdefault(connection)

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


class Connection(H11Protocol):
    """One connection. h11 refuses heads over 16 KiB."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections = connections
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def abort(self) -> None:
        self._connections.closed(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(self._connections.limits.head_s, self.abort)
        self._connections.opened(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.serving:
            self._stop_head()
        elif self._head is None:
            self._head = self.loop.call_later(self._connections.limits.head_s, self.abort)
        self._connections.note(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._connections.note(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        self._stop_head()
        self._stop_unread()
        super().connection_lost(exc)

    def _await_reading(self, unread: int) -> None:
        """Close the connection unless its client reads some of the ``unread`` bytes in time; then check again."""

        def check() -> None:
            unread_now = self.transport.get_write_buffer_size()
            if unread_now < unread:
                self._await_reading(unread_now)
            else:
                self.abort()

        self._unread = self.loop.call_later(self._connections.limits.unread_s, check)

    def _stop_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
