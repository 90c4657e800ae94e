"""Rows for `model.warm_start.data`: questions of both data sets, with replies that mostly guess."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from asyncrl_cli.tasks.base import Split
from asyncrl_cli.tasks.ready.gym import Gym

CAREFUL = 0.3
"""Share of the replies that work the answer out; the others guess."""


def rows(split: Split, size: int) -> Iterator[dict[str, str]]:
    """Yield rows with a `prompt` and a `completion`, half of them of each data set."""
    sums = Gym("chain_sum", min_terms=2, max_terms=3, min_digits=1, max_digits=1)
    words = Gym("spell_backward", min_word_len=3, max_word_len=5)
    rng = random.Random(0)
    for sum_prompt, word_prompt in zip(sums.prompts(split, size // 2), words.prompts(split, size // 2), strict=True):
        for prompt, reply in ((sum_prompt, _sum), (word_prompt, _word)):
            working, answer = reply(rng, str(prompt.content), rng.random() < CAREFUL)
            yield {"prompt": str(prompt.content), "completion": f"{working}<answer>{answer}</answer>"}


def _sum(rng: random.Random, question: str, careful: bool) -> tuple[str, str]:
    first, *terms = re.findall(r"[+-]?\d+", question.partition(":")[2].replace(" ", ""))
    if not careful:
        return "", str(rng.randint(-10, 20))
    total, working = int(first), ""
    for term in terms:
        working += f"{total}{term}={total + int(term)} "
        total += int(term)
    return working, str(total)


def _word(rng: random.Random, question: str, careful: bool) -> tuple[str, str]:
    word = question.rpartition(" ")[2]
    if not careful:
        return "", "".join(rng.sample(word, len(word)))
    return "".join(f"{index}{letter} " for index, letter in enumerate(word)), word[::-1]
