"""How a sandbox for commands is used. Its kind and its limits are in the spec (``SandboxSpec``).

async with open_sandbox(SandboxSpec(), gateway=model.base_url) as sandbox:
    await sandbox.write_file("fix.py", b"print(1 + 1)")
    result = await sandbox.run("python fix.py")     # result.output == "2\n", result.status == 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

WORK_FOLDER = "/sandbox"
"""Where commands start, inside. No folder of Python's packages may be below it, as it would be visible in there."""
GATEWAY_PORT = 18181
"""Of 127.0.0.1, inside: the gateway."""
NO_VARIABLES: Mapping[str, str] = {}

Kind = Literal["bubblewrap", "gvisor", "none"]
Stopped = Literal["", "time", "memory", "disk", "processes"]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended.

    Args:
        status: its exit status (128 + the signal's number, if one ended it), or None if it was stopped.
        output: what it printed on both streams, in order; the middle is omitted where it is long.
        stopped: the limit that it reached, if any: ``time``; ``memory``; ``disk``, no space or files are left;
            ``processes``, there were as many as there may be.
    """

    status: int | None
    output: str
    stopped: Stopped = ""


class ShellSandbox(Protocol):
    """A sandbox. Its files stay from one command to the next; its processes do not."""

    base_url: str | None
    """The gateway's, as seen inside; None without one."""

    async def run(
        self, command: str, *, time_s: float | None = None, env: Mapping[str, str] = NO_VARIABLES
    ) -> CommandResult:
        """Run a line in a fresh shell (bash where there is one) in the work folder, and end what it has left running.

        One runs at a time: others wait. A cancelled one is stopped. Raises ``SandboxError`` once the sandbox is gone.
        """
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, with its folders; ``path`` is relative to the work folder.

        Raises ``OSError`` for a path that leaves it or leads through a link, and for want of space.
        """
        ...

    async def read_file(self, path: str) -> bytes:
        """The content of a file; ``path`` is relative to the work folder.

        Raises ``OSError`` for a path that leaves it or leads through a link, and for what is not a file.
        """
        ...

    async def close(self) -> None:
        """End its processes and remove its files. May be called again."""
        ...
