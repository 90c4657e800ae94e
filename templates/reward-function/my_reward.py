"""The reward of this task: 1.0 if the response is the sum."""

from __future__ import annotations

from typing import Any


def reward(prompt: dict[str, Any], response: str) -> float:
    """1.0 for the right answer, else up to 0.2 for digits, which even a model with random weights can improve.

    ``prompt`` is the row of the JSON Lines file: ``prompt``, ``uid`` and every other key, here ``answer``.
    ``response`` is the generated text without the end token. Return a finite number for every text, even an
    empty one. Accuracies count a reward of 1 or more as correct.
    """
    if response == prompt["answer"]:
        return 1.0
    digits = sum(character in "0123456789" for character in response)
    return 0.2 * digits / max(1, len(response))
