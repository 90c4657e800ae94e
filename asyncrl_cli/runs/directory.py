"""What a run is on disk.

    runs/<run id>/
      manifest.json     who, what, when, with the versions of everything
      spec.yaml         the resolved spec
      state.json        where the run is; replaced whole after every step
      lock              held (flock) by the process that drives the run; the kernel frees it however that ends
      metrics.jsonl     one line per step
      system.jsonl      what the machine did, every ten seconds; only with MLflow
      journal.db        every group, rollout, batch and version (buffer/schema.py); beside it SQLite's -wal and -shm
      mlflow.json       MLflow's id of the run, and what it has been sent
      prometheus.json   where Prometheus finds the run's metrics, while its own Ray runs
      skeleton/         the model's config and tokenizer, which engines start from
      evaluations/      the samples of each evaluation
      logs/             one file per process
      checkpoints/      trainer state, one folder per checkpointed step
      model/            the final weights, as a Hugging Face directory

Invariant: a reader never sees half a file: what changes is written aside and renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from asyncrl_cli.runs.errors import UserError

Phase = Literal["starting", "running", "finished", "interrupted", "failed"]
SUBFOLDERS = ("logs", "checkpoints", "evaluations")
DEFAULT_RUNS = Path("runs")
"""The folder of all runs where neither spec nor command line names one, below the working directory."""
MODEL = "model"
"""The final model's folder in that of the run."""
LOCK_PATIENCE_S = 0.5
"""Seconds that ``lock`` tries: ``is_driven`` holds the lock for a moment when it looks."""


class RunError(UserError):
    """A run that cannot start, go on or be found."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run is. ``accuracy`` and ``accuracy_before`` hold held-out accuracies by kind (``greedy``,
    ``sampled``): the latest ones, and those of the initial model."""

    phase: Phase = "starting"
    step: int = 0
    steps: int = 0
    version: int = 0
    accuracy: Mapping[str, float] = field(default_factory=dict)
    accuracy_before: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    updated: float = 0.0


class RunDirectory:
    """One run's folder. Readers need only the path; the driver also holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._state: RunState | None = None

    @classmethod
    def create(cls, runs_dir: Path, name: str) -> RunDirectory:
        """Make a new, locked run folder. Raises ``RunError`` when the runs folder cannot be written."""
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        run = cls(runs_dir.absolute() / f"{name}-{stamp}-{secrets.token_hex(2)}")
        try:
            for folder in SUBFOLDERS:
                (run.path / folder).mkdir(parents=True)
        except OSError as error:
            raise RunError(
                f"the run's folder cannot be made: {error.strerror}",
                place=str(error.filename or run.path),
                mend="Set runs_dir to a folder you may write to",
            ) from None
        run.lock()
        return run

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def argument(self) -> str:
        """What names this run on a command line typed here: its id, or its path where the id would not be found."""
        default = self.path.parent.absolute() == DEFAULT_RUNS.absolute()
        return self.run_id if default else shlex.quote(str(self.path))

    def lock(self) -> None:
        """Become the one driver of this run. Raises ``RunError`` with the other's pid when there is one."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                owner = os.read(descriptor, 200).decode(errors="replace").strip()
                os.close(descriptor)
                raise RunError(
                    f"the run is being driven by {owner or 'another process'}",
                    place=self.run_id,
                    mend="Wait for it to end, or stop that process first",
                )
            time.sleep(0.005)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}".encode(), 0)
        self._lock = descriptor

    def unlock(self) -> None:
        """Give the run up."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def is_driven(self) -> bool:
        """Whether a living process drives this run."""
        if self._lock is not None:
            return True
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file whole."""
        self.write_text(name, json.dumps(value, indent=1, default=str) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replace a text file whole."""
        path = self.path / name
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Add one line to a JSON Lines file."""
        with (self.path / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def forget_after(self, name: str, step: int) -> None:
        """Drop a JSON Lines file's rows of later steps, which a resumed run does again."""
        kept = [row for row in self.read(name) if row["step"] <= step]
        self.write_text(name, "".join(json.dumps(row) + "\n" for row in kept))

    def read(self, name: str) -> list[dict[str, Any]]:
        """Every whole line of a JSON Lines file; a kill or a full disk can leave half a line anywhere in it."""
        try:
            lines = (self.path / name).read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [row for line in lines if (row := _parsed(line)) is not None]

    @property
    def state(self) -> RunState:
        """The latest state on disk. A damaged or missing file reads as a fresh start."""
        if self._state is None:
            try:
                return _checked(RunState(**json.loads((self.path / "state.json").read_text())))
            except (OSError, ValueError, TypeError):
                return RunState()
        return self._state

    def update(self, **changes: Any) -> RunState:
        """Change the state, on disk too. For the driver."""
        self._state = replace(self.state, updated=time.time(), **changes)
        self.write_json("state.json", asdict(self._state))
        return self._state

    def as_if(self, **changes: Any) -> RunDirectory:
        """A view of this folder, to read, as if the state were changed; on disk it is not."""
        view = RunDirectory(self.path)
        view._state = replace(view.state, **changes)
        return view

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest; empty when it is missing or damaged."""
        try:
            value = json.loads((self.path / "manifest.json").read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def _checked(state: RunState) -> RunState:
    """The state, if its fields have their types. Raises ``ValueError``."""
    counts = (state.step, state.steps, state.version)
    accuracies = (state.accuracy, state.accuracy_before)
    sound = (
        state.phase in get_args(Phase)
        and all(type(count) is int for count in counts)
        and all(isinstance(kinds, dict) for kinds in accuracies)
        and all(type(value) in (int, float) for kinds in accuracies for value in kinds.values())
        and type(state.reason) is str
        and type(state.updated) in (int, float)
    )
    if not sound:
        raise ValueError("not a run's state")
    return state


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
