"""From a row of any source to a prompt that can be encoded, recorded and scored.

Invariant: a prompt follows from its row, the row's number and the form alone. So a source that is read row by row on
demand gives the same prompts, with the same uids, in every epoch and after every restart.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from itertools import islice
from typing import Any, Literal, NoReturn

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.records.prompt import Message, Prompt
from asyncrl_cli.spec.data_sources import template_columns

UID = "uid"
"""The column that may name rows without being configured."""
ROLES = ("system", "developer", "user", "assistant", "tool")
Unit = Literal["line", "row"]
"""What a source counts, from 1."""
LIKE_OPENAI = 'write messages as OpenAI does, such as {"role": "user", "content": "…"}'


@dataclass(frozen=True, slots=True)
class RowForm:
    """Which columns a prompt is made of (the keys of ``SplitSpec`` by the same names)."""

    prompt_column: str = "prompt"
    uid_column: str = UID
    template: str | None = None
    system: str | None = None
    check: Callable[[Prompt], None] | None = None
    """The task's check of a prompt; raises if the task cannot score it."""

    @property
    def needed(self) -> frozenset[str]:
        """The columns that every row must have."""
        content = template_columns(self.template) if self.template is not None else {self.prompt_column}
        return frozenset(content if self.uid_column == UID else {*content, self.uid_column})

    def prompt(self, row: Mapping[str, Any], source: str, unit: Unit, number: int, raw: bytes | None = None) -> Prompt:
        """The prompt of row ``number`` of ``source``. Without a uid, it is named by its number and a hash of ``raw``
        (by default, of its JSON).

        Raises ``DataError`` with the row's location if it cannot be a prompt.
        """

        def refuse(fault: str, hint: str) -> NoReturn:
            raise DataError(fault, location=f"{source}:{number}", hint=hint)

        for column in sorted(self.needed - row.keys()):
            refuse(f"the row has no `{column}`", f"add it; the keys of the row are {', '.join(row) or 'none'}")
        taken = {self.uid_column} if self.template is not None else {self.uid_column, self.prompt_column}
        try:
            fields = {str(key): json_value(value) for key, value in row.items() if key not in taken}
        except TypeError as error:
            refuse(f"the row has a value that is not JSON: {error}", "use text, numbers, booleans, lists and mappings")
        if self.template is None:
            content = self._content(row[self.prompt_column], refuse)
        else:
            for column in sorted(template_columns(self.template)):
                if row[column] is None:
                    refuse(f"`{column}` is null", "fill it in, or remove the row")
            try:
                content = self.template.format_map(row)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                refuse(f"the template fails: {type(error).__name__}: {error}", "change the template or the row")
            if not content:
                refuse("the template makes an empty prompt", "change the template or the row")
        uid = row.get(self.uid_column)
        if isinstance(uid, int) and not isinstance(uid, bool):
            uid = str(uid)
        if uid is None and self.uid_column == UID:
            # The journal knows prompts by these uids: with others, a run could not be resumed (decision 0024).
            raw = json.dumps(json_value(row), sort_keys=True).encode() if raw is None else raw
            uid = f"{unit}{number}-{hashlib.blake2b(raw, digest_size=6).hexdigest()}"
        elif not isinstance(uid, str) or not uid:
            refuse(f"`{self.uid_column}` is {kind(uid)}", "make it a text that is not empty, or remove it")
        return self.checked(Prompt(uid, self._with_system(content, refuse), fields), f"{source}:{number}")

    def checked(self, prompt: Prompt, location: str) -> Prompt:
        """The prompt. Raises ``DataError`` if it cannot be encoded or recorded, or if the task cannot score it."""
        if fault := _fault_of(prompt):
            raise DataError(f"prompt {prompt.uid!r}: {fault[0]}", location=location, hint=fault[1])
        if self.check is not None:
            try:
                self.check(prompt)
            except Exception as error:  # The user's task may raise anything.
                raise DataError(
                    f"the task cannot score prompt {prompt.uid!r}: {error}",
                    location=location,
                    hint="correct or remove the row, or name another field in task.options",
                ) from error
        return prompt

    def _content(self, value: Any, refuse: Callable[[str, str], NoReturn]) -> str | tuple[Message, ...]:
        if isinstance(value, str) and value:
            try:
                messages = _messages_in(value)
            except ValueError as error:
                refuse(f"`{self.prompt_column}` has {error}", "write them as JSON (json.dumps)")
            if messages is None:
                return value
            value = messages
        if not isinstance(value, (list, tuple)) or not value:
            refuse(f"`{self.prompt_column}` is {kind(value)}", f"make it text, or {LIKE_OPENAI}")
        for message in value:
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
                refuse("a message has no `role`", LIKE_OPENAI)
        return tuple(value)

    def _with_system(
        self, content: str | tuple[Message, ...], refuse: Callable[[str, str], NoReturn]
    ) -> str | tuple[Message, ...]:
        if self.system is None:
            return content
        messages = ({"role": "user", "content": content},) if isinstance(content, str) else content
        if messages[0]["role"] == "system":
            refuse("the prompt already has a system message", "remove `system` from the split")
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


def unreadable(source: str, reason: str) -> DataError:
    """The error that a file cannot be read."""
    return DataError(f"cannot be read: {reason}", location=source, hint="correct the path in the spec, or the file")


def same_uid(uid: object, source: str, unit: Unit, first: int, second: int) -> NoReturn:
    """Raise the ``DataError`` that two rows have the same uid."""
    message = f"the uid {str(uid)!r} is also the uid of {unit} {first}"
    raise DataError(message, location=f"{source}:{second}", hint="make uids unique")


def check_size(rows: int, source: str, size: int | None) -> None:
    """Raise ``DataError`` if there are no rows, or fewer than ``size``."""
    if not rows:
        raise DataError("no rows", location=source, hint="write one row per prompt")
    if size is not None and rows < size:
        raise DataError(f"fewer rows ({rows}) than size {size}", location=source, hint="lower or remove size")


def json_value(value: Any) -> Any:
    """The value in JSON: dates and decimals become text. Raises ``TypeError`` for what JSON cannot represent."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, (date, time)):  # A datetime is a date, too.
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"a {type(value).__name__}")


def kind(value: Any) -> str:
    """What a value is, for messages."""
    if value is None:
        return "null"
    if isinstance(value, (str, list, tuple, dict)) and not value:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def _messages_in(text: str) -> Any:
    """The message or messages that a text is in JSON, as in CSV files; None if it is another text.

    Raises ``ValueError`` for messages as Python prints them.
    """
    if _PYTHON_MESSAGES.match(text):
        raise ValueError("messages as Python prints them")
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    some = value if isinstance(value, list) else [value]
    return value if some and all(isinstance(one, dict) and one.keys() & {"role", "from"} for one in some) else None


_PYTHON_MESSAGES = re.compile(r"\s*(array\()?\[?\s*\{\s*'(role|content|from|value)'\s*:")


def _fault_of(prompt: Prompt) -> tuple[str, str] | None:
    """The mistake of a prompt, and the hint; None for a valid one."""
    if not prompt.content:
        return ("empty", "give every row a prompt") if isinstance(prompt.content, str) else ("no messages", LIKE_OPENAI)
    messages = () if isinstance(prompt.content, str) else prompt.content
    for number, message in enumerate(messages, start=1):
        if fault := _fault_of_message(message):
            return f"message {number} {fault}", LIKE_OPENAI
    for name, value in (("uid", prompt.uid), ("prompt", prompt.content), *prompt.fields.items()):
        if fault := _fault_of_text(value):
            return f"`{name}` is {fault}", "use text, finite numbers, booleans, null, lists and mappings"
    return None


def _fault_of_message(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return "is not an object"
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        return f"has the unknown role {role!r}; roles are {', '.join(ROLES)}"
    if calls is not None and not (isinstance(calls, (list, tuple)) and all(map(_is_call, calls))):
        return "has `tool_calls` that are not a list of functions with name and arguments"
    if content is None and not (role == "assistant" and calls):
        return "has no content"
    if isinstance(content, (list, tuple)):
        if not content or not all(map(_is_text_part, content)):
            return "has content with parts that are not text"
    elif content is not None and not isinstance(content, str):
        return "has content that is not text"
    return None


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), (str, Mapping))
    )


def _fault_of_text(value: Any) -> str | None:
    def as_json(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"a {type(value).__name__}")

    try:
        # SQLite reads no JSON with NaN or Infinity: one such row would make the journal unreadable.
        json.dumps(value, ensure_ascii=False, default=as_json, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        return f"not Unicode: it has {error.object[error.start]!r}, half of a surrogate pair"
    except (TypeError, ValueError, RecursionError) as error:
        if "Out of range float" in str(error):
            return "NaN or infinite, or contains such a number, which JSON does not have"
        return f"not a JSON value: {error}"
    return None
