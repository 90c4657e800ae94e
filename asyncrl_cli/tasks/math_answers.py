"""The ready task ``math``: answers that are equal in value are equal, by math-verify.

The row's ``answer`` is a number, an expression, LaTeX, or a worked solution that ends like GSM8K's, ``#### 42``.

math-verify limits its own time by SIGALRM, which works in a main thread only; rewards run in one.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args

from asyncrl_cli.data.prompts import Prompt
from asyncrl_cli.tasks.errors import TaskError
from asyncrl_cli.tasks.matching import text_field

Extract = Literal["any", "boxed", "last_number", "answer_tag"]
MARK = "####"
"""What stands before the answer in GSM8K's solutions."""
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


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

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """1.0 if the response's answer equals the row's, else 0.0.

        Raises ``MissingField``, and ``ValueError`` for a row whose answer is no mathematics.
        """
        module = _math_verify()
        truth = next(filter(None, self._readings(_after_mark(text_field(prompt, self._field)))), None)
        if truth is None:
            raise ValueError(f"the row's {self._field!r} is nothing that math-verify can read")
        answer = self._answer(response)
        if answer is None:
            return 0.0
        found = self._readings(answer) if answer is not response else [self._parsed(response)]
        return float(any(each and module.verify(truth, each, timeout_seconds=self._timeout_s) for each in found))

    def _answer(self, response: str) -> str | None:
        """The part of the response that math-verify is to read."""
        marked = _after_mark(response)
        if marked is not response:
            return marked
        if self._extract == "boxed":
            return _last_boxed(response)
        if self._extract == "any":
            return response
        found: list[str] = (_NUMBER if self._extract == "last_number" else _TAG).findall(response)
        return found[-1] if found else None

    def _readings(self, answer: str) -> Iterator[Any]:
        """What math-verify makes of a text that is an answer and nothing else: bare LaTeX first, then words."""
        number = answer.replace("$", "").strip()
        if _NUMBER.fullmatch(number):  # thousands are written with commas
            yield self._parsed(number.replace(",", ""))
            return
        if "$" not in answer and "\\boxed" not in answer:
            yield self._parsed(f"${answer}$")
        yield self._parsed(answer)

    def _parsed(self, text: str) -> Any:
        return _math_verify().parse(text, parsing_timeout=self._timeout_s)


def _after_mark(text: str) -> str:
    _, mark, tail = text.rpartition(MARK)
    return tail.strip() if mark else text


def _last_boxed(text: str) -> str | None:
    r"""The last ``\boxed{...}`` of a text, with its braces matched; None if there is none."""
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start, len(text) if start >= 0 else start):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0 and text[end] == "}":
            return text[start : end + 1]
    return None


@cache
def _math_verify() -> Any:
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise TaskError(f"the task math needs math-verify: {error}", mend="pip install 'asyncrl[math]'") from error
