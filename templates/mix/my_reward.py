"""The reward of one of the two tasks: 1.0 for the word in capitals."""

from __future__ import annotations

from typing import Any


def reward(prompt: dict[str, Any], response: str) -> float:
    """1.0 for the word, else up to 0.2 for capital letters, which even a model with random weights can improve."""
    if response == prompt["answer"]:
        return 1.0
    capitals = sum("A" <= character <= "Z" for character in response)
    return 0.2 * capitals / max(1, len(response))
