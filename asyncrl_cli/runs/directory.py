"""The folder of a run on disk.

    runs/<run id>/
      manifest.json     command, host, code and package versions of the start
      spec.yaml         the resolved spec
      state.json        the run's phase and progress; replaced after every step
      lock              locked (flock) by the driver; the kernel frees the lock when it ends
      metrics.jsonl     one line per step, and per update of the warm start
      journal.db        every group, rollout, batch and version (journal/schema.py); with SQLite's -wal and -shm
      mlflow.json       MLflow's id of the run, and how far metrics.jsonl was sent to it
      sessions.json     address and token for the programs of the task `external`; only the owner can read it
      prometheus.json   where Prometheus finds the run's metrics, while its own Ray runs
      warm_start/       the result of `model.warm_start`: the run's initial model
      warm_start_checkpoints/   of an unfinished warm start
      model_stub/       the model's config and tokenizer, which engines start from
      evaluations/      the samples of each evaluation
      logs/             one file per process
      checkpoints/      trainer state, one folder per checkpointed step
      model/            the final weights, as a Hugging Face directory
      adapter/          the final adapters, as peft saves them

Invariant: a reader never sees half a file, because files that change are replaced atomically.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.files import atomic_write

Phase = Literal["starting", "running", "finished", "interrupted", "failed"]
ACTIVE = ("starting", "running")
"""Phases of a run that a process drives."""
SUBFOLDERS = ("logs", "checkpoints", "evaluations")
DEFAULT_RUNS = Path("runs")
"""The default folder of all runs, below the working directory."""
STATE = "state.json"
MODEL = "model"
"""The name of the final model's folder in the run's folder."""
ADAPTER = "adapter"
"""The name of the folder with the final adapters, as peft saves them."""
WARM_START = "warm_start"
"""The name of the folder with the warm start's result."""
LOCK_TIMEOUT_S = 0.5
"""Seconds for which ``lock`` tries: ``is_driven`` holds the lock for a moment during its check."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's phase and progress. ``accuracy`` and ``accuracy_before`` have the latest and the initial model's held-out
    accuracy by kind (``greedy``, ``sampled``). ``engines`` has the numbers of ``serving`` and ``wanted`` engines;
    ``engines_wait`` says why the others do not serve. ``findings`` has the rules of inspect/health.py that are broken
    now."""

    phase: Phase = "starting"
    step: int = 0
    steps: int = 0
    version: int = 0
    accuracy: Mapping[str, float] = field(default_factory=dict)
    accuracy_before: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    engines: Mapping[str, int] = field(default_factory=dict)
    engines_wait: str = ""
    findings: tuple[str, ...] = ()
    updated: float = 0.0


def engines_text(state: RunState) -> str:
    """A text about the serving, the wanted and the missing engines; empty if they are not known."""
    if not state.engines:
        return ""
    wait = f" ({state.engines_wait})" if state.engines_wait else ""
    return f"{state.engines.get('serving', 0)} of {state.engines.get('wanted', 0)} serve{wait}"


class RunDirectory:
    """One run's folder. Readers need only the path; the driver also holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._state: RunState | None = None

    @classmethod
    def create(cls, runs_dir: Path, name: str) -> RunDirectory:
        """Make and lock a new run folder. Raises ``RunError`` if ``runs_dir`` cannot be written."""
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        run = cls(runs_dir.absolute() / f"{name}-{stamp}-{secrets.token_hex(2)}")
        try:
            for folder in SUBFOLDERS:
                (run.path / folder).mkdir(parents=True)
        except OSError as error:
            raise RunError(
                f"the run's folder cannot be made: {error.strerror}",
                location=str(error.filename or run.path),
                hint="set runs_dir to a folder you may write to",
            ) from None
        run.lock()
        return run

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def model_stub(self) -> Path:
        """The folder of the model's config and tokenizer."""
        return self.path / "model_stub"

    @property
    def outside_access(self) -> Path:
        """The file with the address and the token for programs outside of the run."""
        return self.path / "sessions.json"

    @property
    def status(self) -> str:
        """The run's phase, or ``died`` if the phase is active and no process drives the run."""
        phase = self.state.phase
        return "died" if phase in ACTIVE and not self.is_driven else phase

    @property
    def argument(self) -> str:
        """This run's name on a command line in the working directory: its id, or its path if it is elsewhere."""
        default = self.path.parent.absolute() == DEFAULT_RUNS.absolute()
        return self.run_id if default else shlex.quote(str(self.path))

    def lock(self) -> None:
        """Become the only driver of this run. Raises ``RunError`` with the other driver's pid if there is one."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not self._try_lock():
            if time.monotonic() > deadline:
                owner = ""
                with suppress(OSError):
                    owner = (self.path / "lock").read_text(errors="replace")[:200].strip()
                raise RunError(
                    f"the run is being driven by {owner or 'another process'}",
                    location=self.run_id,
                    hint="wait for it to end, or stop that process first",
                )
            time.sleep(0.005)

    def unlock(self) -> None:
        """Stop being the driver."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _try_lock(self) -> bool:
        """Lock the file ``lock``; False if another process has. If someone removes the file, a second driver can start:
        then the journal refuses the first one's commits (decision 0013)."""
        path = self.path / "lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise
        except BlockingIOError:
            return False
        except FileNotFoundError:
            raise RunError("the run's folder is gone", location=str(self.path)) from None
        except OSError as error:
            raise RunError(
                f"the run cannot be locked: {error.strerror}",
                location=str(path),
                hint="a process that changes a run needs a lock in its folder: copy the folder to a location where "
                "you can write, and use the copy",
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()} on {os.uname().nodename}".encode(), 0)
        self._lock = lock
        return True

    @property
    def is_driven(self) -> bool:
        """True if a living process drives this run."""
        if self._lock is not None:
            return True
        with suppress(OSError), (self.path / "lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def write_json(self, name: str, value: Any, private: bool = False) -> None:
        """Replace a JSON file atomically."""
        self.write_text(name, json.dumps(value, indent=1, default=str) + "\n", private)

    def write_text(self, name: str, text: str, private: bool = False) -> None:
        """Replace a text file atomically. ``private``: only the owner can read it."""
        with atomic_write(self.path / name, private=private) as file:
            file.write(text.encode())

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Add one complete line to a JSON Lines file, or nothing."""
        line = (json.dumps(row) + "\n").encode()
        with (self.path / name).open("ab", buffering=0) as file:
            end_offset = file.seek(0, os.SEEK_END)
            if file.write(line) != len(line):  # the disk is full
                file.truncate(end_offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / name))

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a JSON Lines file atomically."""
        self.write_text(name, "".join(json.dumps(row) + "\n" for row in rows))

    def read(self, name: str) -> list[dict[str, Any]]:
        """Every complete row of a JSON Lines file. A kill or a full disk can leave half a line anywhere in it."""
        rows: list[dict[str, Any]] = []
        with suppress(OSError):
            for line in (self.path / name).read_text(errors="replace").splitlines():
                with suppress(ValueError, RecursionError):
                    if isinstance(row := json.loads(line), dict):
                        rows.append(row)
        return rows

    def begin(self, spec: str, steps: int, manifest: Mapping[str, Any] | None = None) -> None:
        """Write the resolved spec, the state, and a new run's manifest. Raises ``RunError``.

        Spec and manifest are private, because they may hold secrets that ``core.secrets`` does not recognize.
        """
        try:
            if manifest is not None:
                self.write_json("manifest.json", manifest, private=True)
            self.write_text("spec.yaml", spec, private=True)
            self.update(phase="starting", steps=steps)
        except OSError as error:
            raise RunError(
                f"the run's folder cannot be written: {error.strerror}",
                location=str(self.path),
                hint="free space, or set runs_dir to another disk",
            ) from None

    @property
    def state(self) -> RunState:
        """The latest state on disk. A damaged or missing file reads as a fresh start."""
        if self._state is None:
            try:
                state = json.loads((self.path / STATE).read_bytes())
                return RunState(**state | {"findings": tuple(state["findings"])})
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                return RunState()
        return self._state

    def update(self, **changes: Any) -> RunState:
        """Change the state in memory and on disk. For the driver."""
        state = self.change(**changes)
        self.write_state(state)
        return state

    def change(self, **changes: Any) -> RunState:
        """Change the state only in this process."""
        self._state = replace(self.state, updated=time.time(), **changes)
        return self._state

    def write_state(self, state: RunState) -> None:
        """Replace the state on disk."""
        self.write_json(STATE, asdict(state))

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest; empty if it is missing or damaged."""
        try:
            value = json.loads((self.path / "manifest.json").read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}
