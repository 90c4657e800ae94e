"""The report's rows, in `report.csv` as soon as a part or one of its cases ends, and the page made of them."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SMALL = "On CPUs everything is small and short: this says that the parts work, and not how fast or how well they learn."
OK, FAILED, NOT_RUN = "ok", "failed", "not run"


class Row(NamedTuple):
    """A part that has ended, or a case of a part."""

    part: str
    case: str  # empty for the part itself
    result: str
    seconds: float
    figures: dict[str, Any]  # of a part that failed: `error`


def append(path: Path, row: Row) -> None:
    """Add a row to the file, and wait until it is on the disk: the machine may go away at any time."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(Row._fields)
        writer.writerow(row._replace(seconds=round(row.seconds, 1), figures=json.dumps(row.figures)))  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())


def rows_of(path: Path) -> list[Row]:
    """Read the file's rows; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        records = list(csv.reader(file))[1:]
    return [
        Row(part, case=case, result=result, seconds=float(seconds), figures=json.loads(figures))
        for part, case, result, seconds, figures in records
    ]


def page(rows: Sequence[Row], titles: Mapping[str, str], device: str, gpus: Sequence[str]) -> str:
    """A summary of all parts, then a section for each, with complete error messages."""
    parts = [row for row in rows if not row.case]
    lines = [
        f"# asyncrl on {', '.join(gpus) or 'no GPU'}",
        "",
        f"Device `{device}`. {sum(row.result == OK for row in parts)} of {len(parts)} parts passed. `report.csv` has "
        "the same figures.",
        *([SMALL] if device == "cpu" else []),
        "",
        "| part | result | seconds |",
        "|-|-|-|",
        *(
            f"| {titles[row.part]} | {row.result.upper() if row.result != OK else OK} | {row.seconds:g} |"
            for row in parts
        ),
    ]
    for row in parts:
        lines += ["", f"## {titles[row.part]}", ""]
        for case in rows:
            if case.part == row.part and case.case:
                outcome = _texts(case.figures) if case.result == OK else f"{case.result}: {case.figures['error']}"
                lines.append(f"- {case.case}: {outcome}")
        lines += _section(row)
    return "\n".join(lines) + "\n"


def _section(row: Row) -> Iterator[str]:
    if row.result != OK:
        yield from ("```", str(row.figures["error"]).rstrip(), "```")
        return
    for name, value in row.figures.items():
        if isinstance(value, Mapping):
            yield f"- {name}: {_texts(value)}"
        elif isinstance(value, list) and value and isinstance(value[0], str):
            yield from (f"- {name}:", "", "```", *value, "```", "")
        else:
            yield f"- {name}: {_text(value)}"


def _texts(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_texts(value)})"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)
