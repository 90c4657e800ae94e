"""The ready tasks ``exact`` and ``regex``: the response is compared with a field of the prompt's row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl_cli.records.prompt import Prompt


class MissingField(Exception):
    """A row without the field that a task compares with; names it."""


def text_field(prompt: Prompt, name: str) -> str:
    """A field of the row, as text. Raises ``MissingField``, and for a field that is neither text nor number."""
    value = prompt.fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise MissingField(_missing(prompt.fields, name))
    return str(value)


def texts_field(prompt: Prompt, name: str) -> list[str]:
    """A field of the row that is a text, or a list of texts of which each is right. Raises ``MissingField``."""
    value = prompt.fields.get(name)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, str) for item in value):
        return list(value)
    return [text_field(prompt, name)]


def _missing(fields: Mapping[str, Any], name: str) -> str:
    if name in fields:
        return f"the row's field {name!r} is {type(fields[name]).__name__}, not text"
    return f"the row has no field {name!r}; it has {', '.join(fields) or 'none'}"


class ExactMatch:
    """The task ``exact``: 1.0 if the response is the row's field, else 0.0."""

    def __init__(self, field: str = "answer", ignore_case: bool = False, strip: bool = True) -> None:
        """``field`` holds the right text, or a list of right ones. ``strip`` ignores spaces at the ends,
        ``ignore_case`` ignores case."""
        self._field = field
        self._ignore_case = ignore_case
        self._strip = strip

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``MissingField`` for a row without right texts."""
        texts_field(prompt, self._field)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """Whether the response is one of the right texts. Raises ``MissingField``."""
        answers = texts_field(prompt, self._field)
        return float(self._plain(response) in map(self._plain, answers))

    def _plain(self, text: str) -> str:
        text = text.strip() if self._strip else text
        return text.casefold() if self._ignore_case else text


class RegexMatch:
    """The task ``regex``: 1.0 if the response has what a regular expression asks for, else 0.0.

    With groups in the pattern, the last match's first group is compared with the row's field, as ``exact`` does. A
    pattern without groups only has to match. A row's own pattern comes from ``pattern_field``.
    """

    def __init__(
        self,
        pattern: str | None = None,
        pattern_field: str | None = None,
        field: str = "answer",
        ignore_case: bool = False,
        strip: bool = True,
    ) -> None:
        """Python's regular expressions; ``.`` matches line ends, too. Raises ``ValueError`` for an impossible pattern.

        Args:
            pattern: searched for in the response.
            pattern_field: the field of the row that holds the pattern instead.
            field: what the first group is compared with.
            ignore_case, strip: as in ``exact``; ``ignore_case`` holds for the pattern, too.
        """
        if (pattern is None) == (pattern_field is None):
            raise ValueError("give one of pattern and pattern_field")
        self._flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
        try:
            self._pattern = None if pattern is None else re.compile(pattern, self._flags)
        except re.error as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from error
        self._pattern_field = pattern_field
        self._exact = ExactMatch(field, ignore_case, strip)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``MissingField`` for a row that lacks a field, and ``re.error`` for its impossible pattern."""
        if self._pattern_of(prompt).groups:
            self._exact.check_prompt(prompt)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """Whether the response matches. Raises what ``check_prompt`` raises."""
        pattern = self._pattern_of(prompt)
        matches = list(pattern.finditer(response))
        if not matches:
            return 0.0
        return self._exact.reward(prompt, matches[-1][1] or "", finished) if pattern.groups else 1.0

    def _pattern_of(self, prompt: Prompt) -> re.Pattern[str]:
        if self._pattern is not None:
            return self._pattern
        assert self._pattern_field is not None
        return re.compile(text_field(prompt, self._pattern_field), self._flags)
