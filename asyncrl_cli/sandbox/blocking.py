"""A sandbox for code that runs in threads, as tools and environments do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from asyncrl_cli.sandbox.settings import NO_VARIABLES, CommandResult, ShellSandbox

T = TypeVar("T")


class BlockingSandbox:
    """The methods of a ``ShellSandbox``, which return when they are done. Not to be called in the event loop."""

    def __init__(self, sandbox: ShellSandbox, loop: asyncio.AbstractEventLoop) -> None:
        self.base_url = sandbox.base_url
        self._sandbox = sandbox
        self._loop = loop

    def run(self, command: str, *, time_s: float | None = None, env: Mapping[str, str] = NO_VARIABLES) -> CommandResult:
        """As ``ShellSandbox.run``."""
        return self._done(self._sandbox.run(command, time_s=time_s, env=env))

    def write_file(self, path: str, data: bytes) -> None:
        """As ``ShellSandbox.write_file``."""
        self._done(self._sandbox.write_file(path, data))

    def read_file(self, path: str) -> bytes:
        """As ``ShellSandbox.read_file``."""
        return self._done(self._sandbox.read_file(path))

    def _done(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        work.close()
        raise RuntimeError(f"call it in a thread: here it would block the event loop {running!r}")
