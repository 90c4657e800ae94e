"""The reward of this task: 1.0 if the response begins with the answer."""

from __future__ import annotations

from typing import Any


def reward(prompt: dict[str, Any], response: str) -> float:
    """1.0 if the response's first word is the answer, 0.1 if the answer is somewhere in it, else 0.0.

    ``prompt`` is the row of the JSON Lines file without its image: here ``question`` and ``answer``. Return a finite
    number for every text, even an empty one. Accuracies count a reward of 1 or more as correct.
    """
    answer = str(prompt["answer"])
    if response.split()[:1] == [answer]:
        return 1.0
    return 0.1 if answer in response else 0.0
