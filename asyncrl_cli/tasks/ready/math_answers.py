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

from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.tasks.ready.matching import text_field
from asyncrl_cli.tasks.ready.math_forms import Answer, Unreadable, closing_brace, is_prose, read, same

Extract = Literal["any", "boxed", "last_number", "answer_tag"]
MARK = "####"
"""Precedes the answer in GSM8K's solutions."""
# A minus after a digit, a letter or a bracket subtracts; it is not a sign.
_NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-−])?\$?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?")
BOXED = "\\boxed{"
_PHRASE = re.compile(r"answer is|answer:|final:", re.IGNORECASE)
_SENTENCE_END = re.compile(
    r"\n|[.!?]\s+(?=\S)|,?\s(?:because|since|as)\s|,?\si\.e\.|,\s(?!(?:and|or)\s+[^a-z])(?=[a-z]{2})"
)
"""Where a stated answer ends: with the sentence, or a comma and a word, but not in "1, 2, and 3"."""
_UNCLEAR = re.compile(r"\b(?:not|either|neither|or|between)\b|n't", re.IGNORECASE)
_REMARK = re.compile(r"(?<=\d)\.?\s+\([^()a-zA-Z\\]*\)[\s.]*$")
"""A calculation behind a number: "9 (3*3)"."""
_TAKEN_BACK = re.compile(r"\s(?:wait|hmm+|actually|sorry|correction|instead|no(?=\s*[,:;.]))(?!\w)", re.IGNORECASE)
LONGEST_SEARCHED = 10_000
"""Characters at the end of a response in which a plain expression is looked for: the answer is at the end."""


class MathAnswers:
    """The task ``math``."""

    def __init__(self, field: str = "answer", extract: Extract = "any", timeout_s: int = 5) -> None:
        r"""Args:
            field: of the row, with the right answer.
            extract: where a response has its answer: ``any`` leaves that to math-verify (the last of boxed, LaTeX and
                plain expressions), ``boxed`` takes the last ``\boxed{}``, ``last_number`` the last number, and
                ``answer_tag`` the text in the last ``<answer>`` tags. GSM8K's mark comes before all but ``boxed``: the
                rest of the line of the last ``####``, unless a ``\boxed{}`` follows or it is a heading.
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
            raise Unreadable(f"the field {self._field!r} is not a readable answer: {error}") from None

    def _answers(self, response: str) -> Iterator[str]:
        """The parts of the response that may be its answer."""
        _, mark, rest = response.rpartition(MARK)
        boxed = _last_boxed(response)
        marked = _marked(rest, alone=boxed is None) if mark else None
        if self._extract == "boxed" or (mark and _last_boxed(rest) is not None):
            if boxed is not None:
                yield boxed
        elif marked is not None:
            yield marked
        elif self._extract == "last_number":
            yield from deque(_NUMBER.findall(response), maxlen=1)
        elif self._extract == "answer_tag":
            before, tag, _rest = response.rpartition("</answer>")
            if tag and "<answer>" in before:
                yield before.rpartition("<answer>")[2]
        elif boxed is not None:
            yield boxed
        else:
            yield from self._in_prose(response)

    def _in_prose(self, response: str) -> Iterator[str]:
        """What follows the last "answer is", or else the last expression; nothing where the response retracts that."""
        tail = response[-LONGEST_SEARCHED:]
        phrase = deque(_PHRASE.finditer(tail), maxlen=1)
        if phrase:
            tail = tail[phrase[0].end() :].replace("**", "").strip(" *_:\n")
            if _TAKEN_BACK.search(tail):
                return
            tail = _SENTENCE_END.split(tail, maxsplit=1)[0].strip(" *_")
            tail = _REMARK.sub("", tail)
        try:
            answer = read(tail if phrase else response)
        except Unreadable:
            answer = None
        if answer is not None:
            yield answer.text
        if (answer is None or is_prose(answer)) and not (phrase and _UNCLEAR.search(tail)):
            yield from (found for found in self._parsed(tail) if isinstance(found, str))

    def _parsed(self, text: str) -> Any:
        return _math_verify().parse(text, parsing_timeout=self._timeout_s)

    def _equal(self, one: Any, other: Any) -> bool:
        verify = _math_verify().verify
        return bool(verify(one, other, timeout_seconds=self._timeout_s, allow_set_relation_comp=True))


def _after_mark(text: str) -> str:
    return text.rpartition(MARK)[2].strip()


def _marked(rest: str, alone: bool) -> str | None:
    """The answer on the mark's line, whose ``rest`` begins after it; None for a heading.

    Words are an answer if they are ``alone``, without a box in the response, and end it.
    """
    line, _, after = rest.strip(" ").partition("\n")
    try:
        answer = read(line.strip(" *_"))
    except Unreadable:
        return None
    is_answer = not is_prose(answer) or (alone and not after.strip() and not _PHRASE.search(line))
    return line.strip(" *_") if is_answer else None


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
        raise TaskError(
            f"the task math needs math-verify: {error}", location="task.use", hint="pip install 'asyncrl[math]'"
        ) from error
