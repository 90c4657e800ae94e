"""Pages of plain text for people, each with the same facts as a JSON document for programs. No meaning needs colour."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from asyncrl_cli.core.terminal import printable

WIDTH = 100
"""Width of the output in columns."""


@dataclass(frozen=True, slots=True)
class Page:
    """Output of a command: ``document`` for JSON, and ``lines`` with the same facts for people."""

    document: dict[str, Any]
    lines: list[str]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[int] = (0,)) -> list[str]:
    """Format a header and rows as lines. Columns in ``left_aligned`` are left-aligned, other columns right-aligned.

    Line breaks in a cell are shown as escapes.
    """
    rows = [[printable(text).replace("\n", r"\n") for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if column in left_aligned else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def record_table(title: str, records: Sequence[Any], omit: Collection[str] = ()) -> list[str]:
    """Format dataclass records below a title, a column per field unless ``omit`` has it. Empty without records."""
    if not records:
        return []
    names = [field.name for field in fields(records[0]) if field.name not in omit]
    rows = [[cell(name, getattr(record, name)) for name in names] for record in records]
    return [title, *(f"  {line}" for line in table(names, rows))]


def cell(name: str, value: Any) -> str:
    """Format a field of a record. Fields called ``at`` or ``…_at`` are Unix times."""
    if value is not None and (name == "at" or name.endswith("_at")):
        return moment(value)
    return "-" if value is None else number(value) if isinstance(value, float) else str(value)


def paragraph(text: str, indent: str = "") -> list[str]:
    """Wrap and indent a text. Its spaces stay, and characters that move a terminal's cursor are shown as escapes."""
    lines = []
    for line in text.split("\n"):
        lines += textwrap.wrap(printable(line), WIDTH - len(indent), drop_whitespace=False, break_on_hyphens=False) or [
            ""
        ]
    return [(indent + line).rstrip() for line in lines]


def duration(seconds: float) -> str:
    """Format a length of time: ``4.1 s``, ``43 s``, ``5 min 9 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    for unit, size, smaller, smaller_size in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole_seconds >= size:
            return f"{whole_seconds // size} {unit} {whole_seconds % size // smaller_size} {smaller}"
    return f"{whole_seconds} s"


def moment(unix_time: float) -> str:
    """Format a Unix time as local time, to the second."""
    return f"{datetime.fromtimestamp(unix_time):%Y-%m-%d %H:%M:%S}"


def count_range(minimum: int, maximum: int) -> str:
    """Format the bounds of a number: ``2``, or ``1 to 4``."""
    return str(minimum) if minimum == maximum else f"{minimum} to {maximum}"


def number(value: float) -> str:
    """Format a number: whole numbers with thousands separators, others with at least three significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
