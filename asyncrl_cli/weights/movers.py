"""How chunks get from one host's memory into another's.

A mover only moves bytes. Which holder is asked for which chunk, whether the right bytes came, and trying again are the
same for all movers (``pull.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncrl_cli.weights.manifest import Endpoint
from asyncrl_cli.weights.replica import Replica


class HolderFault(Exception):
    """A holder did not give what it was asked for; the text says why, in a few words."""


class Link(Protocol):
    """A connection to one holder, made when it is first used. All methods but ``abort`` are for one thread."""

    def held(self, version: int, count: int) -> bytes:
        """Which of the ``count`` chunks of ``version`` the holder has: one byte for each, 1 or 0.

        Raises ``HolderFault``, within a bounded time.
        """
        ...

    def fetch(self, version: int, index: int, digest: str, into: Sequence[memoryview]) -> None:
        """Write the chunk's bytes into ``into``, a view for each of its ranges; they are not checked here.

        ``digest`` is what the chunk should have: a holder with other bytes under this number does not send them. Raises
        ``HolderFault``, within a bounded time.
        """
        ...

    def abort(self) -> None:
        """End what is under way with a ``HolderFault``, and whatever is asked for later; called by another thread."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class Mover(Protocol):
    """One way to move chunks."""

    def serve(self, replica: Replica, address: str) -> str:
        """Serve the replica's checked chunks at this address of the host; returns the URL for ``Endpoint``.

        Raises ``RunError`` when that is not possible.
        """
        ...

    def connect(self, holder: Endpoint) -> Link:
        """A link to a holder."""
        ...

    def close(self) -> None:
        """Stop serving."""
        ...
