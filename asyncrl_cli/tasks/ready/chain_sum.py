"""Chain sums of single digits: a task that a 0.3M-parameter model learns by reinforcement in a minute.

The prompt is an expression. The response may have any text before the result; specs/models/chain-sum-0.3M can write
running totals of fixed width, but mostly guesses:

    7+6-0-9=    +6=+13-0=+13-9=+04#4

Invariant: a hash of an expression decides its split (``prompts.is_held_out``). Only ``_draw`` draws expressions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.base import Split
from asyncrl_cli.tasks.prompts import LazyPrompts, is_held_out
from asyncrl_cli.tasks.ready.gym import ROWS, procedural_data

_INTEGER = re.compile(r"\s*([+-]?[0-9]{1,18})\s*")


class ChainSum:
    """The task ``chain_sum``. Expressions and verifier are reasoning-gym's."""

    def __init__(self, min_terms: int = 2, max_terms: int = 12, decay: float = 0.8) -> None:
        """An expression has n terms, ``min_terms`` to ``max_terms``, with weight ``decay ** (n - min_terms)``.

        Raises ``ValueError`` for invalid options.
        """
        if not 2 <= min_terms <= max_terms:
            raise ValueError(f"2 <= min_terms <= max_terms must hold, not min_terms={min_terms}, max_terms={max_terms}")
        if not decay > 0:
            raise ValueError(f"decay must be positive, not {decay}")
        self._terms = range(min_terms, max_terms + 1)
        self._weights = [decay ** (terms - min_terms) for terms in self._terms]

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` rows of the split; row ``i`` is the same for every size. Expressions may repeat."""

        def row(index: int) -> Prompt:
            uid = f"chain_sum/{split}/{index}"
            entry = self._draw(random.Random(uid), split)
            return Prompt(uid, entry["metadata"]["expression"].replace(" ", "") + "=", entry)

        return LazyPrompts(size, row)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """1.0 if the sequence ended and the integer after the last ``#`` is the sum, else 0.0."""
        _, mark, tail = response.rpartition("#")
        answer = _INTEGER.fullmatch(tail)
        if not (finished and mark and answer):
            return 0.0
        # The data set's verifier gives partial credit, which counts as wrong here.
        return float(self._data[self._terms[0]].score_answer(str(int(answer[1])), dict(prompt.fields)) >= 1.0)

    @cached_property
    def _data(self) -> dict[int, Any]:
        """A reasoning-gym data set for each number of terms: a single one would draw the numbers uniformly."""
        return {
            terms: procedural_data("chain_sum", min_terms=terms, max_terms=terms, min_digits=1, max_digits=1)
            for terms in self._terms
        }

    def _draw(self, rng: random.Random, split: Split) -> dict[str, Any]:
        """The fields of a random expression of the split. The loop ends: both splits have every number of terms."""
        (terms,) = rng.choices(self._terms, self._weights)
        while True:
            entry = self._data[terms][rng.randrange(ROWS)]
            expression = entry["metadata"]["expression"]
            if is_held_out(expression) == (split == "eval"):
                metadata = {"source_dataset": "chain_sum", "expression": expression, "num_terms": terms}
                return {"answer": entry["answer"], "terms": terms, "metadata": metadata}
