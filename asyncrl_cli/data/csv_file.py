"""Prompts from a CSV file: the first line names the columns, and every value is text.

Quoting is that of RFC 4180. A row is named and blamed by the line on which it begins.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.rows import RowForm, collect_lines
from asyncrl_cli.records.prompt import Prompt

LONGEST_CELL = 2**31 - 1
"""Characters; Python's own limit is shorter than some documents."""


def read_csv(path: Path, size: int | None = None, form: RowForm | None = None) -> list[Prompt]:
    """The prompts of the first ``size`` rows of ``path`` (all of them by default); blank lines are no rows.

    Raises ``DataError`` if the file cannot be read, has fewer rows than ``size``, or has a row that is no prompt.
    """
    return collect_lines(_prompts(path, form or RowForm()), path, size)


def _prompts(path: Path, form: RowForm) -> Iterator[tuple[int, Prompt]]:
    csv.field_size_limit(LONGEST_CELL)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        line = 1

        def refuse(fault: str, hint: str) -> NoReturn:
            raise DataError(f"the row {fault}", location=f"{path}:{line}", hint=hint)

        header: list[str] = []
        try:
            for cells in reader:
                if not header:
                    header = cells
                    if len(set(header)) < len(header) or "" in header:
                        refuse("names columns twice, or not at all", "give each column a name of its own")
                elif cells:
                    if len(cells) != len(header):
                        refuse(
                            f"has {len(cells)} values, and there are {len(header)} columns", "quote values with commas"
                        )
                    yield line, form.prompt(dict(zip(header, cells, strict=True)), str(path), "line", line)
                line = reader.line_num + 1
        except csv.Error as error:
            refuse(f"is no CSV: {error}", "quote values with commas, quotes or line breaks, and double quotes in them")
        except UnicodeDecodeError as error:
            refuse(f"or one soon after it is not UTF-8 ({error.reason})", "save the file as UTF-8")
