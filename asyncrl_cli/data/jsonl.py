"""Prompts from a JSON Lines file: one JSON object a line.

A row without ``uid`` is named by its line number and a hash of its text. Blank lines are no rows. ``resume`` compares
the rows that were used last with the journal (orchestrator/resume.py), so an edited file is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from asyncrl_cli.core.errors import DataError
from asyncrl_cli.data.rows import RowForm, collect_lines, kind
from asyncrl_cli.records.prompt import Prompt


def read_jsonl(path: Path, size: int | None = None, form: RowForm | None = None) -> list[Prompt]:
    """The prompts of the first ``size`` rows of ``path`` (all of them by default).

    Raises ``DataError`` if the file cannot be read, has fewer rows than ``size``, or has a row that is no prompt.
    """
    return collect_lines(_prompts(path, form or RowForm()), path, size)


def _prompts(path: Path, form: RowForm) -> Iterator[tuple[int, Prompt]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, form.prompt(_row(line, path, number), str(path), "line", number, line.strip())


def _row(line: bytes, path: Path, number: int) -> Mapping[str, Any]:
    def refuse(fault: str, hint: str) -> NoReturn:
        raise DataError(f"the row {fault}", location=f"{path}:{number}", hint=hint)

    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 (byte {error.start})", "save the file as UTF-8")
    except json.JSONDecodeError as error:
        refuse(f"is not JSON: {error.msg} at column {error.colno}", "write one JSON object a line")
    if not isinstance(row, dict):
        refuse(f"is not a JSON object but {kind(row)}", 'write rows as {"prompt": …}')
    return row
