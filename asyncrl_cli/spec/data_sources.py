"""Tells the type of a split's source from the text of its ``path``, and finds the columns that a template needs.

hf:owner/name       a data set of the Hugging Face hub
module:function     a Python function that yields rows
*.jsonl, *.ndjson   JSON Lines
*.json              a JSON list of objects, or JSON Lines
*.parquet, *.csv    Parquet, or CSV with a header

Text files may be compressed (`.gz`). A path with `*`, `?` or `[` is a pattern of files.
"""

from __future__ import annotations

import glob
import os
import re
from string import Formatter
from typing import Literal

HUB = "hf:"
"""Prefix of a hub id: ``hf:owner/name``, or ``hf:owner/name@revision``."""
SourceType = Literal["hub", "function", "jsonl", "json", "parquet", "csv"]
SUFFIXES: dict[str, SourceType] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}
TEXTS: tuple[SourceType, ...] = ("jsonl", "json", "csv")
"""Types of text files, which may be compressed."""
FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def source_type_of(path: str) -> SourceType | None:
    """Return the type of a source, or None for a file with an unknown suffix."""
    if path.startswith(HUB):
        return "hub"
    if FUNCTION.fullmatch(path):
        return "function"
    name, suffix = os.path.splitext(path.lower())
    if suffix == ".gz":
        inner = SUFFIXES.get(os.path.splitext(name)[1])
        return inner if inner in TEXTS else None
    return SUFFIXES.get(suffix)


def names_a_file(path: str) -> bool:
    """True if the text is the path of a file (not a hub id or a function)."""
    return source_type_of(path) not in ("hub", "function")


def files_of(path: str) -> list[str]:
    """Return the files that match a pattern, sorted; for no match, and for other paths, the path itself.

    An existing file is not a pattern, whatever its name.
    """
    if not names_a_file(path) or not glob.has_magic(path) or os.path.exists(path):
        return [path]
    return sorted(glob.glob(path, recursive=True)) or [path]


def template_columns(template: str) -> set[str]:
    """Return the columns, or paths in them, that a template names. Raises ``ValueError`` if it is malformed or names
    none."""
    columns = set()
    for _, name, _, _ in Formatter().parse(template):
        if name is not None:
            column = name.partition("[")[0]
            if not column or column.isdigit():
                raise ValueError(f"{{{name}}} names no column")
            columns.add(column)
    if not columns:
        raise ValueError("it names no column, so all prompts would be the same")
    return columns
