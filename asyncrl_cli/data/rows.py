"""Turns a row of any source into a prompt that can be encoded, recorded and scored.

Invariant: a prompt depends only on its row, the row's number and the form. So a source that is read row by row on
demand gives the same prompts, with the same uids, in every epoch and after every restart.
"""

from __future__ import annotations

import hashlib
import json
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from itertools import accumulate, chain, islice
from pathlib import Path
from string import Formatter
from typing import Any, Literal, NoReturn, overload

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.images import ImageError, image_sources, is_blank, is_image, with_column, with_read_images
from asyncrl_cli.records.prompt import OWN_UID_PREFIX, Message, Prompt
from asyncrl_cli.spec.data_sources import template_columns

ABSENT = object()
UID = "uid"
"""The default column of uids. It may be missing."""
ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGE_HINT = "correct the image, or remove the row"
LIKE_OPENAI = 'write messages as OpenAI does, such as {"role": "user", "content": "…"}'


class LazyPrompts(Sequence[Prompt]):
    """``size`` prompts; ``make(i)`` makes row ``i`` at each access, so unused prompts cost nothing."""

    def __init__(self, size: int, make: Callable[[int], Prompt]) -> None:
        if size < 1:
            raise ValueError(f"a split needs at least one prompt, not {size}")
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._make(row) for row in range(self._size)[index]]
        try:
            row = range(self._size)[operator.index(index)]
        except IndexError:
            raise IndexError(f"row {index} of {self._size} prompts") from None
        return self._make(row)


def value_at(row: Mapping[str, Any], name: str, *default: Any) -> Any:
    """Return a column, or the value at the path ``outer.inner`` through objects and JSON texts of objects.

    Raises ``KeyError`` without a ``default``.
    """
    value: Any = row
    for key in [name] if name in row else name.split("."):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, Mapping) or key not in value:
            if default:
                return default[0]
            raise KeyError(name)
        value = value[key]
    return value


def paths_in(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a row's columns, and the paths into its objects."""
    for name, value in row.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from paths_in(value, f"{prefix}{name}.")


@dataclass(frozen=True, slots=True)
class RowForm:
    """How one source's rows become prompts. Columns are the ``SplitSpec`` keys with the same names, and may be paths
    (``value_at``)."""

    source: str
    """Location in errors, before the row's number: a file, a hub id, a function or a key of the spec."""
    unit: Literal["line", "row"] = "row"
    """Unit of row numbers, which start at 1."""
    prompt_column: str = "prompt"
    uid_column: str = UID
    template: str | None = None
    system: str | None = None
    check: Callable[[Prompt], None] | None = None
    """The task's check of a prompt; raises if the task cannot score it."""
    file_index: int | None = None
    """The source's number among several files, from 0; None: the only source."""
    image_column: str | None = None
    folder: Path = Path()
    """Images' relative paths start here."""

    @property
    def spec_columns(self) -> frozenset[str]:
        """Columns that every row must have. The default column of uids may be missing."""
        content = template_columns(self.template) if self.template is not None else {self.prompt_column}
        uid_column = None if self.uid_column == UID else self.uid_column
        return frozenset(filter(None, (*content, uid_column, self.image_column)))

    def refuse(self, row_number: int | None, fault: str, hint: str) -> NoReturn:
        """Raise ``DataError`` for a row, or for the whole source (None)."""
        raise DataError(fault, location=self.source if row_number is None else f"{self.source}:{row_number}", hint=hint)

    def prompt(self, columns: Mapping[str, Any], row_number: int, raw: bytes | None = None) -> Prompt:
        """Make a row's prompt. A row without a uid is named by its number and a hash of ``raw`` (None: of its JSON).
        Image files are not read yet: ``with_read_images`` does that.

        Raises ``DataError`` with the row's location if it cannot be a prompt.
        """
        paths = {name: value for name in self.spec_columns if (value := value_at(columns, name, ABSENT)) is not ABSENT}
        row = {**columns, **paths}
        for column in sorted(self.spec_columns - row.keys()):
            hint = "add it, or name another column in the split's keys; the row has "
            self.refuse(row_number, f"no column `{column}`", hint + (", ".join(paths_in(columns)) or "none"))
        consumed = {self.uid_column, self.image_column, self.prompt_column if self.template is None else None}
        try:
            fields = {str(key): json_value(value) for key, value in columns.items() if key not in consumed}
        except TypeError as error:
            hint = "use text, numbers, booleans, lists and mappings"
            self.refuse(row_number, f"the row has a value that is not JSON: {error}", hint)
        prompt = Prompt(self._uid(row, columns, row_number, raw), self._content(row, row_number), fields)
        if any(isinstance(image, bytes) for image in image_sources(prompt.content)):  # they cannot stay in JSON
            prompt = self.with_read_images(prompt, row_number)
        return self.checked(prompt, row_number)

    def _content(self, row: Mapping[str, Any], row_number: int) -> str | tuple[Message, ...]:
        content = self._messages(row, row_number) if self.template is None else self._templated(row, row_number)
        if self.image_column is not None and row[self.image_column] not in (None, "", []):
            try:
                content = with_column(content, row[self.image_column])
            except ImageError as error:
                self.refuse(row_number, f"the row has {error}", IMAGE_HINT)
        if self.system is not None:
            messages = ({"role": "user", "content": content},) if isinstance(content, str) else content
            if messages[0]["role"] == "system":
                self.refuse(row_number, "the prompt already has a system message", "remove `system` from the split")
            content = ({"role": "system", "content": self.system}, *messages)
        return content

    def _uid(self, row: Mapping[str, Any], columns: Mapping[str, Any], row_number: int, raw: bytes | None) -> str:
        uid = row.get(self.uid_column)
        if isinstance(uid, int) and not isinstance(uid, bool):
            return str(uid)
        if uid is None and self.uid_column == UID:
            # The journal knows prompts by these uids: a run could not be resumed with other uids (decision 0009).
            raw = json.dumps(json_value(columns, binary=True), sort_keys=True).encode() if raw is None else raw
            file = f"file{self.file_index + 1}-" if self.file_index else ""  # the first file has no prefix
            return f"{file}{self.unit}{row_number}-{hashlib.blake2b(raw, digest_size=6).hexdigest()}"
        if not isinstance(uid, str) or not uid:
            hint = "make it text or a whole number, or remove it"
            self.refuse(row_number, f"`{self.uid_column}` is {type_name(uid)}", hint)
        return uid

    def with_read_images(self, prompt: Prompt, row_number: int) -> Prompt:
        """Read the prompt's images. Raises ``DataError`` if one cannot be read."""
        if prompt.images:
            return prompt
        try:
            return with_read_images(prompt, self.folder)
        except ImageError as error:
            self.refuse(row_number, str(error), IMAGE_HINT)

    def checked(self, prompt: Prompt, row_number: int) -> Prompt:
        """Check a prompt. Raises ``DataError`` if it cannot be encoded or recorded, or if the task cannot score it."""
        if prompt.uid.startswith(OWN_UID_PREFIX):
            problem = f"the uid {prompt.uid!r} begins with `{OWN_UID_PREFIX}`, as only prompts of outside programs do"
            self.refuse(row_number, problem, "give the row another uid")
        if fault := _fault_of(prompt):
            self.refuse(row_number, f"prompt {prompt.uid!r}: {fault[0]}", fault[1])
        if self.check is not None:
            try:
                self.check(prompt)
            except Exception as error:  # a user's task may raise anything
                raise DataError(
                    f"the task cannot score prompt {prompt.uid!r}: {error}",
                    location=f"{self.source}:{row_number}",
                    hint="correct or remove the row, or name another field in task.options",
                ) from error
        return prompt

    def _messages(self, row: Mapping[str, Any], row_number: int) -> str | tuple[Message, ...]:
        """Content of the prompt column: text, or messages, which may be JSON text, as in CSV files."""
        value = row[self.prompt_column]
        if isinstance(value, str) and value:
            try:
                parsed = json.loads(value) if value.lstrip().startswith(("[", "{")) else None
            except (ValueError, RecursionError):
                parsed = None
            items = parsed if isinstance(parsed, list) else [parsed]
            if not items or not all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in items):
                return value
            value = parsed
        if not isinstance(value, (list, tuple)) or not value:
            self.refuse(row_number, f"`{self.prompt_column}` is {type_name(value)}", f"make it text, or {LIKE_OPENAI}")
        for message in value:
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
                self.refuse(row_number, "a message has no `role`", LIKE_OPENAI)
        return tuple(value)

    def _templated(self, row: Mapping[str, Any], row_number: int) -> str:
        assert self.template is not None
        for column in sorted(template_columns(self.template)):
            if row[column] is None:
                self.refuse(row_number, f"`{column}` is null", "fill it in, or remove the row")
        try:
            content = _ColumnFormatter().vformat(self.template, (), row)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            hint = "change the template or the row"
            self.refuse(row_number, f"the template fails: {type(error).__name__}: {error}", hint)
        if not content:
            self.refuse(row_number, "the template makes an empty prompt", "change the template or the row")
        return content


class _ColumnFormatter(Formatter):
    """Fills a template in; ``{outer.inner}`` is a path if the row has that column."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if field_name in kwargs:
            return kwargs[field_name], field_name
        return super().get_field(field_name, args, kwargs)


class SourcePrompts(LazyPrompts):
    """The prompts of one source. ``row_numbers`` has each row's line or number."""

    def __init__(self, form: RowForm, row_numbers: Sequence[int], make: Callable[[int], Prompt]) -> None:
        """Raises ``DataError`` without rows."""
        if not row_numbers:
            form.refuse(None, "no rows", "write one row per prompt")
        self.form = form
        self.row_numbers = row_numbers
        super().__init__(len(row_numbers), make)

    def uids(self) -> Sequence[Any]:
        """Each row's uid; None for a row that is named by its number."""
        raise NotImplementedError

    def location(self, row: int) -> str:
        """Source and line, or source and number, of a row (from 0)."""
        return f"{self.form.source}:{self.row_numbers[row]}"


class CollectedPrompts(SourcePrompts):
    """Prompts of rows in memory. Image files are read at each access."""

    def __init__(self, form: RowForm, rows: Iterator[tuple[int, Prompt]], size: int | None) -> None:
        """Take the first ``size`` prompts (None: all) of numbered ``rows``."""
        numbered = list(islice(rows, size))
        self._rows = [prompt for _, prompt in numbered]
        row_numbers = [row_number for row_number, _ in numbered]
        super().__init__(form, row_numbers, lambda row: form.with_read_images(self._rows[row], row_numbers[row]))

    def uids(self) -> Sequence[Any]:
        return [prompt.uid for prompt in self._rows]


class JoinedPrompts(LazyPrompts):
    """The prompts of several files, one file after another."""

    def __init__(self, files: Sequence[SourcePrompts]) -> None:
        """Raises ``DataError`` if two rows have the same uid."""
        self._files = files
        self._ends = list(accumulate(map(len, files)))
        super().__init__(self._ends[-1], self._in_file)
        first_rows: dict[str, int] = {}
        for row, uid in enumerate(chain.from_iterable(prompts.uids() for prompts in files)):
            if uid is not None and (first_row := first_rows.setdefault(str(uid), row)) != row:
                fault = f"the uid {str(uid)!r} is also the uid of {self.location(first_row)}"
                raise DataError(fault, location=self.location(row), hint="make uids unique over all rows")

    def location(self, row: int) -> str:
        """As in ``SourcePrompts``."""
        prompts, row = self._place(row)
        return prompts.location(row)

    def _in_file(self, row: int) -> Prompt:
        prompts, row = self._place(row)
        return prompts[row]

    def _place(self, row: int) -> tuple[SourcePrompts, int]:
        """Return a row's file, and its index in the file."""
        prompts = self._files[file := bisect_right(self._ends, row)]
        return prompts, row - self._ends[file] + len(prompts)


def json_value(value: Any, binary: bool = False) -> Any:
    """Convert a value to JSON types: dates and decimals become text and, with ``binary``, bytes become their hash.
    Raises ``TypeError`` for other types that JSON lacks."""
    if binary and isinstance(value, bytes):
        return hashlib.blake2b(value).hexdigest()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_value(item, binary) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item, binary) for item in value]
    if isinstance(value, (date, time)):  # a datetime is a date, too
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"a {type(value).__name__}")


def type_name(value: Any) -> str:
    """Name a value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, (str, list, tuple, dict)) and not value:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def _fault_of(prompt: Prompt) -> tuple[str, str] | None:
    if not prompt.content:
        return ("empty", "give every row a prompt") if isinstance(prompt.content, str) else ("no messages", LIKE_OPENAI)
    messages = () if isinstance(prompt.content, str) else prompt.content
    for message_number, message in enumerate(messages, start=1):
        if fault := _fault_of_message(message):
            return f"message {message_number} {fault}", LIKE_OPENAI
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
        if not content or not all(map(_is_part, content)):
            return "has content with parts that are neither text nor images"
    elif content is not None and not isinstance(content, str):
        return "has content that is not text"
    return None


def _is_part(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    is_text = item.get("type") == "text" and isinstance(item.get("text"), str)
    return is_text or (is_image(item) and not is_blank(item))


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
