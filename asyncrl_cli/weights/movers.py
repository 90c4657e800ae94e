"""How chunks get from one host's memory into another's: the protocol, and the movers there are.

A mover only moves bytes. Which holder is asked for which chunk, checking what came and trying again is the same for
all movers (``pull.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncrl_cli.weights.manifest import Endpoint
from asyncrl_cli.weights.replica import Replica


class HolderFault(Exception):
    """A holder did not give what it was asked for; the text says why, in a few words."""


class Link(Protocol):
    """A connection to one holder, used by one thread at a time."""

    def held(self, version: int, count: int) -> bytes:
        """Which of the ``count`` chunks of ``version`` the holder has: one byte for each, 1 or 0.

        Raises ``HolderFault``.
        """
        ...

    def fetch(self, version: int, index: int, digest: str, into: Sequence[memoryview]) -> None:
        """Write the chunk's bytes into ``into``, a view for each of its ranges. They are not checked yet.

        ``digest`` is what the chunk must have: a holder with another chunk under this number is not to send it. Raises
        ``HolderFault``, within a bounded time.
        """
        ...

    def close(self) -> None:
        """End the connection. Called by another thread, it ends a ``fetch`` under way."""
        ...


class Mover(Protocol):
    """One way to move chunks, ready to serve and to fetch."""

    def serve(self, replica: Replica, address: str) -> str:
        """Serve the replica's checked chunks at this address of the host; returns the URL for ``Endpoint``."""
        ...

    def connect(self, holder: Endpoint) -> Link:
        """A link to a holder; the connection is made when it is first used."""
        ...

    def close(self) -> None:
        """Stop serving."""
        ...
