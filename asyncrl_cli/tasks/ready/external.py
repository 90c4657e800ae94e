"""The ready task ``external``: programs outside of the run play the episodes.

The driver does not start them. It waits for their requests (orchestrator/outside_sessions.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import ModelAccess, Split

NO_PROMPT = "no prompt"
"""The placeholder's uid if programs bring their own prompts."""


class External:
    """The task ``external``."""

    async def run(self, prompt: Prompt, model: ModelAccess) -> None:
        """Not called; it makes the rollouts episodes."""
        raise NotImplementedError

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """A placeholder: without ``data.train.path``, programs bring their own prompts."""
        return [Prompt(NO_PROMPT, "The program outside of the run brings the prompt.")]
