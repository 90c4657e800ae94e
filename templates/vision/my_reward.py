"""The reward of this task: does the response begin with the right answer?"""

from __future__ import annotations

from typing import Any


def reward(prompt: dict[str, Any], response: str) -> float:
    """1.0 if the response's first word is the answer, 0.1 if the answer is somewhere in it, else 0.0.

    ``prompt`` is the row of the JSON Lines file without its image: here ``question`` and ``answer``. Return a finite
    number for every text, an empty one too; a reward of at least 1 counts as correct in the accuracies that are shown.
    """
    answer = str(prompt["answer"])
    if response.split()[:1] == [answer]:
        return 1.0
    return 0.1 if answer in response else 0.0
