"""The generation client's interface to an engine's process."""

from __future__ import annotations

from typing import Any, Protocol


class EngineHandle(Protocol):
    """One engine's actor, and the actors that replace it."""

    name: str
    node: str
    """The Ray node's id, once it has started."""
    actor: Any
    """Has the methods of ``RolloutWorker``, to be called with ``.remote()``."""

    async def lose(self, actor: Any, cause: str) -> None:
        """The actor does not work any more: end its process. Raises ``RunError`` when this happened too often."""

    async def running(self) -> Any:
        """The present actor; starts it if necessary. Raises ``RunError``."""

    def kill(self) -> None:
        """End the process, also one that hangs."""

    async def dismiss(self) -> None:
        """End the engine permanently, in bounded time, and release its resources."""
