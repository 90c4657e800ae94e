"""Real runs, started as a user starts them: the command in its own process, with real Ray, DeepSpeed and vLLM."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.small_models import CHAIN_SUM

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
"""Seconds after which a run that should have ended counts as hung."""
CLONE_NEWNS = 0x20000
"""Flag of unshare(2): a mount namespace."""

BASE_SPEC: dict[str, Any] = {
    "name": "sums",
    "seed": 0,
    "model": {"path": str(CHAIN_SUM), "max_length": 64},
    "task": {"use": "chain_sum", "options": {"min_terms": 2, "max_terms": 3}},
    "data": {"eval": {"size": 64}},
    "rollout": {"group_size": 8, "max_running_rollouts": 64, "max_prompt_tokens": 16, "max_response_tokens": 40},
    "trainer": {"optimizer": {"learning_rate": 5.0e-4}, "tokens_per_microbatch": 2048},
    "pipeline": {"mode": "async", "max_staleness": 2, "groups_per_step": 8},
    "tracking": {"mlflow": False},
    "stop": {"steps": 4},
}
"""A run that takes seconds. Its model guesses most sums."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


STARTED: list[subprocess.Popen[str]] = []
"""Every command that a test here has started."""


@dataclass(frozen=True)
class Runs:
    """A runs folder, and the commands that use it."""

    folder: Path

    def write_spec(self, **sections: Any) -> Path:
        """Write the base spec with some sections changed (merged one level deep), next to a module with tasks.

        Another task or model replaces the base spec's.
        """
        shutil.copy(ROOT / "tests/spell_backward.py", self.folder)
        spec = {**BASE_SPEC, "runs_dir": str(self.folder)}
        for name, value in sections.items():
            base = {} if isinstance(value, dict) and value.keys() & {"use", "mix"} else spec.get(name, {})
            spec[name] = {**base, **value} if isinstance(value, dict) else value
        if spec["model"].get("init"):
            spec["model"]["path"] = None
        path = self.folder / f"{spec['name']}.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "asyncrl_cli.cli.app", *map(str, arguments)]

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start `asyncrl ARGUMENTS`, without waiting for it."""
        process = subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "120"},
        )
        STARTED.append(process)
        return process

    def run(self, *arguments: str | Path) -> Ended:
        return self.wait(self.start(*arguments))

    def succeed(self, *arguments: str | Path) -> Ended:
        ended = self.run(*arguments)
        assert ended.code == 0, ended.out + ended.err + self.logs()
        return ended

    def wait(self, process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Ended:
        """Wait for a command; one that hangs is interrupted and fails the test."""
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
            pytest.fail(f"the run hung\n{out}\n{err}")
        return Ended(process.returncode, out, err)

    def train(self, **sections: Any) -> Path:
        """Train a spec that must succeed; returns the run's folder."""
        return self.train_spec(self.write_spec(**sections))

    def train_spec(self, spec: Path, *changes: str) -> Path:
        """Train a spec with `--set` for each change, which must succeed; returns the run's folder."""
        self.succeed("train", spec, *(word for change in changes for word in ("--set", change)))
        return self.newest()

    def newest(self) -> Path:
        """The folder of the run that was started last."""
        return max(self.folder.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime_ns).parent

    def steps_done(self) -> int:
        """Number of lines of the newest run's metrics: its steps, and a warm start's updates."""
        files = [self.newest() / "metrics.jsonl"] if any(self.folder.glob("*/manifest.json")) else []
        return sum(len(file.read_text().splitlines()) for file in files if file.exists())

    def kill_after(self, steps: int, spec: Path) -> Path:
        """Train a spec, and kill its driver after this many steps; returns the run's folder."""
        process = self.start("train", spec)
        until(lambda: process.poll() is not None or self.steps_done() >= steps, f"{steps} steps")
        process.kill()
        out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, out + err
        return self.newest()

    def logs(self) -> str:
        """The ends of the newest run's logs, for the message of a failed assertion."""
        if not any(self.folder.glob("*/manifest.json")):
            return "no run was started"
        logs = sorted(self.newest().glob("logs/*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    """The lines of one of a run's JSON Lines files."""
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run's steps, without the updates of its warm start."""
    return [row for row in rows(run, "metrics.jsonl") if row["step"] > 0]


def until(condition: Callable[[], Any], what: str, seconds: float = LIMIT_S) -> Any:
    """The first true answer of ``condition``; fails the test when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.05)
    pytest.fail(f"waited {seconds:.0f} s for {what}")


def processes_of(run_mark: str) -> list[int]:
    """Living processes that carry a run's mark in their environment."""
    from asyncrl_cli.system.reaper import marked_processes

    return list(marked_processes(run_mark))


def mark_of(pid: int) -> str:
    """The mark of the run whose driver has this pid, read from one of its descendants."""
    import psutil

    from asyncrl_cli.system.reaper import MARK

    for child in psutil.Process(pid).children(recursive=True):
        try:
            if mark := child.environ().get(MARK):
                return mark
        except psutil.Error:
            continue
    return ""


@pytest.fixture(scope="session", autouse=True)
def _shared_memory() -> None:
    own_shared_memory()  # before the first run starts


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One runs folder for this process."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """A runs folder for one test: its temporary folder."""
    return Runs(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Every test here leaves the temporary folder and /dev/shm as it found them. Processes that a failed test has not
    ended are killed, because they would slow down later tests."""
    before, started = leftover_files(), len(STARTED)
    yield
    for process in STARTED[started:]:  # processes of fixtures with a wider scope were started before
        if process.poll() is None:
            process.kill()
            process.communicate()
    until(lambda: not leftover_files() - before, f"{leftover_files() - before} to be removed", 120)


@cache
def own_shared_memory() -> bool:
    """Give this process and its children their own /dev/shm, which ends with them. Returns False without root's rights.

    Files in /dev/shm do not tell who made them, so in a shared one another suite's files would look like leftovers.
    Call it in the main thread, before runs start: only processes that start later have it.
    """
    if ctypes.CDLL(None).unshare(CLONE_NEWNS):
        return False
    # First the propagation: otherwise everyone would get the new /dev/shm.
    mounts = (["--make-rslave", "/"], ["-t", "tmpfs", "shm", "/dev/shm"])
    return all(subprocess.run(["mount", *arguments], check=False).returncode == 0 for arguments in mounts)


def leftover_files() -> set[str]:
    """Files that runs could leave on this machine outside their folders: in the temporary folder, and files in
    /dev/shm that no living process has mapped or opened. A /dev/shm that others also use is not searched."""
    temporary = {str(path) for path in Path(tempfile.gettempdir()).glob("asyncrl-*")}
    shared = set(map(str, Path("/dev/shm").iterdir())) if own_shared_memory() else set()
    if not shared:
        return temporary
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            used |= set(re.findall(r"/dev/shm/\S+", (process / "maps").read_text()))
            used |= {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
    return temporary | (shared - used)
