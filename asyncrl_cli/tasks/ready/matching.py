"""The ready task ``exact``, which compares the response with a field of the prompt's row, and ``prompts``."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from asyncrl_cli.data.rows import paths_in, type_name, value_at
from asyncrl_cli.records.prompt import Prompt


class MissingField(Exception):
    """The row lacks a field that the task needs; the message names it."""


def texts_field(prompt: Prompt, name: str) -> list[str]:
    """The texts of a field that has a text, a number, or a list of these. Raises ``MissingField``, also for []."""
    try:
        value = value_at(prompt.fields, name)
    except KeyError:
        columns = ", ".join(paths_in(prompt.fields)) or "none"
        raise MissingField(f"the row has no field {name!r}; it has {columns}") from None
    values = value if isinstance(value, (list, tuple)) else [value]
    if values and all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in values):
        return [text for item in values for text in _texts(item)]
    fault = "an empty list" if value in ([], ()) else type_name(value)
    if isinstance(value, Mapping) and value:
        fault += f" with {', '.join(paths_in(value, f'{name}.'))}"
    raise MissingField(f"the row's field {name!r} is {fault}, not text, a number or a list of these")


def _texts(value: str | float) -> list[str]:
    """The text, or the ways to write a number: pandas turns 18 into 18.0 and 0 into -0.0, and 1e-07 is 0.0000001."""
    if isinstance(value, float):
        plain = f"{Decimal(repr(value or 0.0)):f}"
        return list(dict.fromkeys((plain.removesuffix(".0"), plain, repr(value))))
    return [str(value)]


class ExactMatch:
    """The task ``exact``: 1.0 if the response is the row's field, apart from white space around it, else 0.0."""

    def __init__(self, field: str = "answer", ignore_case: bool = False) -> None:
        self._field = field
        self._ignore_case = ignore_case

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``MissingField`` for a row without an answer, or with an empty one."""
        self._answers(prompt)

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        """1.0 if the response is one of the row's answers, else 0.0. Raises ``MissingField``."""
        return float(self._plain(response) in self._answers(prompt))

    def _answers(self, prompt: Prompt) -> list[str]:
        answers = [self._plain(text) for text in texts_field(prompt, self._field)]
        if "" in answers:
            raise MissingField(f"the row's field {self._field!r} is empty, so an empty response would be right")
        return answers

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._ignore_case else text.strip()


class Prompts:
    """The ready task ``prompts``, for distillation: every reward is 0."""

    def reward(self, prompt: Prompt, response: str, finished: bool) -> float:
        return 0.0
