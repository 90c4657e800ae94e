"""The open sessions by the names in their URLs, and their keys.

Each session's key is derived from the run's secret and the session's name, and opens no other session (decision 0016).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote

from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.session import Session, session_ended

REOPENING_S = 90.0
"""Seconds that a call waits for its session after a restart. Most clients wait longer for an answer."""
MAX_ENDED_IDS = 10_000
"""Number of ended sessions to remember: late calls to them get 410 instead of 404."""


class Action(StrEnum):
    """The requests of programs outside of the run (decision 0034)."""

    OPEN = "open"
    REWARD = "reward"
    GIVE_UP = "give up"
    COMMIT = "commit"
    """The gateway's own request: answer when the session's tokens are on disk."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of a program outside of the run. All but ``OPEN`` name their ``session``.

    ``prompt`` and ``fields``: the program's own prompt, if it has one. ``reward`` and ``metrics`` are unchecked.
    ``has_reply``: the model has completed a reply in the session, or the gateway does not know the session.
    """

    action: Action
    session: str = ""
    prompt: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    reward: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    has_reply: bool = True


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """The answer to a program outside of the run. Errors have a ``code``, and ``body["message"]`` is their text."""

    status: int
    body: Mapping[str, Any]
    code: str | None = None


@dataclass(frozen=True, slots=True)
class OutsideClients:
    """Access of programs outside of the run.

    Args:
        token: opens sessions.
        ask: has the driver answer a request.
    """

    token: str = field(repr=False)
    ask: Callable[[ClientRequest], Coroutine[Any, Any, ClientAnswer]]


class Sessions:
    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._ended_ids: OrderedDict[str, None] = OrderedDict()
        self._next_opening = asyncio.Event()

    def open(self, session: Session, session_id: str | None = None) -> None:
        """Start to serve a session under its rollout's id or another id. Raises ``ValueError`` if the id is in use."""
        session_id = session.rollout_id if session_id is None else session_id
        if session_id in self._open:
            raise ValueError(f"session {session_id} is open already")
        self._ended_ids.pop(session_id, None)
        self._open[session_id] = session
        self._next_opening.set()
        self._next_opening = asyncio.Event()

    def get(self, session_id: str) -> Session:
        """Return an open session. Raises ``ApiError``: 410 if it has ended, 404 if it never existed."""
        if session_id in self._open:
            return self._open[session_id]
        if session_id in self._ended_ids:
            raise session_ended(session_id)
        raise ApiError(404, f"there is no session {session_id}", code="session_not_found")

    async def when_open(self, session_id: str) -> Session:
        """As ``get``, but wait for a session that is unknown: a program calls on while its run or its gateway
        restarts."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REOPENING_S):
                while session_id not in self._open and session_id not in self._ended_ids:
                    await self._next_opening.wait()
        return self.get(session_id)

    def open_session(self, session_id: str) -> Session | None:
        """Return a session if it is open."""
        return self._open.get(session_id)

    def close(self, session_id: str) -> None:
        session = self._open.pop(session_id, None)
        if session is not None:
            session.close()
            self._ended_ids[session_id] = None
            if len(self._ended_ids) > MAX_ENDED_IDS:
                self._ended_ids.popitem(last=False)

    def __len__(self) -> int:
        return len(self._open)


def new_secret() -> bytes:
    """A new secret, from which a run's session keys are derived."""
    return secrets.token_bytes(32)


def session_key(secret: bytes, session: str) -> str:
    """The key of one session."""
    return hmac.new(secret, session.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


def session_url(url: str, session: str) -> str:
    """The base URL of a session of the gateway at ``url``."""
    return f"{url}/sessions/{quote(session, safe='')}/v1"


def same_key(client_key: str, expected_key: str) -> bool:
    """Compare a client's key with the correct one, in constant time."""
    return hmac.compare_digest(client_key.encode("utf-8", "surrogatepass"), expected_key.encode())
