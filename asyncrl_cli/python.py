"""Train from Python, for notebooks and scripts.

``train`` starts `asyncrl train` as a separate process, which continues when the notebook's kernel ends. ``Run`` is a
handle on any run's folder, also of a run that a command line or an earlier kernel has started.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from asyncrl_cli.core.errors import ConfigError, RunError
from asyncrl_cli.core.files import atomic_write
from asyncrl_cli.runs.directory import MODEL, RunDirectory

if TYPE_CHECKING:
    from pandas import DataFrame

POLL_S = 0.2
"""Seconds between two looks at a process or a run's folder."""
MODULE = '''"""A function that asyncrl_cli.python.train was called with, pickled by cloudpickle."""

import base64

import cloudpickle

{name} = cloudpickle.loads(base64.b64decode("{pickle}"))
'''


class Run:
    """A run in its folder."""

    def __init__(self, folder: str | Path, process: subprocess.Popen[bytes] | None = None) -> None:
        """``process``: the run's driver, if this process has started it."""
        self.folder = Path(folder).absolute()
        if not (self.folder / "manifest.json").is_file():
            raise RunError("this is not a run's folder", location=str(self.folder), hint="list runs: asyncrl runs")
        self._directory = RunDirectory(self.folder)
        self._process = process

    def __repr__(self) -> str:
        return f"<Run {self._progress()}>"

    @property
    def run_id(self) -> str:
        """The run's id, for the command line."""
        return self.folder.name

    @property
    def status(self) -> str:
        """``starting``, ``running``, ``finished``, ``interrupted``, ``failed`` or ``died``."""
        if self._process is not None:
            self._process.poll()  # otherwise an ended driver stays a zombie
        return RunDirectory(self.folder).status

    def metrics(self) -> DataFrame:
        """The metrics, one row per step (docs/metrics.md); a warm start's rows have steps up to 0."""
        import pandas

        return pandas.DataFrame(self._directory.read("metrics.jsonl"))

    def samples(self) -> DataFrame:
        """Responses of evaluations and of every ``tracking.responses_every`` training steps.

        The column ``table`` has ``training`` or the evaluation's kind; ``ResponseRow`` describes the others.
        """
        import pandas

        from asyncrl_cli.inspect.resolved import resolved_spec
        from asyncrl_cli.inspect.response_tables import ResponseRow, response_tables

        step = RunDirectory(self.folder).state.step
        tables = response_tables(self._directory, resolved_spec(self._directory), step)
        rows = [(table.name, *row) for table in tables for row in table.rows]
        return pandas.DataFrame(rows, columns=["table", *ResponseRow._fields])

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait until the run has finished, with a line of progress. Returns the run.

        Raises ``RunError`` if the run ends otherwise, and ``TimeoutError`` after ``timeout_s`` seconds.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        line = ""
        while self._is_active():
            last_line, line = line, self._progress()
            if line != last_line:
                print(f"\r{line:<{len(last_line)}}", end="", flush=True)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.run_id} still runs after {timeout_s:g} s: {line}")
            time.sleep(POLL_S)
        print(f"\r{self._progress():<{len(line)}}", flush=True)
        if self.status != "finished":
            reason = RunDirectory(self.folder).state.reason
            raise RunError(
                f"the run {self.status}{': ' + reason if reason else ''}",
                location=str(self.folder),
                hint=f"see logs/driver.log there; continue with: asyncrl resume {self._directory.argument}",
            )
        return self

    def stop(self, timeout_s: float = 600.0) -> None:
        """Interrupt the run, as Ctrl-C does, and wait until it has saved a checkpoint and ended.

        Does nothing if the run has ended. Raises ``RunError`` if its driver is on another host, and ``TimeoutError``.
        """
        if not self._is_active():
            return
        os.kill(self._driver_pid(), signal.SIGINT)
        deadline = time.monotonic() + timeout_s
        while self._is_active():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.run_id} has not ended {timeout_s:g} s after its interruption")
            time.sleep(POLL_S)

    @property
    def model(self) -> Path:
        """The folder of the final model, in Hugging Face's format. Raises ``RunError`` before the run has finished."""
        folder = self.folder / MODEL
        if not (folder / "config.json").is_file():
            hint = f"wait for the run, or export a checkpoint: asyncrl checkpoint export {self._directory.argument}"
            raise RunError("the run has no final model yet", location=str(folder), hint=hint)
        return folder

    def _is_active(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return self._directory.is_driven

    def _driver_pid(self) -> int:
        if self._process is not None:
            return self._process.pid
        words = (self.folder / "lock").read_text().split()  # "pid 123 on host"
        if words[3:] != [os.uname().nodename]:
            raise RunError("the run's driver is on another host", location=" ".join(words), hint="stop it there")
        return int(words[1])

    def _progress(self) -> str:
        state = RunDirectory(self.folder).state
        accuracies = [f", held-out accuracy ({name}) {value:.3f}" for name, value in state.accuracy.items()]
        return f"{self.run_id}: {self.status}, step {state.step} of {state.steps}{''.join(accuracies[:1])}"


def train(
    spec: str | Path | Mapping[str, Any],
    *,
    reward: Callable[..., Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Run:
    """Start `asyncrl train` in a separate process, and return the run as soon as all checks of its start have passed.

    ``spec``: a YAML file, or its contents as a mapping; relative paths in a mapping start in the current folder.
    ``reward``: a function for ``task.use``, such as a reward ``f(prompt, response)`` or an agent ``async f(prompt,
    model)``. Its values travel with it: what it reads from its surroundings now. ``overrides``: values by dotted key,
    like `--set`.

    A mapping and a function are written to files named by their content, next to the spec or in the current folder: the
    run needs them when it is resumed.

    Raises ``SpecError`` and ``ConfigError`` with the command's message if the spec is refused, or if the function
    cannot be pickled.
    """
    import yaml

    from asyncrl_cli.spec.load import load_spec

    spec_file = None if isinstance(spec, Mapping) else Path(spec).absolute()
    folder = Path.cwd() if spec_file is None else spec_file.parent
    values: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {"extends": Path(spec).name}
    if reward is not None:
        values["task"] = {**values.get("task", {}), "use": f"{_function_module(reward, folder)}:{_name_of(reward)}"}
    if spec_file is None or reward is not None:
        spec_file = _content_file(yaml.safe_dump(values, sort_keys=False), folder, "asyncrl_spec", ".yaml")
    changes = [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
    words = [sys.executable, "-P", "-m", "asyncrl_cli.cli.app", "train", str(spec_file), "--quiet"]
    runs_dir = load_spec(spec_file, changes).spec.runs_dir.absolute()
    with TemporaryFile() as out, TemporaryFile() as err:
        # In its own session and without pipes, so neither Ctrl-C in a notebook nor the end of its kernel ends the run.
        process = subprocess.Popen(
            [*words, *(word for change in changes for word in ("--set", change))],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            return Run(runs_dir / _started_run(process, out, err), process)
        except BaseException:
            process.send_signal(signal.SIGINT)
            raise


def _started_run(process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes]) -> str:
    """Wait until the command has passed its checks, which have their own limits; returns the run's id."""
    while "\n" not in _text(out):
        if process.poll() is not None and "\n" not in _text(out):
            message = _text(err).strip() or f"asyncrl train ended with exit code {process.returncode}"
            raise ConfigError(message.removeprefix("error: "))
        time.sleep(POLL_S)
    return _text(out).splitlines()[0]


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), 2**20, 0).decode(errors="replace")


def _function_module(function: Callable[..., Any], folder: Path) -> str:
    """Write a module with the pickled function; returns its name."""
    pickle = base64.b64encode(_pickled(function)).decode()
    return _content_file(MODULE.format(name=_name_of(function), pickle=pickle), folder, "asyncrl_function", ".py").stem


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "function"  # a lambda, or an object with __call__


def _content_file(text: str, folder: Path, prefix: str, suffix: str) -> Path:
    file = folder / f"{prefix}_{hashlib.sha256(text.encode()).hexdigest()[:12]}{suffix}"
    with atomic_write(file) as stream:
        stream.write(text.encode())
    return file


def _pickled(function: Callable[..., Any]) -> bytes:
    """The function with all that it reads from its surroundings. Raises ``ConfigError`` with a value's name."""
    import inspect

    import cloudpickle

    module = inspect.getmodule(function)
    by_value = module is not None and module.__name__ != "__main__"
    if by_value:  # the run cannot import modules that are next to a notebook
        cloudpickle.register_pickle_by_value(module)
    try:
        pickle: bytes = cloudpickle.dumps(function)
        return pickle
    except Exception as error:
        values = inspect.getclosurevars(function)
        for name, value in {**values.globals, **values.nonlocals}.items():
            try:
                cloudpickle.dumps(value)
            except Exception:
                raise ConfigError(
                    f"{_name_of(function)} uses {name}, a {type(value).__name__}, which cannot be sent to the run",
                    location="reward",
                    hint=f"make {name} inside the function",
                ) from None
        raise ConfigError(f"{_name_of(function)} cannot be sent to the run: {error}", location="reward") from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
