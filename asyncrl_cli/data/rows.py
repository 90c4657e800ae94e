"""From a row of any source to a prompt.

Invariant: a prompt follows from its row, the row's number and the form alone. So a source that is read row by row when
it is asked gives the prompts of one that is read whole, under the same uids, in every epoch and after every restart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.checks import fault_of
from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.spec.data_sources import template_columns

UID = "uid"
"""The column that may name rows without being asked for."""
Unit = Literal["line", "row"]
"""What a source counts, from 1."""


@dataclass(frozen=True, slots=True)
class RowForm:
    """Which columns a prompt is made of (the keys of ``SplitSpec`` by the same names)."""

    prompt_column: str = "prompt"
    uid_column: str = UID
    template: str | None = None
    system: str | None = None
    check: Callable[[Prompt], None] | None = None
    """The task's own look at a prompt; raises what is wrong with it."""

    @property
    def needed(self) -> frozenset[str]:
        """The columns that every row must have."""
        content = template_columns(self.template) if self.template is not None else {self.prompt_column}
        return frozenset(content if self.uid_column == UID else {*content, self.uid_column})

    def prompt(self, row: Mapping[str, Any], source: str, unit: Unit, number: int, raw: bytes | None = None) -> Prompt:
        """The prompt of row ``number`` of ``source``, named by ``raw`` (its JSON if not said) when it has no uid.

        Raises ``DataError`` that names the row when it is no prompt.
        """

        def refuse(fault: str, hint: str) -> NoReturn:
            raise DataError(f"the row {fault}", location=f"{source}:{number}", hint=hint)

        for column in sorted(self.needed - row.keys()):
            refuse(f"has no `{column}`", f"add it; the row's keys are {', '.join(row) or 'none'}")
        taken = {self.uid_column} if self.template is not None else {self.uid_column, self.prompt_column}
        try:
            fields = {str(key): json_value(value) for key, value in row.items() if key not in taken}
        except TypeError as error:
            refuse(f"has a value that JSON cannot say: {error}", "make it text, a number, a list or a mapping")
        if self.template is None:
            content = self._content(row[self.prompt_column], refuse)
        else:
            for column in sorted(template_columns(self.template)):
                if row[column] is None:
                    refuse(f"has a `{column}` that is null", "fill it in, or leave the row out")
            try:
                content = self.template.format_map(row)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                refuse(f"does not fit the template: {type(error).__name__}: {error}", "change the template, or the row")
            if not content:
                refuse("makes an empty prompt", "change the template, or the row")
        uid = row.get(self.uid_column)
        if isinstance(uid, int) and not isinstance(uid, bool):
            uid = str(uid)
        if uid is None and self.uid_column == UID:
            raw = json.dumps(json_value(row), sort_keys=True).encode() if raw is None else raw
            uid = f"{unit}{number}-{hashlib.blake2b(raw, digest_size=6).hexdigest()}"
        elif not isinstance(uid, str) or not uid:
            hint = "make it a text that is not empty, or leave it out"
            refuse(f"has a `{self.uid_column}` that is {kind(uid)}", hint)
        return self.checked(Prompt(uid, self._with_system(content, refuse), fields), f"{source}:{number}")

    def checked(self, prompt: Prompt, location: str) -> Prompt:
        """The prompt. Raises ``DataError`` when it cannot be encoded or recorded, or the task cannot score it."""
        if fault := fault_of(prompt):
            raise DataError(f"the row {prompt.uid!r} {fault[0]}", location=location, hint=fault[1])
        if self.check is not None:
            try:
                self.check(prompt)
            except Exception as error:  # of the user's task, too
                raise DataError(
                    f"the task cannot score the row {prompt.uid!r}: {error}",
                    location=location,
                    hint="correct the row or leave it out; task.options may name another field",
                ) from error
        return prompt

    def _content(self, value: Any, refuse: Any) -> str | tuple[Message, ...]:
        hint = 'make it text, or a list of messages such as {"role": "user", "content": "…"}'
        if isinstance(value, str):
            if not value:
                refuse(f"has an empty `{self.prompt_column}`", hint)
            return value
        if not isinstance(value, (list, tuple)) or not value:
            refuse(f"has a `{self.prompt_column}` that is {kind(value)}", hint)
        for message in value:
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message):
                refuse("has a message without `role` and `content`", hint)
        return tuple(value)

    def _with_system(self, content: str | tuple[Message, ...], refuse: Any) -> str | tuple[Message, ...]:
        if self.system is None:
            return content
        messages = ({"role": "user", "content": content},) if isinstance(content, str) else content
        if messages[0]["role"] == "system":
            refuse("begins with a system message of its own", "leave `system` out of the split")
        return ({"role": "system", "content": self.system}, *messages)


def collect(rows: Iterator[tuple[int, Prompt]], source: str, unit: Unit, size: int | None) -> list[Prompt]:
    """The first ``size`` prompts of ``source`` (all of them by default), given with their numbers.

    Raises ``DataError`` if there are none, or fewer than ``size``, or two have the same uid.
    """
    prompts: list[Prompt] = []
    numbers: dict[str, int] = {}
    for number, prompt in islice(rows, size):
        if prompt.uid in numbers:
            same_uid(prompt.uid, source, unit, numbers[prompt.uid], number)
        numbers[prompt.uid] = number
        prompts.append(prompt)
    check_size(len(prompts), source, size)
    return prompts


def collect_lines(rows: Iterator[tuple[int, Prompt]], path: Path, size: int | None) -> list[Prompt]:
    """``collect`` of a file's lines; raises ``DataError`` also where it cannot be read."""
    try:
        return collect(rows, str(path), "line", size)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}", hint="correct the path in the spec"
        ) from error


def same_uid(uid: object, source: str, unit: Unit, first: int, second: int) -> NoReturn:
    """Two rows have one name: raise the ``DataError`` that says so."""
    raise DataError(
        f"the row's uid {str(uid)!r} stands in {unit} {first} too",
        location=f"{source}:{second}",
        hint="make uids distinct",
    )


def check_size(rows: int, source: str, size: int | None) -> None:
    """Raise ``DataError`` if there are no rows, or fewer than ``size``."""
    if not rows:
        raise DataError(f"{source} has no rows", hint="give it one row per prompt")
    if size is not None and rows < size:
        raise DataError(
            f"{source} has {rows} rows, {size} are asked for", hint="lower the split's size, or leave it out"
        )


def json_value(value: Any) -> Any:
    """The value as JSON has it: dates and decimals become text. Raises ``TypeError`` for what has no location there."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"a {type(value).__name__}")


def kind(value: Any) -> str:
    """What a value is, for people."""
    if value is None:
        return "null"
    if isinstance(value, (str, list, tuple, dict)) and not value:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
