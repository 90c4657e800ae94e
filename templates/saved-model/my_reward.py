"""The reward of this task: 1.0 if the last number in the response is the answer."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reward(prompt: dict[str, Any], response: str) -> float:
    """1.0 for the right answer, 0.1 for a wrong number, 0.0 without one; reasoning in <think> does not count.

    ``prompt`` is the row of the JSON Lines file: every column except the prompt, here ``question`` and
    ``answer``. ``response`` is the generated text without special tokens. Return a finite number for every text,
    even an empty one. Accuracies count a reward of 1 or more as correct.
    """
    answer = response.rpartition("</think>")[2]
    numbers = NUMBER.findall(answer.replace(",", ""))
    if not numbers:
        return 0.0
    return 1.0 if float(numbers[-1]) == float(prompt["answer"]) else 0.1
