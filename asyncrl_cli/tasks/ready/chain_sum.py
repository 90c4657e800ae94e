"""Chain sums of single digits: a task that a 0.3M-parameter model learns by reinforcement in a minute.

The prompt is the expression, the response works through it in running totals of fixed width:

    7+6-0-9=    +6=+13-0=+13-9=+04#4

The demonstrations make it learnable by reward alone: they teach a model that *can* write the running totals and mostly
does not. Most of them answer directly with a random number, which gets no reward, so reinforcement finds the running
totals. The numbers are random, not right: with right ones a direct answer would get the reward, too, and the model
would learn nothing but that.

Invariant: an expression is held out or trained on by its value (``prompts.is_held_out``), in prompts and in
demonstrations; ``_draw`` alone draws expressions.
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

LONGEST_REPETITION = 184
"""Characters of a response past which a demonstration does not repeat its working once more."""

_INTEGER = re.compile(r"\s*([+-]?[0-9]{1,18})\s*")


class ChainSum:
    """The task ``chain_sum``. Expressions and verifier are reasoning-gym's."""

    def __init__(
        self,
        min_terms: int = 2,
        max_terms: int = 12,
        decay: float = 0.8,
        careful: float = 0.4,
        slip: float = 0.03,
        repeat: float = 0.25,
    ) -> None:
        """``min_terms`` to ``max_terms`` terms, n of them with weight ``decay ** (n - min_terms)``.

        The mixture of demonstrations: a share ``careful`` is worked out, and the rest guess. A worked total is
        off by one with probability ``slip``; the working is repeated, again and again, with probability
        ``repeat``. Raises ``ValueError`` for impossible values.
        """
        if not 2 <= min_terms <= max_terms:
            raise ValueError(f"2 <= min_terms <= max_terms must hold, not min_terms={min_terms}, max_terms={max_terms}")
        if not decay > 0:
            raise ValueError(f"decay must be positive, not {decay}")
        for name, share in (("careful", careful), ("slip", slip), ("repeat", repeat)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {share}")
        self._terms = range(min_terms, max_terms + 1)
        self._weights = [decay ** (terms - min_terms) for terms in self._terms]
        self._careful = careful
        self._slip = slip
        self._repeat = repeat

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """``size`` rows of the split; row ``i`` is the same at every size. One expression may fill several rows."""

        def row(index: int) -> Prompt:
            uid = f"chain_sum/{split}/{index}"
            entry = self._draw(random.Random(uid), split)
            return Prompt(uid, _prompt_text(entry["metadata"]["expression"]), entry)

        return LazyPrompts(size, row)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """1.0 if the sequence ended and the integer after the last ``#`` is the sum, else 0.0."""
        _, mark, tail = response.rpartition("#")
        answer = _INTEGER.fullmatch(tail)
        if not (finished and mark and answer):
            return 0.0
        # The data set's own verifier: partial credit counts as wrong.
        return float(self._data[self._terms[0]].score_answer(str(int(answer[1])), dict(prompt.fields)) >= 1.0)

    def demonstration(self, rng: random.Random, clean: bool) -> tuple[str, str]:
        """An expression of the train split, and its faultless working (``clean``) or a draw from the mixture."""
        entry = self._draw(rng, "train")
        expression = entry["metadata"]["expression"]
        if clean:
            steps, total = _working(expression, rng, slip=0.0)
            return _prompt_text(expression), f"{steps}#{total}"
        if rng.random() >= self._careful:
            guess = rng.randint(-9 * (entry["terms"] - 1), 9 * entry["terms"])
            return _prompt_text(expression), f"#{guess}"
        steps, total = _working(expression, rng, self._slip)
        response = steps
        while rng.random() < self._repeat and len(response) + 1 + len(steps) <= LONGEST_REPETITION:
            response = f"{response}?{steps}"
        return _prompt_text(expression), f"{response}#{total}"

    @cached_property
    def _data(self) -> dict[int, Any]:
        """One reasoning-gym data set for each number of terms: its own draw of that number is uniform."""
        return {
            terms: procedural_data("chain_sum", min_terms=terms, max_terms=terms, min_digits=1, max_digits=1)
            for terms in self._terms
        }

    def _draw(self, rng: random.Random, split: Split) -> dict[str, Any]:
        """The fields of a random expression of the split. It ends: each number of terms has expressions in both."""
        (terms,) = rng.choices(self._terms, self._weights)
        while True:
            entry = self._data[terms][rng.randrange(ROWS)]
            expression = entry["metadata"]["expression"]
            if is_held_out(expression) == (split == "eval"):
                metadata = {"source_dataset": "chain_sum", "expression": expression, "num_terms": terms}
                return {"answer": entry["answer"], "terms": terms, "metadata": metadata}


def _prompt_text(expression: str) -> str:
    return expression.replace(" ", "") + "="


def _working(expression: str, rng: random.Random, slip: float) -> tuple[str, int]:
    """The running totals of ``7 + 6 - 0``, as ``+6=+13-0=+13``, and the last of them."""
    first, *rest = expression.split()
    total = int(first)
    steps = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(sign + term)
        if slip and rng.random() < slip:
            total += rng.choice((-1, 1))
        steps.append(f"{sign}{term}={total:+03d}")
    return "".join(steps), total
