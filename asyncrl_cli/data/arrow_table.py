"""Prompts from an Arrow table (CSV and Parquet files, data sets of Hugging Face `datasets`), each created on demand.

The table stays in Arrow's packed columns; only the rows in use are Python objects.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.data.chat_template import MEDIA, VARIABLES, media_hint
from asyncrl_cli.data.rows import RowForm, SourcePrompts, value_at
from asyncrl_cli.records.prompt import Prompt

if TYPE_CHECKING:
    import pyarrow as pa


def read_table(path: Path, size: int | None, form: RowForm) -> ArrowPrompts:
    """Return the prompts of the first ``size`` rows (None: all) of a Parquet or CSV file. All values of a CSV file are
    texts; it may be compressed, and has column names in the first line.

    Raises ``DataError`` if the file cannot be read, or has no rows.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        if path.suffix.lower() == ".parquet":
            with parquet.ParquetFile(path, memory_map=True) as file:
                groups: list[int] = []
                row_count = 0
                for group in range(file.num_row_groups):
                    if size is None or row_count < size:
                        groups.append(group)
                        row_count += file.metadata.row_group(group).num_rows
                table = file.read_row_groups(groups)
        else:
            parsing = csv.ParseOptions(newlines_in_values=True)
            compression = "gzip" if path.suffix.lower() == ".gz" else None
            columns = csv.open_csv(pa.input_stream(path, compression), parse_options=parsing).schema.names
            if len(set(columns)) < len(columns) or "" in columns:
                form.refuse(None, "duplicate or empty column names", "give each column a unique name")
            texts = csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=False)
            table = csv.read_csv(pa.input_stream(path, compression), parse_options=parsing, convert_options=texts)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        form.refuse(None, f"cannot be read: {reason}", "correct the path in the spec, or the file")
    return ArrowPrompts(table.slice(0, size), form)


class ArrowPrompts(SourcePrompts):
    """A table's rows as prompts; wrong rows are found when they are used. Columns of bytes are dropped, except images:
    fields are JSON."""

    def __init__(self, table: pa.Table, form: RowForm) -> None:
        self._table = table
        readable = {form.prompt_column, form.image_column}
        self._hidden = {field.name for field in table.schema if _has_bytes(field.type) and field.name not in readable}
        super().__init__(form, range(1, len(table) + 1), self._row)

    def _row(self, row: int) -> Prompt:
        values = self._table.slice(row, 1).to_pylist()[0]
        for name in self._hidden:
            if values.pop(name) and name in MEDIA:
                self.form.refuse(row + 1, f"the row has `{name}`, which the model does not get", media_hint(name))
        # Arrow gives each message the keys of all messages, each tool call the arguments of all calls, and each row the
        # template variables of all rows, with nulls for the missing values.
        for column in (self.form.prompt_column.partition(".")[0], "tools", VARIABLES):
            if isinstance(values.get(column), (list, dict)):
                values[column] = _without_nulls(values[column])
        return self.form.with_read_images(self.form.prompt(values, row + 1), row + 1)

    def uids(self) -> list[Any]:
        name, columns = self.form.uid_column, self._table.column_names
        column = name if name in columns else name.partition(".")[0]
        rows = self._table.select([column]).to_pylist() if column in columns else [{}] * len(self)
        return [value_at(row, name, None) for row in rows]


def _has_bytes(arrow_type: Any) -> bool:
    import pyarrow as pa

    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    inner_types = (arrow_type.field(index).type for index in range(arrow_type.num_fields))
    return any(test(arrow_type) for test in tests) or any(map(_has_bytes, inner_types))


def _without_nulls(value: Any) -> Any:
    """Remove keys with null, except a message's content."""
    if isinstance(value, dict):
        nullable = {"content"} if "role" in value else set()
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key in nullable}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
