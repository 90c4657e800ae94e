"""What a task is: prompts, a reward, and (for a warm start) demonstrations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from asyncrl_cli.data.prompts import Prompt

Split = Literal["train", "eval"]

CORRECT = 1.0
"""A reward of at least this counts as correct in the accuracies shown."""


@runtime_checkable
class Task(Protocol):
    """A task scores responses. The one method every task has."""

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """The reward of one response (any finite float; 1.0 counts as correct in the accuracies shown).

        ``finished`` is false when the response was cut at its token limit.
        """
        ...


@runtime_checkable
class PromptTask(Task, Protocol):
    """A task that makes its own prompts."""

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """``size`` prompts of a split, the same ones at every call. The splits share no prompt."""
        ...


@runtime_checkable
class DemonstrationTask(Task, Protocol):
    """A task that can show how it is done, for a supervised warm start."""

    def demonstration(self, rng: random.Random, clean: bool) -> tuple[str, str]:
        """A prompt's text (never one of the ``eval`` split) and a response, without the end token.

        ``clean`` asks for a faultless, careful one; otherwise it is drawn from the task's mixture.
        """
        ...
