"""The monitor for MLflow. A child process sends the data, so imports, database and a slow server cost the run nothing.

    working --failed--> waiting (1 s, 2 s, ... 30 s, or the run's end) --> working
    working --all sent--> idle --more--> working
    working --all sent, and the run has ended--> exit

The child reads lines of JSON from its standard input: first the run and the target, then null for new data in the run's
folder, and last how the run ended. If the input closes earlier, the driver is gone, and the child ends.

Invariant: the driver never waits for MLflow before the run's end. All data is on disk (``outbox``), so the child may be
killed at any time. The next step starts a new child; `asyncrl track` sends the data that is missing at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from threading import Condition, Event, Thread
from typing import IO, Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.monitors.base import Ending, EvaluationResult, Monitor, RunInfo
from asyncrl_cli.monitors.mlflow.outbox import SAMPLES, Outbox
from asyncrl_cli.monitors.mlflow.sender import STATUS, Sender, Target, failure, target_of
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.logs import redirect_output

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Seconds between two attempts: first and largest value."""
SAMPLE_S = 10.0
"""Seconds between two samples of the machine, as in MLflow."""
RESTARTS = 10
"""Largest number of restarts in one run: a child that cannot work would die at every step."""
TRACKING_S = {"finished": 30.0, "failed": 10.0, "interrupted": 2.0}
"""Seconds that a run waits for MLflow at its end, by its phase."""


class Mlflow(Monitor):
    """The driver's side. It never fails because of MLflow."""

    name = "MLflow"

    def __init__(self, recorder: Recorder, spec: ExperimentSpec) -> None:
        self._recorder = recorder
        self._target = target_of(spec)
        self._system_metrics = spec.tracking.system_metrics
        self._restarts = RESTARTS

    def started(self, run: RunInfo) -> None:
        self._start()

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._recorder.then(self._more)  # after the step is on disk, because the child reads it there

    def evaluated(self, result: EvaluationResult) -> None:
        self._recorder.then(self._more)

    def finish(self, ending: Ending) -> str:
        problem = self._end(ending)
        run, target = self._recorder.run, self._target
        outbox = Outbox(run, target.uri, target.experiment)
        if not problem:
            registered = target.model and ending.phase == "finished"
            model = f", {target.model} version {outbox.version}" if registered else ""
            return f"run {outbox.sent.run_id} in experiment {target.experiment}{model}"
        steps = len(outbox.steps())
        kept = counted(steps, "step") if steps else "the rest"
        return f"{kept} kept, not sent ({problem}); later: asyncrl track {run.argument}"

    def _start(self) -> None:
        # In its own session, because Ctrl-C in the terminal must not end it. The reaper finds it by the run's mark in
        # its environment; in a cluster without a reaper, it ends when its input closes.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        os.set_blocking(self._input.fileno(), False)
        # Not as arguments, because every user of the machine can read them, and the URI may contain a password.
        self._tell([str(self._recorder.run.path), asdict(self._target), self._system_metrics])

    @property
    def _input(self) -> IO[bytes]:
        assert self._child.stdin is not None
        return self._child.stdin

    def _tell(self, message: Any) -> None:
        with suppress(OSError):  # the child has ended, or it hangs and its input is full
            self._input.write(json.dumps(message).encode() + b"\n")

    def _more(self) -> None:
        if self._child.poll() is None:
            self._tell(None)
        elif self._restarts:
            self._restarts -= 1
            self._input.close()
            self._start()

    def _end(self, ending: Ending) -> str:
        """Wait until everything is sent. Returns the problem that prevented it; empty if there is none."""
        self._more()
        self._tell(asdict(ending))
        limit_s = TRACKING_S[ending.phase]
        try:
            code = self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            noted = Outbox(self._recorder.run, self._target.uri, self._target.experiment).sent.problem
            return noted or f"not done within {limit_s:.0f} s"
        finally:
            self._child.kill()
            self._child.wait()
            self._input.close()
        return f"the sending process ended with exit code {code}" if code else ""


class Tracker:
    """The child's side: sends until the run has ended and everything is sent."""

    def __init__(self, run: RunDirectory, target: Target) -> None:
        self._run = run
        self._uri = target.uri
        self._sender = Sender(run, target)
        self._changed = Condition()
        self._more = False
        self._ending: Ending | None = None

    def more(self) -> None:
        with self._changed:
            self._more = True
            self._changed.notify_all()

    def end(self, ending: Ending) -> None:
        with self._changed:
            self._ending = ending
            self._changed.notify_all()

    def send_until_done(self) -> None:
        wait_s = FIRST_WAIT_S
        shown = ""
        while True:
            with self._changed:
                ending, self._more = self._ending, False
            problem = self._attempt(ending)
            if problem != shown:
                print(problem or "everything is sent again", flush=True)
                shown = problem
            if ending is not None and not problem:
                return
            with self._changed:
                if problem:
                    ended = self._changed.wait_for(lambda: self._ending is not ending, wait_s)  # noqa: B023
                    wait_s = FIRST_WAIT_S if ended else min(2 * wait_s, LONGEST_WAIT_S)
                else:
                    self._changed.wait_for(lambda: self._more or self._ending is not None)
                    wait_s = FIRST_WAIT_S

    def _attempt(self, ending: Ending | None) -> str:
        """Send the missing data. Returns the problem; empty if there is none."""
        ended = None
        if ending is not None and ending.phase != "interrupted":  # an interrupted run has no time for a report
            ended = self._run.as_if(phase=ending.phase, reason=ending.reason)
        try:
            self._sender.send("RUNNING" if ending is None else STATUS[ending.phase], ended)
        except Exception as error:
            problem = failure(error, self._uri)
            with suppress(OSError):
                self._sender.outbox.note(problem=problem)  # the driver shows it
            return problem
        if self._sender.unreported:
            print(f"no report could be made: {self._sender.unreported}", flush=True)
        return ""


def machine_monitors() -> list[Any]:
    """Make MLflow's monitors of processors, memory, disk, network and GPUs."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for gpus in (GPUMonitor, ROCMMonitor):
        with suppress(Exception):  # no such GPU, or no library for it; each library raises its own errors
            monitors.append(gpus())
    return monitors


def sample_machine(
    run: RunDirectory, monitors: Sequence[Any], more: Callable[[], None], stopped: Event, every_s: float = SAMPLE_S
) -> None:
    """Add rows to system.jsonl until ``stopped``, which are sent like steps.

    MLflow's own sampling thread would end at the first request that a server does not answer.
    """

    def measured() -> dict[str, float]:
        found: dict[str, float] = {}
        for monitor in monitors:
            monitor.collect_metrics()
            found |= {f"system/{name}": value for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        return found

    measured()  # in this thread, because shares of time count since the thread's previous call
    while not stopped.wait(every_s):
        run.append(SAMPLES, {"step": run.state.step, "time": time.time(), **measured()})
        more()


def main() -> None:
    # Unbuffered, because Python cannot exit while another thread waits in a buffered reader of standard input.
    messages = map(json.loads, FileIO(0, closefd=False))
    path, target, system_metrics = next(messages)
    run = RunDirectory(Path(path))
    redirect_output(str(run.path / "logs"), "mlflow")
    tracker = Tracker(run, Target(**target))
    ended = Event()

    def listen() -> None:
        try:
            for message in messages:
                if message is None:
                    tracker.more()
                else:
                    ended.set()
                    tracker.end(Ending(**message))
        finally:
            os._exit(1)  # the driver is gone

    Thread(target=listen, daemon=True).start()
    if system_metrics:
        # Make the monitors here: they import MLflow, as the sender does, and one thread should do all imports.
        Thread(target=sample_machine, args=(run, machine_monitors(), tracker.more, ended), daemon=True).start()
    tracker.send_until_done()


if __name__ == "__main__":
    main()
