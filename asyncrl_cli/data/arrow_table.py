"""Prompts from an Arrow table (Parquet files and data sets of Hugging Face `datasets`), each created on demand.

The table stays in Arrow's packed columns, mapped from disk if possible; only the rows in use are Python objects. When
the table is opened, its columns are checked as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.chat_template import MEDIA
from asyncrl_cli.data.lazy_prompts import LazyPrompts
from asyncrl_cli.data.rows import UID, RowForm, check_size, same_uid, unreadable
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.spec.data_sources import template_columns

if TYPE_CHECKING:
    import pyarrow as pa


def read_parquet(path: Path, size: int | None = None, form: RowForm | None = None) -> ArrowPrompts:
    """The prompts of the first ``size`` rows of a Parquet file (all of them by default).

    Raises ``DataError`` if the file cannot be read, has fewer rows than ``size``, or has a row that is not a prompt.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            groups: list[int] = []
            rows = 0
            for group in range(file.num_row_groups):
                if size is None or rows < size:
                    groups.append(group)
                    rows += file.metadata.row_group(group).num_rows
            table = file.read_row_groups(groups)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise unreadable(str(path), reason) from error
    return ArrowPrompts(table, str(path), size, form or RowForm())


class ArrowPrompts(LazyPrompts):
    """The first ``size`` rows of a table as prompts, without columns of bytes (images, sounds): fields are JSON.

    ``source`` is the location in errors; rows are counted from 1.
    """

    def __init__(
        self, table: pa.Table, source: str, size: int | None, form: RowForm, mapped: Iterable[str] = ()
    ) -> None:
        """``mapped``: the files that the table is mapped from. Raises ``DataError`` for a column that is missing, or
        does not contain prompts or uids."""
        check_size(len(table), source, size)
        self._mapped = {file: os.stat(file) for file in mapped}
        self._source = source
        self._form = form
        table = table.slice(0, size)
        self._refuse_media(table)
        self._table = _readable(table)
        self._check_columns()
        super().__init__(len(self._table), self._row)

    def _row(self, row: int) -> Prompt:
        self._check_files()
        values = self._table.slice(row, 1).to_pylist()[0]
        content = values.get(self._form.prompt_column)
        if isinstance(content, list):  # Arrow gives each message the keys of all.
            values[self._form.prompt_column] = [_without_nulls(message) for message in content]
        prompt = self._form.prompt(values, self._source, "row", row + 1)
        if isinstance(content, list) and not isinstance(prompt.content, str):
            # And each call of a tool the arguments of all. Only now, because uids hash the row with them.
            messages = ({key: _without_inner_nulls(value) for key, value in one.items()} for one in prompt.content)
            prompt = replace(prompt, content=tuple(messages))
        if isinstance(tools := prompt.fields.get("tools"), list):
            prompt = replace(prompt, fields={**prompt.fields, "tools": _without_inner_nulls(tools)})
        return prompt

    def field(self, name: str) -> list[Any]:
        """The values of one column, in the order of rows; None for each when there is no such column."""
        self._check_files()
        return self._table.column(name).to_pylist() if name in self._table.column_names else [None] * len(self)

    def _check_files(self) -> None:
        """Raise ``DataError`` when a file was truncated: the kernel kills a process that reads a mapped page beyond the
        end of its file (SIGBUS). A file that was deleted or replaced can still be read."""
        for file, before in self._mapped.items():
            try:
                now = os.stat(file)
            except OSError:
                continue
            if os.path.samestat(now, before) and now.st_size < before.st_size:
                raise DataError(
                    f"{file} was truncated from {before.st_size:,} to {now.st_size:,} bytes while it was in use",
                    location=self._source,
                    hint="restore it, then `asyncrl resume`; write changed data to a new folder",
                )

    def _check_columns(self) -> None:
        import pyarrow.compute as pc

        names = self._table.column_names
        for name in names:
            for floats in _float_columns(self._table.column(name)):
                wrong = pc.invert(pc.is_finite(floats))
                self._refuse_first(wrong, f"`{name}` is NaN or infinite", "write null, or remove the row or the column")
        if missing := sorted(self._form.needed - set(names)):
            hint = f"the columns are {', '.join(names)}; name one of them in the split's keys"
            self._refuse(f"no column `{missing[0]}`", hint)
        if self._form.template is None:
            self._check_prompts(self._table.column(self._form.prompt_column))
        else:
            for name in sorted(template_columns(self._form.template)):
                nulls = pc.is_null(self._table.column(name))
                self._refuse_first(nulls, f"`{name}` is null", "fill it in, or remove the row")
        if self._form.uid_column in names:
            uids = self._table.column(self._form.uid_column)
            self._check_uids(uids)
            if pc.count_distinct(uids).as_py() < len(uids) - uids.null_count:
                self._refuse_twins(uids)

    def _refuse_media(self, table: pa.Table) -> None:
        """Refuse rows with images or sounds, which ``_readable`` would drop."""
        import pyarrow as pa
        import pyarrow.compute as pc

        for name in set(MEDIA) & set(table.column_names):
            column = table.column(name)
            if _has_bytes(column.type):
                lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
                some = pc.greater(pc.list_value_length(column), 0) if lists else pc.is_valid(column)
                hint = "remove the rows or the column: models get text alone"
                self._refuse_first(some, f"the row has `{name}`", hint)

    def _check_prompts(self, column: pa.ChunkedArray) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        name, kind = self._form.prompt_column, column.type
        if pa.types.is_null(kind):
            self._refuse(f"`{name}` is null", "give every row a prompt", row=0)
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not text and not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            hint = "name a column of texts or of lists of messages, or set a template"
            self._refuse(f"the column `{name}` has the type {kind}", hint)
        empty = pc.equal(pc.utf8_length(column) if text else pc.list_value_length(column), 0)
        self._refuse_first(pc.is_null(column), f"`{name}` is null", "give every row a prompt")
        self._refuse_first(empty, f"`{name}` is empty", "give every row a prompt")

    def _check_uids(self, column: pa.ChunkedArray) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        name, kind = self._form.uid_column, column.type
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not (text or pa.types.is_integer(kind) or (pa.types.is_null(kind) and name == UID)):
            hint = "make uids texts or whole numbers, or rename the column"
            self._refuse(f"the column `{name}` has the type {kind}", hint)
        hint = "give every row a uid"
        if name != UID:
            self._refuse_first(pc.is_null(column), f"`{name}` is null", hint)
        if text:
            self._refuse_first(pc.equal(pc.utf8_length(column), 0), f"`{name}` is empty", hint)

    def _refuse_twins(self, uids: pa.ChunkedArray) -> NoReturn:
        first: dict[Any, int] = {}
        for row, uid in enumerate(uids.to_pylist()):
            if uid is not None and uid in first:
                same_uid(uid, self._source, "row", first[uid] + 1, row + 1)
            first[uid] = row
        raise AssertionError("the uids are distinct")

    def _refuse_first(self, wrong: pa.ChunkedArray, fault: str, hint: str) -> None:
        import pyarrow.compute as pc

        row = pc.index(wrong, True).as_py()
        if row >= 0:
            self._refuse(fault, hint, row)

    def _refuse(self, fault: str, hint: str, row: int | None = None) -> NoReturn:
        raise DataError(fault, location=self._source if row is None else f"{self._source}:{row + 1}", hint=hint)


def _readable(table: pa.Table) -> pa.Table:
    """The table without columns of bytes, and with categories as their values."""
    import pyarrow as pa

    for name in table.column_names:
        index, kind = table.column_names.index(name), table.schema.field(name).type
        if _has_bytes(kind):
            table = table.remove_column(index)
        elif pa.types.is_dictionary(kind):
            table = table.set_column(index, name, table.column(name).cast(kind.value_type))
    return table


def _float_columns(column: pa.ChunkedArray) -> Iterator[pa.ChunkedArray]:
    """The column, or its structs' columns, if they are floats. Lists are checked with their rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        yield column
    elif pa.types.is_struct(column.type):
        for index in range(column.type.num_fields):
            yield from _float_columns(pc.struct_field(column, [index]))


def _has_bytes(kind: Any) -> bool:
    import pyarrow as pa

    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    below = (kind.field(index).type for index in range(kind.num_fields))
    return any(test(kind) for test in tests) or any(map(_has_bytes, below))


def _without_inner_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_inner_nulls(item) for key, item in value.items() if item is not None}
    return [_without_inner_nulls(item) for item in value] if isinstance(value, list) else value


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None or key == "content"}
