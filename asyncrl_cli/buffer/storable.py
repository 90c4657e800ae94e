"""What SQLite can store. A value that it cannot store would fail the commit, and with it the rows of other callers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from asyncrl_cli.journal.schema import JournalError

_LIMIT = 2**63
"""SQLite's integers have 64 bits."""


def fault_in(values: Iterable[object]) -> str:
    """What keeps a row of these values from being stored; empty when nothing does."""
    for value in values:
        kind = type(value)
        if value is None or kind is bytes or (kind is int and -_LIMIT <= value < _LIMIT):  # type: ignore[operator]
            continue
        if fault := _fault(value):
            return fault
    return ""


def refusal(record: str, fault: str, path: Path) -> JournalError:
    """The error for a ``record`` that cannot be stored in the journal at ``path``."""
    return JournalError(
        f"{record} cannot be stored: it contains {fault}",
        location=str(path),
        hint="correct where the value comes from, then `asyncrl resume`: everything acknowledged is in the journal",
    )


def printable(text: str) -> str:
    """A message, whose exact characters nothing depends on, with escapes for what cannot be stored."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _fault(value: object) -> str:
    if isinstance(value, str):
        if value.isascii():
            return ""
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"text that is not valid Unicode: {value!r:.80}"
        return ""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else ""
    if isinstance(value, int):
        return "" if -_LIMIT <= value < _LIMIT else "a number of more than 64 bits"
    return f"a {type(value).__name__}"
