"""What MLflow is told of a run, as it wants it: numbers from rows and evaluations, parameters from a spec."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl_cli.core.flatten import flatten
from asyncrl_cli.monitors.base import evaluation_metrics

Number = tuple[str, float, float, int]
"""Name, value, unix time (s) and step."""

NO_METRICS = ("step", "version", "time")
"""Keys of a row that say when, not what."""
PARAMETER_LENGTH = 6000
"""Characters that MLflow keeps of a parameter's value."""


def row_numbers(row: Mapping[str, Any]) -> Iterator[Number]:
    """Of a row of metrics.jsonl or system.jsonl."""
    for name, value in row.items():
        if name not in NO_METRICS and isinstance(value, int | float):
            yield name, float(value), row["time"], row["step"]


def evaluation_numbers(line: str, at: float) -> Iterator[Number]:
    """Of an evaluation: the first line of its file, which was written at that unix time (s)."""
    result = json.loads(line)
    for name, value in evaluation_metrics(result):
        yield name, value, at, result["step"]


def parameters(spec: dict[str, Any]) -> dict[str, str]:
    """A spec flattened to what MLflow takes: dotted names, short texts."""
    return {re.sub(r"[^\w.\-/ ]", "_", key): str(value)[:PARAMETER_LENGTH] for key, value in flatten(spec).items()}
