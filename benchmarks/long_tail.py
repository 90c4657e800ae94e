"""A task with a long tail of answer lengths: most answers are short, a few are twenty times as long.

The prompt is one letter. A demonstration answers `s` with about 8 dots, `m` with about 32 and `l` with about 160. The
lengths have a geometric distribution, so a warm-started model ends an answer with the same probability at every token.
An even number of dots is rewarded, so rewards differ in most groups.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import Split

MEANS = {"s": 8, "m": 32, "l": 160}
SHARES = {"s": 0.80, "m": 0.15, "l": 0.05}
LONGEST = 250


class LongTail:
    """See the module's docstring."""

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        rng = random.Random(split)
        letters = rng.choices(list(SHARES), list(SHARES.values()), k=size)
        return [Prompt(f"{split}/{index}", letter) for index, letter in enumerate(letters)]

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        return float(len(response) % 2 == 0)


def demonstrations(split: Split, size: int) -> Iterator[dict[str, str]]:
    """Yield rows for `model.warm_start.data`."""
    rng = random.Random(0)
    for _ in range(size):
        letter = rng.choice(list(MEANS))
        length = 1
        while length < LONGEST and rng.random() > 1 / MEANS[letter]:
            length += 1
        yield {"prompt": letter, "response": "." * length}
