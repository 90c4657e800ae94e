"""The monitor for MLflow. A child process sends the data, so imports, database and a slow server cost the run nothing.

Every few seconds the child looks into the run's folder and sends what MLflow may not have (``Sender.send``). Its
standard input has a line of JSON with the run and the target, and later a line with the run's last status. If the input
closes without that line, the driver is gone, and the child ends.

Invariant: the driver never waits for MLflow before the run's end. All data is on disk, so the child may be killed at
any time. The next step starts a new child; a resume or `asyncrl track` sends the data that is missing at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from select import select
from typing import Any

from asyncrl_cli.monitors.base import FINISH_S, Ending, Monitor, RunInfo
from asyncrl_cli.monitors.mlflow.sender import STATUS, Sender, SendingProgress, Target, failure, target_of
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.logs import redirect_output

PAUSE_S = 2.0  # seconds between two looks at the run's folder


class Mlflow(Monitor):
    """The driver's side. It never fails because of MLflow."""

    name = "MLflow"

    def __init__(self, run: RunDirectory, spec: ExperimentSpec) -> None:
        self._run = run
        self._target = target_of(spec)
        self._restarts = 10  # limited, because a child that cannot work would die at every step

    def started(self, run: RunInfo) -> None:
        # In its own session, because Ctrl-C in the terminal must not end it. The reaper finds it by the run's mark in
        # its environment; in a cluster without a reaper, it ends when its input closes.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        # Not as arguments, because every user of the machine can read them, and the URI may contain a password.
        self._tell([str(self._run.path), asdict(self._target)])

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        if self._restarts and self._child.poll() is not None:
            self._restarts -= 1
            self.started(RunInfo(self._run.run_id, self._run.path, steps=0, spec={}))

    def finish(self, ending: Ending) -> str:
        self.stepped(0, 0, {})
        self._tell(STATUS[ending.phase])
        limit_s = FINISH_S[ending.phase]
        try:
            code = self._child.wait(limit_s)
            problem = f"the sending process ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not done within {limit_s:.0f} s"
        finally:
            self._child.kill()
            self._child.wait()
        if problem:
            return f"{problem}, see logs/mlflow.log; the rest is kept, later: asyncrl track {self._run.argument}"
        return f"run {SendingProgress.of(self._run).run_id} in experiment {self._target.experiment}"

    def _tell(self, message: Any) -> None:
        assert self._child.stdin is not None
        with suppress(OSError):  # the child has ended
            self._child.stdin.write(json.dumps(message).encode() + b"\n")


def send_until_end(run: RunDirectory, target: Target, commands: FileIO) -> None:
    """Send a run's data until ``commands`` has its last status and everything is sent. Exits if ``commands`` closes."""
    sender = Sender(run, target)
    status, problem = "RUNNING", ""
    while True:
        last_problem, problem = problem, ""
        try:
            sender.send(status)
        except Exception as error:
            problem = failure(error)
        if problem != last_problem:
            print(problem or "everything is sent again", flush=True)
        if not problem and status != "RUNNING":
            return
        if select([commands], [], [], PAUSE_S)[0]:
            if not (line := commands.readline()):
                sys.exit(1)  # the driver is gone
            status = json.loads(line)


def main() -> None:
    # Unbuffered, because `select` does not see a line that Python's buffer has already.
    commands = FileIO(0, closefd=False)
    path, target = json.loads(commands.readline())
    run = RunDirectory(Path(path))
    redirect_output(str(run.path / "logs"), "mlflow")
    send_until_end(run, Target(**target), commands)


if __name__ == "__main__":
    main()
