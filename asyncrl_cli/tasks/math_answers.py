"""The ready task ``math``: answers that are equal in value are equal, by math-verify.

The row's ``answer`` is a number, an expression, LaTeX, or a worked solution that ends like GSM8K's, ``#### 42``.

math-verify limits its own time by SIGALRM, which works in a main thread only; rewards run in one.
"""

from __future__ import annotations

import importlib
import re
import time
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.tasks.errors import TaskError
from asyncrl_cli.tasks.matching import text_field
from asyncrl_cli.tasks.math_forms import Answer, Unreadable, closing_brace, read, same

Extract = Literal["any", "boxed", "last_number", "answer_tag"]
MARK = "####"
"""What stands before the answer in GSM8K's solutions."""
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
BOXED = "\\boxed{"
PHRASES = ("answer is", "answer:")
LONGEST_SEARCHED = 10_000
"""Characters at the end of a response in which a plain expression is looked for: the answer stands at the end."""


class MathAnswers:
    """The task ``math``."""

    def __init__(self, field: str = "answer", extract: Extract = "any", timeout_s: int = 5) -> None:
        r"""Args:
            field: of the row, with the right answer.
            extract: where a response says its answer: ``any`` leaves that to math-verify (the last of boxed, LaTeX and
                plain expressions), ``boxed`` takes the last ``\boxed{}``, ``last_number`` the last number, and
                ``answer_tag`` the text in the last ``<answer>`` tags. GSM8K's mark works in all: what stands after the
                response's last ``####`` comes first.
            timeout_s: seconds for parsing, and again for comparing; an answer that takes longer is wrong.

        Raises ``TaskError`` where math-verify is not installed, ``ValueError`` for impossible values.
        """
        if extract not in get_args(Extract):
            raise ValueError(f"extract must be one of {', '.join(get_args(Extract))}, not {extract!r}")
        if timeout_s < 1:
            raise ValueError(f"timeout_s must be 1 or more, not {timeout_s}")
        self._field = field
        self._extract = extract
        self._timeout_s = timeout_s
        _math_verify()

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``MissingField`` or ``Unreadable`` for a row whose answer no response could have."""
        self._truth(prompt)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """1.0 if the response's answer equals the row's, else 0.0. Raises what ``check_prompt`` raises."""
        truth = self._truth(prompt)
        deadline = time.monotonic() + self._timeout_s

        def equal(one: str, other: str) -> bool:
            if time.monotonic() > deadline:
                return False
            values = [self._parsed(f"${text}$") for text in (one, other)]
            return all(values) and self._equal(*values)

        for text in self._answers(response):
            try:
                if same(truth, read(text), equal):
                    return 1.0
            except Unreadable:
                continue
        return 0.0

    def _truth(self, prompt: Prompt) -> Answer:
        try:
            return read(_after_mark(text_field(prompt, self._field)))
        except Unreadable as error:
            raise Unreadable(f"the field {self._field!r} is no answer that can be read: {error}") from None

    def _answers(self, response: str) -> Iterator[str]:
        """The parts of the response that may be its answer."""
        if MARK in response:
            yield _after_mark(response)
        elif self._extract == "last_number":
            yield from deque(_NUMBER.findall(response), maxlen=1)
        elif self._extract == "answer_tag":
            before, tag, _rest = response.rpartition("</answer>")
            if tag and "<answer>" in before:
                yield before.rpartition("<answer>")[2]
        elif (boxed := _last_boxed(response)) is not None:
            yield boxed
        elif self._extract == "any":
            yield response
            tail = response[-LONGEST_SEARCHED:]
            place = max(
                tail.lower().rfind(phrase) + len(phrase) if phrase in tail.lower() else -1 for phrase in PHRASES
            )
            if place >= 0:
                yield tail[place:].strip().partition("\n")[0]
            yield from (found for found in self._parsed(tail) if isinstance(found, str))

    def _parsed(self, text: str) -> Any:
        return _math_verify().parse(text, parsing_timeout=self._timeout_s)

    def _equal(self, one: Any, other: Any) -> bool:
        verify = _math_verify().verify
        return bool(verify(one, other, timeout_seconds=self._timeout_s, allow_set_relation_comp=True))


def _after_mark(text: str) -> str:
    return text.rpartition(MARK)[2].strip()


def _last_boxed(text: str) -> str | None:
    r"""What is in the last ``\boxed{...}`` of a text; None if there is none that is closed."""
    start = text.rfind(BOXED)
    end = closing_brace(text, start + len(BOXED) - 1) if start >= 0 else None
    return None if end is None else text[start + len(BOXED) : end]


@cache
def _math_verify() -> Any:
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise TaskError(f"the task math needs math-verify: {error}", mend="pip install 'asyncrl[math]'") from error
