"""The task ``bugfix_command``: the repositories and hidden tests of ``bugfix``, for an agent that others wrote.

The agent is a command, as in the task ``command``. It runs in the episode's sandbox, in the folder with the repository.

Invariant: of a row the command gets the first message alone. The row has the hidden tests, too; so the folder of the
spec, which may have the rows, cannot be read in the sandbox.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.sandbox.commands import BlockingSandbox, ShellSandbox
from asyncrl_cli.tasks.base import ModelAccess, RewardResult, Split
from asyncrl_cli.tasks.ready.bugfix.task import Bugfix, left_in
from asyncrl_cli.tasks.ready.command import CWD, Command


class BugfixByCommand:
    """The task ``bugfix_command``."""

    def __init__(self, command: str | Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> None:
        """``command`` and ``env``: as of ``Command``; the other options are those of ``Bugfix``.

        Raises ``TaskError``, and ``ValueError`` or ``TypeError`` for options that ``Bugfix`` does not take.
        """
        self._command = Command(command, env=env)
        self._bugfix = Bugfix(**options)
        self.name = self._command.name

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """As of ``Bugfix``."""
        return self._bugfix.prompts(split, size)

    def check_prompt(self, prompt: Prompt) -> None:
        """As of ``Bugfix``."""
        self._bugfix.check_prompt(prompt)

    def demonstration(self, rng: random.Random, clean: bool) -> Sequence[Message]:
        """As of ``Bugfix``: with its tool ``shell``, which the agent's own tools may differ from."""
        return self._bugfix.demonstration(rng, clean)

    async def run(self, prompt: Prompt, model: ModelAccess, sandbox: ShellSandbox) -> RewardResult:
        """Play one episode. Raises ``CommandFailed`` when the command ends with an error, and ``SandboxError``."""
        for name, text in prompt.fields["files"].items():
            await sandbox.write_file(f"{CWD}/{name}", text.encode())
        await self._command.play(Prompt(prompt.uid, prompt.content, {}), model, sandbox)
        blocking = BlockingSandbox(sandbox, asyncio.get_running_loop())

        def judge() -> RewardResult:
            return self._bugfix.judge_files(
                prompt, left_in(lambda name: blocking.read_file(f"{CWD}/{name}"), prompt.fields["files"])
            )

        return await asyncio.to_thread(judge)
