"""What the generation client knows of an engine's process."""

from __future__ import annotations

from typing import Any, Protocol


class EngineHandle(Protocol):
    """One engine's actor, and the ones that take its place after it."""

    name: str
    node: str
    """The Ray node's id, once it has started."""
    actor: Any
    """Has the methods of ``RolloutWorker``, to be called with ``.remote()``."""

    async def lose(self, actor: Any, cause: str) -> None:
        """The actor is of no use any more: end its process. Raises ``RunError`` when that happened too often."""

    async def running(self) -> Any:
        """The present actor, started if it has yet to be. Raises ``RunError``."""

    def kill(self) -> None:
        """End the process, also one that hangs."""

    async def dismiss(self) -> None:
        """End it for good, in bounded time, and give its room back."""
