"""What a run's folder has beside the journal: evaluations with their samples, and samples of the machine.

A line that cannot be read is skipped: a run that was killed leaves half a line, and a report of the rest is worth
having.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl_cli.runs.directory import RunDirectory

PROCESSOR, MEMORY = "Processor (share)", "Memory used (GB)"
GPU, GPU_MEMORY = "GPU (share)", "GPU memory used (GB)"
_SCALES = {
    "system/cpu_utilization_percentage": (PROCESSOR, 0.01),
    "system/system_memory_usage_megabytes": (MEMORY, 1e-3),
}
_OF_GPUS = {"utilization_percentage": (GPU, 0.01), "memory_usage_megabytes": (GPU_MEMORY, 1e-3)}


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """The first line of an evaluation's file: accuracy and the like. ``pass_at`` is empty with one sample a prompt."""

    path: Path
    kind: str
    step: int
    pass_at: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MachineSample:
    """What the machine did at the unix time ``at``, by the titles of charts; GPUs are averaged."""

    at: float
    values: Mapping[str, float]


def evaluation_files(run: RunDirectory) -> list[EvaluationFile]:
    """All evaluations, by step."""
    found = []
    for path in run.path.glob("evaluations/*.jsonl"):
        for head in _rows(path, 1):
            try:
                numbers = tuple(float(value) for value in head.get("pass_at") or ())
                found.append(EvaluationFile(path, str(head["kind"]), int(head["step"]), numbers))
            except (KeyError, TypeError, ValueError):
                continue
    return sorted(found, key=lambda one: (one.step, one.kind))


def evaluation_samples(file: EvaluationFile) -> Iterator[Mapping[str, Any]]:
    """The samples of an evaluation, as they were written."""
    rows = _rows(file.path)
    next(rows, None)
    return rows


def machine_samples(run: RunDirectory) -> list[MachineSample]:
    """All samples, oldest first."""
    found = []
    for row in _rows(run.path / "system.jsonl"):
        at = row.get("time")
        if isinstance(at, int | float) and (values := dict(_readings(row))):
            found.append(MachineSample(float(at), values))
    return found


def _readings(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    gpus: dict[str, list[float]] = {}
    for name, value in row.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if name in _SCALES:
            title, scale = _SCALES[name]
            yield title, value * scale
        elif name.startswith("system/gpu_"):
            quantity = name.removeprefix("system/gpu_").partition("_")[2]  # after the GPU's number
            if quantity in _OF_GPUS:
                title, scale = _OF_GPUS[quantity]
                gpus.setdefault(title, []).append(value * scale)
    for title, values in gpus.items():
        yield title, math.fsum(values) / len(values)


def _rows(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The JSON objects in a file's lines, of the first ``most`` lines."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in islice(lines, most):
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def newest(files: Sequence[EvaluationFile], kind: str) -> tuple[EvaluationFile, EvaluationFile] | None:
    """The first and the last evaluation of a kind; None without two."""
    of_kind = [one for one in files if one.kind == kind]
    return (of_kind[0], of_kind[-1]) if len(of_kind) > 1 else None
