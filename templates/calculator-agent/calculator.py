"""Arithmetic with a calculator: a 0.3M-parameter model learns to use a tool.

The prompt is a sum of two to four terms; the first two may be multiplied. The policy may call the tool ``calc``, which
does one operation, any number of times. Its answer follows a ``#``:

    user       37*48-5=
    assistant  (calls calc with e = 37*48)
    tool       1776
    assistant  (calls calc with e = 1776-5)
    tool       1771
    assistant  #1771

The rows of ``demonstrations`` teach a model that can use the tool step by step but mostly guesses; the reward teaches
the rest.

Invariant: a hash of an expression decides its split (``prompts.is_held_out``). Only ``_draw`` draws expressions.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.tasks.base import Split, Step
from asyncrl_cli.tasks.prompts import LazyPrompts, is_held_out
from asyncrl_cli.tasks.tools import call_message, result_message

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "One multiplication, addition or subtraction of integers.",
        "parameters": {
            "type": "object",
            "properties": {"e": {"type": "string", "description": "such as 12*34, 408-56 or -7+9"}},
            "required": ["e"],
        },
    },
}
CAREFUL = 0.3
"""Share of the demonstrations' first replies that use the tool; the others guess."""
SLIP = 0.05
"""Probability that a demonstrated call has a wrong digit, or that the answer comes too early."""
_OPERATION = re.compile(r"\s*(-?\d{1,12})([*+-])(\d{1,12})\s*")
_ANSWER = re.compile(r"[^#]*#\s*([+-]?\d{1,18})\s*")


class Calculator:
    """The task."""

    def __init__(self, min_terms: int = 2, max_terms: int = 4) -> None:
        """An expression has ``min_terms`` to ``max_terms`` terms. Raises ``ValueError`` for invalid options."""
        if not 2 <= min_terms <= max_terms:
            raise ValueError(f"2 <= min_terms <= max_terms must hold, not min_terms={min_terms}, max_terms={max_terms}")
        self._terms = (min_terms, max_terms)

    def prompts(self, split: Split, size: int) -> Sequence[Prompt]:
        """Return ``size`` rows of the split; row ``i`` is the same for every size. Expressions may repeat."""

        def row(index: int) -> Prompt:
            uid = f"calculator/{split}/{index}"
            first, operations = self._draw(random.Random(uid), split)
            answer = _totals(first, operations)[-1]
            return Prompt(uid, _question(first, operations), {"answer": answer, "terms": len(operations) + 1})

        return LazyPrompts(size, row)

    def environment(self, prompt: Prompt) -> CalculatorEpisode:
        """Make the environment of one episode."""
        return CalculatorEpisode(prompt)

    def demonstration(self, rng: random.Random, clean: bool) -> list[Message]:
        """A conversation about an expression of the train split, up to some reply of the policy. The reply is faultless
        (``clean``), or often a guess."""
        first, operations = self._draw(rng, "train")
        totals = _totals(first, operations)
        done = rng.randint(0, len(operations))  # calls before the reply
        messages: list[Message] = [{"role": "user", "content": _question(first, operations)}]
        for index in range(done):
            call = _call(index, f"{totals[index]}{operations[index]}")
            messages += [call, result_message(index, str(totals[index + 1]))]
        slips = not clean and rng.random() < SLIP
        if not clean and done == 0 and rng.random() >= CAREFUL:
            reply = _answer(rng.randint(-99, 10 ** rng.randint(2, 4)))
        elif done == len(operations) or (slips and done):
            reply = _answer(totals[done])
        else:
            expression = f"{totals[done]}{operations[done]}"
            reply = _call(done, f"{expression}{rng.randint(0, 9)}" if slips else expression)
        return [*messages, reply]

    def _draw(self, rng: random.Random, split: Split) -> tuple[int, list[str]]:
        """A random expression of the split: its first term, and operations such as ``*48`` and ``-5``."""
        while True:
            first = rng.randint(2, 99)
            signs = [rng.choice("*+-"), *(rng.choice("+-") for _ in range(rng.randint(*self._terms) - 2))]
            operations = [f"{sign}{rng.randint(2, 99)}" for sign in signs]
            if is_held_out(_question(first, operations)) == (split == "eval"):
                return first, operations


def demonstrations(split: Split, size: int, clean: bool = False) -> Iterator[dict[str, Any]]:
    """Yield rows for `model.warm_start.data`: conversations that end with a reply to learn."""
    calculator, rng = Calculator(), random.Random(0)
    for _ in range(size):
        yield {"messages": calculator.demonstration(rng, clean)}


class CalculatorEpisode:
    """Answers tool calls until a reply has none, which it scores."""

    tools = (TOOL,)

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._calls = 0

    def reset(self) -> Sequence[Message]:
        return [{"role": "user", "content": self._prompt.content}]

    def step(self, reply: Message) -> Step:
        """Return the tool's results, or the reward: 1.0 if the integer after the only ``#`` is right, else 0.0."""
        if calls := reply.get("tool_calls"):
            self._calls += len(calls)
            return Step([{"role": "tool", "tool_call_id": call["id"], "content": _calculated(call)} for call in calls])
        answer = _ANSWER.fullmatch(reply.get("content") or "")
        right = answer is not None and int(answer[1]) == self._prompt.fields["answer"]
        return Step(reward=float(right), done=True, metrics={"tool_calls": float(self._calls)})


def _question(first: int, operations: Sequence[str]) -> str:
    return f"{first}{''.join(operations)}="


def _totals(first: int, operations: Sequence[str]) -> list[int]:
    """The running totals, beginning with the first term. They are right because only the first operation multiplies."""
    totals = [first]
    for operation in operations:
        totals.append(_apply(totals[-1], operation[0], int(operation[1:])))
    return totals


def _apply(left: int, sign: str, right: int) -> int:
    return left * right if sign == "*" else left + right if sign == "+" else left - right


def _calculated(call: Any) -> str:
    try:
        expression = json.loads(call["function"]["arguments"])["e"]
        operation = _OPERATION.fullmatch(expression)
    except (ValueError, KeyError, TypeError):
        operation = None
    if operation is None or call["function"]["name"] != "calc":
        return "error"
    return str(_apply(int(operation[1]), operation[2], int(operation[3])))


def _call(index: int, expression: str) -> Message:
    return call_message(index, "calc", {"e": expression})


def _answer(number: int) -> Message:
    return {"role": "assistant", "content": f"#{number}"}
