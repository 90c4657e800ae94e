"""Short words spelled backward, for tests.

The prompt is the word and ``>``, the response its letters from last to first:

    sun>    nus

Palindromes are excluded, because a copy of one would get the reward.

Invariant: the word itself decides whether it is held out (``prompts.is_held_out``). Only ``_draw`` draws words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.base import Split, Step
from asyncrl_cli.tasks.prompts import LazyPrompts, is_held_out
from asyncrl_cli.tasks.ready.gym import ROWS


class SpellBackward:
    """Uses reasoning-gym's words, in lower case."""

    def __init__(self, min_letters: int = 3, max_letters: int = 5) -> None:
        self._letters = (min_letters, max_letters)

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` rows of the split; row ``i`` is the same for every size. A word may fill several rows."""

        def row(index: int) -> Prompt:
            uid = f"spell_backward/{split}/{index}"
            word = self._draw(random.Random(uid), split)
            return Prompt(uid, f"{word}>", {"answer": word[::-1], "letters": len(word)})

        return LazyPrompts(size, row)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """Return 1.0 if the sequence ended and is the word backward, else 0.0."""
        return float(finished and response == prompt.fields["answer"])

    @cached_property
    def _words(self) -> list[str]:
        """Read from the package's file: an import of the package takes more than a second in every process."""
        shortest, longest = self._letters
        package = find_spec("reasoning_gym")
        assert package is not None and package.origin is not None
        words = Path(package.origin).with_name("data").joinpath("words3to10.txt").read_text().split()
        return [word for word in words if word.isalnum() and shortest <= len(word) <= longest]

    def _draw(self, rng: random.Random, split: Split) -> str:
        while True:
            word = random.Random(rng.randrange(ROWS)).choice(self._words).lower()
            usable = word.isascii() and word.isalpha() and word != word[::-1]
            if usable and is_held_out(word) == (split == "eval"):
                return word


class AnyResponse(SpellBackward):
    """Rewards that differ within a group also with random weights."""

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """Return one of five values between 0 and 1."""
        return len(response) % 5 / 4


class Ranked(SpellBackward):
    """Rewards the place of a response in its group, ordered by length."""

    async def rewards(self, prompt: Prompt, responses: Sequence[str], finished: Sequence[bool]) -> list[float]:
        """Return values from 0 up to 1."""
        order = sorted(responses, key=len)
        return [order.index(text) / len(order) for text in responses]


class Repeated(SpellBackward):
    """An episode of one to three turns; the length of each reply decides whether it goes on."""

    def environment(self, prompt: Prompt) -> Repetition:
        """Make the environment of one episode."""
        return Repetition(str(prompt.content))


@dataclass(slots=True)
class Repetition:
    """The environment of ``Repeated``."""

    word: str
    turns: list[str] = field(default_factory=list)

    def reset(self) -> list[Message]:
        """Return the first message."""
        return [{"role": "user", "content": self.word}]

    def step(self, reply: Message) -> Step:
        """Answer a reply with the same message, at most twice."""
        text = str(reply["content"])
        self.turns.append(text)
        done = len(self.turns) == 3 or len(text) % 3 == 0
        return Step([{"role": "user", "content": self.word}], reward=len(text) % 5 / 4, done=done)
