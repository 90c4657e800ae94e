"""The reward of this task: is the response the sum?"""

from __future__ import annotations

from typing import Any


def reward(prompt: dict[str, Any], response: str) -> float:
    """1.0 for the right answer, and up to 0.2 for digits, so that even a model with random weights can improve.

    ``prompt`` is the row of the JSON Lines file: ``prompt``, ``uid`` and every other key, here ``answer``.
    ``response`` is the generated text without the end token. Return a finite number for every text, an empty
    one too; a reward of at least 1 counts as correct in the accuracies that are shown.
    """
    if response == prompt["answer"]:
        return 1.0
    digits = sum(character in "0123456789" for character in response)
    return 0.2 * digits / max(1, len(response))
