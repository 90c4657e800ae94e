"""Rows for `model.warm_start.data`: sums, most of them with a guess, some with running totals.

Guesses are random numbers, which get no reward, so reinforcement finds the running totals. Correct guesses would be
rewarded, too, and the model would learn only to guess.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from asyncrl_cli.tasks.ready.chain_sum import ChainSum

CAREFUL = 0.4
"""Share of the rows with running totals."""
SLIP = 0.03
"""Probability that a running total is off by one."""
REPEAT = 0.25
"""Probability that the running totals are written once more, again and again."""
LONGEST_REPETITION = 184
"""Largest number of characters of repeated running totals."""


def rows(split: str, size: int) -> Iterator[dict[str, str]]:
    """Yield ``size`` rows with a prompt and a response."""
    rng = random.Random(0)
    for prompt in ChainSum().prompts("train", size):
        assert isinstance(prompt.content, str)
        terms = prompt.fields["terms"]
        if rng.random() < CAREFUL:
            response = worked_out(prompt.fields["metadata"]["expression"], rng)
        else:
            response = f"#{rng.randint(-9 * (terms - 1), 9 * terms)}"
        yield {"prompt": prompt.content, "response": response}


def worked_out(expression: str, rng: random.Random) -> str:
    """Return the running totals of an expression and the last total: for ``7 + 6 - 0``, ``+6=+13-0=+13#13``."""
    first_term, *operations = expression.split()
    total = int(first_term)
    working = ""
    for sign, term in zip(operations[::2], operations[1::2], strict=True):
        total += int(sign + term) + (rng.choice((-1, 1)) if rng.random() < SLIP else 0)
        working += f"{sign}{term}={total:+03d}"
    response = working
    while rng.random() < REPEAT and len(response) + 1 + len(working) <= LONGEST_REPETITION:
        response = f"{response}?{working}"
    return f"{response}#{total}"
