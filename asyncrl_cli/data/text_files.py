"""Prompts from text files: JSON Lines (one object a line), and CSV (RFC 4180), whose first line names the columns.

A row is named and located by the line on which it begins. Blank lines are not rows. ``resume`` compares the rows that
were used last with the journal (orchestrator/resume.py), so an edited file is noticed.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.rows import RowForm, collect, kind, unreadable
from asyncrl_cli.records.prompt import Prompt

LONGEST_CELL = 2**31 - 1
"""Characters; Python's own limit is shorter than some documents."""


def read_jsonl(path: Path, size: int | None = None, form: RowForm | None = None) -> list[Prompt]:
    """The prompts of the first ``size`` rows of ``path`` (all of them by default).

    Raises ``DataError`` if the file cannot be read, has fewer rows than ``size``, or has a row that is not a prompt.
    """
    return _collected(_json_rows(path, form or RowForm()), path, size)


def read_csv(path: Path, size: int | None = None, form: RowForm | None = None) -> list[Prompt]:
    """The same of a CSV file; every value is text."""
    return _collected(_csv_rows(path, form or RowForm()), path, size)


def line_of(path: Path, row: int, form: RowForm) -> int:
    """The line on which row number ``row`` (from 0) of a file that has been read begins."""
    rows = _csv_rows(path, form) if path.suffix.lower() == ".csv" else _json_rows(path, form)
    number, _ = next(islice(rows, row, None))
    return number


def _collected(rows: Iterator[tuple[int, Prompt]], path: Path, size: int | None) -> list[Prompt]:
    try:
        return collect(rows, str(path), "line", size)
    except OSError as error:
        raise unreadable(str(path), error.strerror or str(error)) from error


def _refuse(path: Path, line: int, fault: str, hint: str) -> NoReturn:
    raise DataError(fault, location=f"{path}:{line}", hint=hint)


def _json_rows(path: Path, form: RowForm) -> Iterator[tuple[int, Prompt]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, form.prompt(_json_row(line, path, number), str(path), "line", number, line.strip())


def _json_row(line: bytes, path: Path, number: int) -> Mapping[str, Any]:
    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        _refuse(path, number, f"not UTF-8 (byte {error.start})", "save the file as UTF-8")
    except json.JSONDecodeError as error:
        _refuse(path, number, f"not JSON: {error.msg} at column {error.colno}", "write one JSON object per line")
    except ValueError:  # Python's limit: reading longer ones takes quadratic time
        digits = sys.get_int_max_str_digits()
        _refuse(path, number, f"an integer has more than {digits:,} digits", "write it as text, in quotes")
    except RecursionError:
        _refuse(path, number, "lists or objects are nested too deeply", "flatten the row")
    if not isinstance(row, dict):
        _refuse(path, number, f"not a JSON object but {kind(row)}", 'write rows as {"prompt": …}')
    return row


def _csv_rows(path: Path, form: RowForm) -> Iterator[tuple[int, Prompt]]:
    csv.field_size_limit(LONGEST_CELL)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        line = 1
        header: list[str] = []
        try:
            for cells in reader:
                if not header:
                    header = cells
                    if len(set(header)) < len(header) or "" in header:
                        _refuse(path, line, "duplicate or empty column names", "give each column a unique name")
                elif cells:
                    if len(cells) != len(header):
                        fault = f"{len(cells)} values for {len(header)} columns"
                        _refuse(path, line, fault, "put values with commas in quotes")
                    yield line, form.prompt(dict(zip(header, cells, strict=True)), str(path), "line", line)
                line = reader.line_num + 1
        except csv.Error as error:
            hint = "put values with commas, quotes or line breaks in quotes, and double the quotes in them"
            _refuse(path, line, f"not CSV: {error}", hint)
        except UnicodeDecodeError as error:
            _refuse(path, line, f"not UTF-8 here or soon after ({error.reason})", "save the file as UTF-8")
