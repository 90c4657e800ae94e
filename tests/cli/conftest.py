"""Runs a command line in the tests' process. A test of the process itself starts one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl_cli.cli.app import main
from asyncrl_cli.orchestrator.experiment import Experiment
from asyncrl_cli.records.prompt import Prompt
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec


class Done(NamedTuple):
    """How a command ended."""

    code: object
    out: str
    err: str


class NoChecks:
    """Stands for the checks of a start, and finds nothing."""

    def __init__(self, spec: ExperimentSpec, *_: object, **__: object) -> None:
        self._spec = spec

    def __enter__(self) -> NoChecks:
        return self

    def __exit__(self, *_: object) -> None: ...

    def experiment(self) -> Experiment:
        return Experiment(self._spec, Path(), [Prompt("a", "a")] * 100, [])


def process(*arguments: object, cwd: Path, environment: dict[str, str] | None = None) -> Done:
    """Run a command line in a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl_cli.cli.app", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"ASYNCRL_DEBUG": "0"} | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def asyncrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    """Run a command line in this process, in the test's folder. Locks end with the command, as with its process."""
    monkeypatch.setenv("ASYNCRL_DEBUG", "0")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        locked: list[RunDirectory] = []
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["asyncrl", *map(str, arguments)])
            patched.setattr(RunDirectory, "lock", lambda one, lock=RunDirectory.lock: (locked.append(one), lock(one)))
            with pytest.raises(SystemExit) as ended:
                main()
        for one in locked:
            one.unlock()
        return Done(ended.value.code, *capsys.readouterr())

    return run
