"""A run's data that MLflow does not have yet, read from the run's folder.

    metrics.jsonl, system.jsonl, spec.yaml, evaluations/, model/    all data to send
    mlflow.json                                                     record of the sent data, and the MLflow run

All data is on disk anyway, so a server that does not answer costs no memory, and a killed process loses nothing.
Progress is noted after sending, so after a crash some data is sent again. This changes nothing, because each number is
sent with the step and the time at which it was recorded.

A step is new if its number or its time is above the last sent step's. A resumed run repeats steps; their new numbers
are sent, too, and MLflow shows both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from asyncrl_cli.core.secrets import hide
from asyncrl_cli.runs.directory import RunDirectory

FILE = "mlflow.json"
SPEC = "spec.yaml"
EVALUATIONS = "evaluations/*.jsonl"
STEPS = "metrics.jsonl"
SAMPLES = "system.jsonl"
BLOCK = 2**16
"""Bytes read at a time from the end of a file."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The record of the data that has been sent."""

    uri: str
    experiment: str
    run_id: str = ""
    status: str = ""
    """MLflow's status of the run."""
    health: str = ""
    """The value of the tag with the broken rules of health."""
    step: int = 0
    time: float = 0.0
    """The last step's number and unix time (s)."""
    sampled: float = 0.0
    """Unix time (s) of the machine's last sample."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Modification time (ns) of the sent version of each file, by ``PURPOSE: PATH`` with the path in the folder."""
    registered: Mapping[str, str] = field(default_factory=dict)
    """Versions of registered models, by ``NAME, ARTIFACT``."""
    problem: str = ""
    """Why the last attempt did not send everything."""


class Outbox:
    """A run's numbers and files for one MLflow experiment. One process at a time may call ``note``."""

    def __init__(self, run: RunDirectory, uri: str, experiment: str) -> None:
        self.run = run
        self.sent = Sent(hide(uri), experiment)
        try:
            sent = Sent(**json.loads((run.path / FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return
        if (sent.uri, sent.experiment) == (self.sent.uri, experiment):
            self.sent = sent

    @property
    def version(self) -> str:
        """The newest registered version of the run's model; empty without one."""
        return list(self.sent.registered.values())[-1] if self.sent.registered else ""

    def note(self, **changes: Any) -> None:
        """Record that data has been sent."""
        self.sent = replace(self.sent, **changes)
        self.run.write_json(FILE, asdict(self.sent), private=True)

    def forget(self) -> None:
        """Send everything again."""
        self.sent = Sent(self.sent.uri, self.sent.experiment)

    def steps(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl that have not been sent, in order."""
        return self._new_rows(STEPS, lambda row: row["step"] > self.sent.step or row["time"] > self.sent.time)

    def samples(self) -> list[dict[str, Any]]:
        """Return the rows of system.jsonl that have not been sent, in order."""
        return self._new_rows(SAMPLES, lambda row: row["time"] > self.sent.sampled)

    def files(self, purpose: str, paths: Iterable[Path]) -> Iterator[Path]:
        """Yield the files that were not sent for this purpose, or were written again since.

        A file is noted as sent when the caller asks for the next one, and not if the caller raises or leaves the loop.
        """
        for path in sorted(paths):
            name, version = f"{purpose}: {path.relative_to(self.run.path)}", path.stat().st_mtime_ns
            if self.sent.files.get(name) != version:
                yield path
                self.note(files={**self.sent.files, name: version})

    def _new_rows(self, name: str, is_new: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
        return list(takewhile(is_new, _rows_from_the_end(self.run.path / name)))[::-1]


def _rows_from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a JSON Lines file, last first: reading all of a long run's file for every step would
    be slow."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        start = file.seek(0, os.SEEK_END)
        first = b""
        while start > 0:
            end, start = start, max(0, start - BLOCK)
            file.seek(start)
            first, *lines = (file.read(end - start) + first).split(b"\n")
            yield from filter(None, map(_row, reversed(lines)))
        if row := _row(first):
            yield row


def _row(line: bytes) -> dict[str, Any] | None:
    """None for an incomplete line, which a kill can leave."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and all(isinstance(row.get(key), int | float) for key in ("step", "time"))
    return row if whole else None
