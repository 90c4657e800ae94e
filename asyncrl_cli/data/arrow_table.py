"""Prompts from an Arrow table (Parquet files and data sets of Hugging Face `datasets`), each created on demand.

The table stays in Arrow's packed columns, mapped from disk if possible; only the rows in use are Python objects.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.chat_template import MEDIA, VARIABLES, media_hint
from asyncrl_cli.data.rows import LazyPrompts, RowForm, value_at
from asyncrl_cli.records.prompt import Prompt

if TYPE_CHECKING:
    import pyarrow as pa


def read_parquet(path: Path, size: int | None, form: RowForm) -> ArrowPrompts:
    """Return the prompts of the first ``size`` rows of a Parquet file (None: all).

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
        form.refuse(None, f"cannot be read: {reason}", "correct the path in the spec, or the file")
    return ArrowPrompts(table, size, form)


class ArrowPrompts(LazyPrompts):
    """The first ``size`` rows of a table as prompts. Columns of bytes are dropped, except images: fields are JSON."""

    def __init__(self, table: pa.Table, size: int | None, form: RowForm, mapped: Iterable[str] = ()) -> None:
        """``mapped``: the files that the table is mapped from. Raises ``DataError`` for a wrong row or column.

        Mistakes visible in whole columns are found here, all others when a row is used.
        """
        form.check_size(len(table), size)
        self._mapped = {file: os.stat(file) for file in mapped}
        self._form = form
        table = table.slice(0, size)
        for name in (form.prompt_column, form.uid_column, form.image_column or ""):
            table = _with_path(table, name)
        _refuse_media(table, form)
        self._table = _readable(table, {form.prompt_column, form.image_column})
        super().__init__(len(table), self._row)
        for row in _suspects(self._table, form):
            self._row(row)
        if form.uid_column in self._table.column_names:
            _refuse_twins(self._table.column(form.uid_column), form)

    def _row(self, row: int) -> Prompt:
        self._check_files()
        values = self._table.slice(row, 1).to_pylist()[0]
        # Arrow gives each message the keys of all messages, each tool call the arguments of all calls, and each row the
        # template variables of all rows, with nulls for the missing values.
        if isinstance(content := values.get(self._form.prompt_column), list):
            values[self._form.prompt_column] = [_message(one) for one in content]
        for column in ("tools", VARIABLES):
            if isinstance(values.get(column), (list, dict)):
                values[column] = _without_nulls(values[column])
        return self._form.loaded(self._form.prompt(values, row + 1), row + 1)

    def field(self, name: str) -> list[Any]:
        self._check_files()
        table = _with_path(self._table, name)
        return table.column(name).to_pylist() if name in table.column_names else [None] * len(self)

    def _check_files(self) -> None:
        """Raise ``DataError`` when a file was truncated: the kernel kills a process (SIGBUS) that reads a mapped page
        beyond a file's end. A deleted or replaced file can still be read."""
        for file, before in self._mapped.items():
            try:
                now = os.stat(file)
            except OSError:
                continue
            if os.path.samestat(now, before) and now.st_size < before.st_size:
                raise DataError(
                    f"{file} was truncated from {before.st_size:,} to {now.st_size:,} bytes while it was in use",
                    location=self._form.source,
                    hint="restore it, then `asyncrl resume`; write changed data to a new folder",
                )


def _with_path(table: pa.Table, name: str) -> pa.Table:
    """Add the values at a path such as ``extra_info.question`` as a column, unless there is none."""
    import pyarrow as pa

    root = name.partition(".")[0]
    if name in table.column_names or root not in table.column_names:
        return table
    rows = (row for batch in table.select([root]).to_batches() for row in batch.to_pylist())
    column = pa.array([value_at(row, name, None) for row in rows])
    return table if column.null_count == len(table) else table.append_column(name, column)


def _suspects(table: pa.Table, form: RowForm) -> Iterator[int]:
    """Yield the first row of each kind that whole columns show to be wrong. Making the row gives the error."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not form.needed <= set(table.column_names):
        yield 0
    masks = [pc.invert(pc.is_finite(floats)) for column in table.columns for floats in _float_columns(column)]
    masks += [pc.is_null(table.column(name)) for name in form.needed.intersection(table.column_names)]
    if form.template is None:
        prompts = table.column(form.prompt_column)
        length = _length(prompts)
        masks.append(pc.is_valid(prompts) if length is None else pc.equal(length, 0))
    if form.uid_column in table.column_names:
        uids = table.column(form.uid_column)
        if pa.types.is_string(uids.type) or pa.types.is_large_string(uids.type):
            masks.append(pc.equal(pc.utf8_length(uids), 0))
        elif not pa.types.is_integer(uids.type):
            masks.append(pc.is_valid(uids))
    for mask in masks:
        if (row := pc.index(mask, True).as_py()) >= 0:
            yield row


def _refuse_media(table: pa.Table, form: RowForm) -> None:
    """Refuse rows with images, videos or sounds, which ``_readable`` would drop."""
    import pyarrow.compute as pc

    for name in set(MEDIA).difference({form.image_column}) & set(table.column_names):
        column = table.column(name)
        if _has_bytes(column.type):
            length = _length(column)
            row = pc.index(pc.is_valid(column) if length is None else pc.greater(length, 0), True).as_py()
            if row >= 0:
                form.refuse(row + 1, f"the row has `{name}`, which the model does not get", media_hint(name))


def _refuse_twins(uids: pa.ChunkedArray, form: RowForm) -> None:
    import pyarrow.compute as pc

    if pc.count_distinct(uids).as_py() == len(uids) - uids.null_count:
        return
    first: dict[Any, int] = {}
    for row, uid in enumerate(uids.to_pylist(), start=1):
        if uid is not None and uid in first:
            form.refuse_twins(uid, first[uid], row)
        first[uid] = row


def _length(column: pa.ChunkedArray) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return pc.utf8_length(column)
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return pc.list_value_length(column) if lists else None


def _readable(table: pa.Table, kept: Container[str | None]) -> pa.Table:
    """Drop columns of bytes that are not ``kept``, and replace categories by their values."""
    import pyarrow as pa

    for name in table.column_names:
        index, kind = table.column_names.index(name), table.schema.field(name).type
        if _has_bytes(kind) and name not in kept:
            table = table.remove_column(index)
        elif pa.types.is_dictionary(kind):
            table = table.set_column(index, name, table.column(name).cast(kind.value_type))
    return table


def _float_columns(column: pa.ChunkedArray) -> Iterator[pa.ChunkedArray]:
    """Yield the column, or its structs' columns, if they are floats. Lists are checked with their rows."""
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


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {key: _without_nulls(value) for key, value in message.items() if value is not None or key == "content"}
