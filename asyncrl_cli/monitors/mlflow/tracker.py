"""The monitor for MLflow, with its own actor: imports, database and a slow server cost the run nothing.

    working --failed--> waiting (1 s, 2 s, ... 30 s, or the run's end) --> working
    working --all sent--> idle --more--> working
    working --all sent, and the run has ended--> done

Invariant: the driver never waits for MLflow before the run's end. What there is to send is on disk (``outbox``), so
this process may be killed at any time; Ray starts another.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.core.terminal import counted
from asyncrl_cli.monitors.base import Ending, EvaluationResult, Monitor, RunInfo
from asyncrl_cli.monitors.mlflow.outbox import Outbox
from asyncrl_cli.monitors.mlflow.sender import FINISHED, STATUS, Sender, Target, failure, target_of
from asyncrl_cli.monitors.mlflow.system_metrics import MachineSampler
from asyncrl_cli.runs.directory import Phase, RunDirectory
from asyncrl_cli.runs.recorder import Recorder
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.logs import redirect_output
from asyncrl_cli.system.remote import on_node

RUNNING = "RUNNING"
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Seconds between two attempts: the first value, and the largest."""
REPORTED: Mapping[str, Phase] = {"FINISHED": "finished", "FAILED": "failed"}
"""Ends after which a report is sent, and the phase that it shows. A run that was interrupted has no time for one, and
is usually resumed."""
RESTARTS = 10
TRACKING_S = {"FINISHED": 30.0, "FAILED": 10.0, "KILLED": 2.0}
"""Seconds that a run waits for MLflow at its end, by its status."""
ANSWER_S = 1.0
"""Seconds for a call to the actor and its answer, in addition to the actor's own waiting time."""


class Tracker:
    """Sends in its own thread, repeatedly, until the run has ended and everything is sent."""

    def __init__(self, run: RunDirectory, target: Target, system_metrics: bool = False) -> None:
        self._sender = Sender(run, target)
        self._ended: RunDirectory | None = None
        self._run = run
        self._uri = target.uri
        self._changed = threading.Condition()
        self._more = False
        self._status = RUNNING
        self._problem = ""
        self._done = False
        self._machine = MachineSampler(run, self.more) if system_metrics else None
        threading.Thread(target=self._send_forever, name="mlflow", daemon=True).start()

    def more(self) -> None:
        """Notify it that there is new data in the run's folder."""
        with self._changed:
            self._more = True
            self._changed.notify_all()

    def finish(self, status: str, patience_s: float, reason: str = "") -> str:
        """The run has ended: FINISHED, FAILED (for this ``reason``) or KILLED. Returns an empty text once everything is
        sent, or after ``patience_s`` the problem that prevents it."""
        if self._machine is not None:
            self._machine.stop()
        with self._changed:
            if status in REPORTED:
                self._ended = self._run.as_if(phase=REPORTED[status], reason=reason)
            self._status = status
            self._changed.notify_all()
            if self._changed.wait_for(lambda: self._done, patience_s):
                return ""
            return self._problem or f"not done within {patience_s:.0f} s"

    def _send_forever(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._done:
            with self._changed:
                status, ended, self._more = self._status, self._ended, False
            try:
                self._sender.send(status, ended)
                problem = ""
                if self._sender.unreported:
                    print(f"no report could be made: {self._sender.unreported}", flush=True)
            except Exception as error:
                problem = failure(error, self._uri)
            if problem != self._problem:
                print(problem or "everything is sent again", flush=True)
            with self._changed:
                self._problem = problem
                if problem:
                    self._changed.wait_for(lambda: self._status != status, wait_s)  # noqa: B023
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S) if self._status == status else FIRST_WAIT_S
                else:
                    self._done = status != RUNNING
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._more or self._done or self._status != status)  # noqa: B023
                    wait_s = FIRST_WAIT_S


class TrackerActor(Tracker):
    """The Ray actor."""

    def __init__(self, run_path: str, target: Target, system_metrics: bool) -> None:
        redirect_output(str(Path(run_path) / "logs"), "mlflow")
        super().__init__(RunDirectory(Path(run_path)), target, system_metrics)


class Mlflow(Monitor):
    """The driver's side: waits for MLflow only at the run's end, and never fails because of it."""

    name = "MLflow"

    def __init__(self, recorder: Recorder, spec: ExperimentSpec) -> None:
        self._recorder = recorder
        self._target = target_of(spec)
        self._system_metrics = spec.tracking.system_metrics
        self._actor: Any = None

    def started(self, run: RunInfo) -> None:
        import ray

        # On the driver's node, which has the run's folder.
        options = ray.remote(TrackerActor).options(
            num_cpus=0, max_restarts=RESTARTS, max_task_retries=-1, scheduling_strategy=on_node()
        )
        self._actor = options.remote(str(run.folder), self._target, self._system_metrics)

    def stepped(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._recorder.then(self._more)  # once it is on disk: that is what is sent

    def evaluated(self, result: EvaluationResult) -> None:
        self._recorder.then(self._more)

    def finish(self, ending: Ending) -> str:
        status = STATUS[ending.phase]
        problem = self._ended(status, TRACKING_S[status], ending.reason)
        run, target = self._recorder.run, self._target
        outbox = Outbox(run, target.uri, target.experiment)
        if not problem:
            model = f", {target.model} version {outbox.version}" if target.model and status == FINISHED else ""
            return f"run {outbox.sent.run_id} in experiment {target.experiment}{model}"
        steps = len(outbox.steps())
        kept = counted(steps, "step") if steps else "the rest"
        return f"{kept} kept, not sent ({problem}); later: asyncrl track {run.argument}"

    def _more(self) -> None:
        self._actor.more.remote()

    def _ended(self, status: str, timeout_s: float, reason: str) -> str:
        """Wait until everything is sent. Returns the problem that prevents it; empty if there is none."""
        import ray
        from ray.exceptions import GetTimeoutError

        try:
            problem: str = ray.get(self._actor.finish.remote(status, timeout_s, reason), timeout=timeout_s + ANSWER_S)
        except GetTimeoutError:
            return f"not done within {timeout_s:.0f} s"
        except Exception as error:
            return f"the process that sends is gone: {type(error).__name__}"
        return problem
