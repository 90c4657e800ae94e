"""Converts a run's data to MLflow's formats: numbers from rows and evaluations, parameters from a spec, and an
evaluation's responses as a table that MLflow shows and ``MlflowClient.load_table`` reads.

MLflow's own ``log_table`` appends to a table that exists. Here a table is one evaluation, written as a whole, so that
sending it twice changes nothing (decision 0032).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.monitors.base import evaluation_metrics

Number = tuple[str, float, float, int]
"""Name, value, unix time (s) and step."""

NO_METRICS = ("step", "version", "time")
"""Keys of a row for its time and step, which are not metrics."""
PARAMETER_LENGTH = 6000
"""Characters that MLflow keeps of a parameter's value."""
TAG = "mlflow.loggedArtifacts"
"""The tag of a run by which MLflow knows its tables."""
TAG_LENGTH = 8000
"""Characters that MLflow keeps of a tag."""
FIRST = ("step", "kind", "uid", "prompt", "response", "reward", "finished")
"""Columns of every table; those that an evaluation has beyond them follow."""


def row_numbers(row: Mapping[str, Any]) -> Iterator[Number]:
    """The numbers of a row of metrics.jsonl or system.jsonl."""
    for name, value in row.items():
        if name not in NO_METRICS and isinstance(value, int | float):
            yield name, float(value), row["time"], row["step"]


def evaluation_numbers(line: str, at: float) -> Iterator[Number]:
    """The numbers of an evaluation: of the first line of its file, which was written at that unix time (s)."""
    result = json.loads(line)
    for name, value in evaluation_metrics(result):
        yield name, value, at, result["step"]


def parameters(spec: dict[str, Any]) -> dict[str, str]:
    """A spec flattened to what MLflow takes: dotted names, short texts."""
    return {re.sub(r"[^\w.\-/ ]", "_", key): str(value)[:PARAMETER_LENGTH] for key, value in flatten(spec).items()}


def table_of(evaluation: str) -> str:
    """The artifact's path, by that of the evaluation's file."""
    return evaluation.removesuffix(".jsonl") + ".json"


def table(path: Path) -> str:
    """The table of an evaluation's file, as MLflow keeps tables: JSON with ``columns`` and ``data``."""
    with path.open(encoding="utf-8") as file:
        result = json.loads(file.readline())
        rows = [_row(result, json.loads(line)) for line in file]
    columns = list(dict.fromkeys([*FIRST, *(name for row in rows for name in row)]))
    data = [[_cell(row.get(name)) for name in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, ensure_ascii=False)


def tag(tables: Iterable[str]) -> str:
    """The value of ``TAG`` that names these artifacts; if they do not fit, as many of the last ones as do."""
    entries = [json.dumps({"path": name, "type": "table"}) for name in tables]
    lengths = accumulate((len(entry) + len(", ") for entry in reversed(entries)), initial=len("[]"))
    fitting = sum(length <= TAG_LENGTH for length in lengths) - 1
    return f"[{', '.join(entries[len(entries) - fitting :])}]"


def _row(result: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in sample.items() if name != "metrics"}
    return {"step": result["step"], "kind": result["kind"], **plain, **sample.get("metrics", {})}


def _cell(value: Any) -> Any:
    """The value of a cell: messages as JSON text, and None for NaN and infinity, which JSON does not have."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return None if isinstance(value, float) and not math.isfinite(value) else value
