"""The task's environment: the policy guesses a digit, and is told if its guess was too low or too high."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl_cli.records.prompt import Message
from asyncrl_cli.tasks.base import Step


class GuessTheDigit:
    """The environment; each episode has its own instance."""

    def __init__(self, prompt: dict[str, Any], turns: int = 4) -> None:
        """``prompt`` is the row of the JSON Lines file; the other arguments come from `task.options`."""
        self._question = prompt["prompt"]
        self._secret = prompt["secret"]
        self._turns = turns

    def reset(self) -> Sequence[Message]:
        """The first messages to the policy."""
        return [{"role": "user", "content": self._question}]

    def step(self, reply: Message) -> Step:
        """Answer a guess. The rewards of all steps add up: 1.0 for the digit, and a little for any digit, which gives a
        model with random weights a direction."""
        self._turns -= 1
        guess = (reply.get("content") or "")[:1]
        if guess == str(self._secret):
            return Step(reward=1.0, done=True, metrics={"turns_left": float(self._turns)})
        answer = "?" if guess not in set("0123456789") else "low" if int(guess) < self._secret else "high"
        return Step([{"role": "user", "content": answer}], reward=0.0 if answer == "?" else 0.05, done=self._turns == 0)
