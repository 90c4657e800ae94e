"""The reward of this task: is the last number of the response the right one?"""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reward(prompt: dict[str, Any], response: str) -> float:
    """1.0 for the right answer, 0.1 for a wrong number, 0.0 without one; reasoning in <think> does not count.

    ``prompt`` is the row of the JSON Lines file: every column that is not the prompt, here ``question`` and
    ``answer``. ``response`` is the generated text without special tokens. Return a finite number for every text, an
    empty one too; a reward of at least 1 counts as correct in the accuracies that are shown.
    """
    answer = response.rpartition("</think>")[2]
    numbers = NUMBER.findall(answer.replace(",", ""))
    if not numbers:
        return 0.0
    return 1.0 if float(numbers[-1]) == float(prompt["answer"]) else 0.1
