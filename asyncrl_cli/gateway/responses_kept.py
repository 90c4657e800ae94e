"""Conversations that clients continue by the id of their last response.

They are in memory, bounded in number and size, and by session: an id opens nothing in another one, and no client can
guess it. They end with the gateway; then an id gets 404, like one that never existed (decision 0068).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof
from weakref import WeakKeyDictionary

from asyncrl_cli.gateway.errors import ApiError
from asyncrl_cli.gateway.json_values import key
from asyncrl_cli.gateway.session import Session
from asyncrl_cli.records.prompt import Message

MAX_KEPT = 512
"""Responses of one session, and of all calls without one."""
MAX_BYTES = 4 * 2**20
"""Memory of one session's conversations as JSON, each counted completely, although those of one conversation may share
messages."""
MAX_BYTES_WITHOUT = 32 * 2**20
"""Of those of all calls without a session."""


class Kept:
    """Conversations by the id of their last response; the least recently used are removed first."""

    def __init__(self, most: int = MAX_KEPT, limit: int = MAX_BYTES) -> None:
        self._most, self._limit = most, limit
        self._kept: OrderedDict[str, tuple[Sequence[Message], int]] = OrderedDict()
        self._size = 0

    def add(self, response_id: str, messages: Sequence[Message]) -> None:
        """Keep a conversation. The newest is kept whatever its size, which the model's length bounds."""
        size = sum(getsizeof(key(message)) for message in messages)
        self._kept[response_id] = (messages, size)
        self._size += size
        while len(self._kept) > 1 and (len(self._kept) > self._most or self._size > self._limit):
            _, (_, size) = self._kept.popitem(last=False)
            self._size -= size

    def get(self, response_id: str) -> Sequence[Message]:
        """A conversation, the response included. Raises ``ApiError``."""
        if response_id not in self._kept:
            message = f"Previous response with id {response_id!r} not found."
            raise ApiError(404, message, code="previous_response_not_found", param="previous_response_id")
        self._kept.move_to_end(response_id)
        return self._kept[response_id][0]


class KeptBySession:
    """What each session has; it is freed with the session."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Session, Kept] = WeakKeyDictionary()
        self._without = Kept(limit=MAX_BYTES_WITHOUT)

    def of(self, session: Session | None) -> Kept:
        """None: that of all calls without a session."""
        return self._without if session is None else self._of.setdefault(session, Kept())
