"""The only place that a run reports to: it writes state and metrics to the run's folder, and calls a list of monitors.

Invariant: nothing here delays the run or ends it. A thread writes the files. The console returns immediately, because
it only queues its output; every other monitor is called in its own thread. A monitor that raises, or that is too slow,
is switched off with one warning; the driver's log has the traceback (decision 0020).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller

from asyncrl_cli.core.background import Background
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.resolved import resolved_spec, setting
from asyncrl_cli.monitors.base import FINISH_S, Ending, EvaluationKind, EvaluationResult, Monitor, RunInfo
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.recorder import Recorder
from asyncrl_cli.system.logs import bound_log

log = logging.getLogger(__name__)

CALLS = 1000
"""Largest number of calls that wait for a monitor's thread."""
GRACE_S = 1.0
"""Seconds in addition to ``FINISH_S``, and for each thread at least, because it may have finished long ago."""

Call = Callable[[Monitor], object]


class _Member:
    """A monitor that is called in its own thread, or without one in the caller's."""

    def __init__(self, monitor: Monitor, thread: Background | None, warn: Callable[[str], None]) -> None:
        self.name = monitor.name or type(monitor).__name__
        self.note = ""
        self._monitor = monitor
        self._thread = thread
        self._is_off = False
        self._warn = warn

    def tell(self, call: Call) -> None:
        """Make a call, or let the thread make it."""
        if self._thread is None:
            self._call(call)
        elif not self._is_off and not self._thread.submit(partial(self._call, call)):
            self._switch_off(f"it does not keep up: {CALLS} calls wait for it")

    def finish(self, ending: Ending) -> None:
        def call(monitor: Monitor) -> None:
            self.note = monitor.finish(ending) or ""

        self.tell(call)

    def close(self, timeout_s: float) -> None:
        if self._thread is not None and not self._is_off and not self._thread.close(timeout_s):
            self._switch_off("it has not finished in time")

    def _call(self, call: Call) -> None:
        if self._is_off:
            return
        try:
            call(self._monitor)
        except (Exception, SystemExit) as error:
            log.warning("the monitor %s failed", self.name, exc_info=True)
            self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, reason: str) -> None:
        if not self._is_off:  # a call that was too slow may also fail later
            self._is_off = True  # before the warning, which goes to all monitors, including this one
            text = f"the monitor {self.name} is switched off: {reason}; the run continues (see logs/driver.log)"
            self._warn(hide(text))


class Reporter:
    """Passes events on to the run's folder and to all monitors."""

    def __init__(self, recorder: Recorder, console: Monitor) -> None:
        self._recorder = recorder
        run, spec = recorder.run, resolved_spec(recorder.run)
        steps = setting(spec, "stop.steps", recorder.state.steps)
        self._run = RunInfo(run.run_id, folder=run.path, steps=steps, spec=spec)
        self._console = _Member(console, None, self.warn)
        self._members: list[_Member] = []
        self._console.tell(lambda monitor: monitor.started(self._run))
        self.accuracy_before: dict[str, float] = dict(recorder.state.accuracy_before)
        self.accuracy: dict[str, float] = dict(recorder.state.accuracy)
        self.notes: dict[str, str] = {}
        """Texts of finished monitors, by name."""

    def join(self, monitor: Monitor) -> None:
        """Notify a monitor from now on, in its own thread."""
        name = f"monitor-{monitor.name or type(monitor).__name__}"
        member = _Member(monitor, Background(name, CALLS), self.warn)
        self._members.append(member)
        member.tell(lambda monitor: monitor.started(self._run))

    def finish(self, ending: Ending) -> None:
        """Make the last call of all monitors but the console, and wait for them, ``FINISH_S`` together."""
        members, self._members = self._members, []
        for member in members:
            member.finish(ending)
        deadline = time.monotonic() + FINISH_S[ending.phase] + GRACE_S
        for member in members:
            member.close(max(GRACE_S, deadline - time.monotonic()))
        self.notes |= {member.name: member.note for member in members if member.note}

    def status(self, text: str, counts: Counts | None = None) -> None:
        self._tell(lambda monitor: monitor.status(text, counts))

    def warn(self, text: str) -> None:
        self._tell(lambda monitor: monitor.warn(text))

    def faulted(self, fault_kind: str) -> None:
        self._tell(lambda monitor: monitor.faulted(fault_kind))

    def stepped(self, step: int, version: int, metrics: Mapping[str, float], unix_time: float) -> None:
        """A step is done, at ``unix_time``."""
        self._recorder.append("metrics.jsonl", {"step": step, "version": version, "time": unix_time, **metrics})
        self._recorder.update(phase="running", step=step, version=version)
        bound_log()  # monitors and data sources print to the driver's log
        self._tell(lambda monitor: monitor.stepped(step, version, metrics))

    def health(self, step: int, changed: Sequence[HealthFinding], open_findings: Sequence[HealthFinding]) -> None:
        """Findings began or ended with a step; ``open_findings`` last."""
        self._recorder.update(findings=tuple(finding.rule for finding in open_findings))
        for finding in changed:
            self.warn(f"step {step}: {finding.text}")
            self._tell(methodcaller("health", finding))

    def engines(self, serving: int, wanted_engines: int, wait: str) -> None:
        """Report how many engines serve and are wanted; ``wait`` says why engines are missing."""
        self._recorder.update(engines={"serving": serving, "wanted": wanted_engines}, engines_wait=wait)
        self._tell(lambda monitor: monitor.engines(serving, wanted_engines))

    def evaluated(self, result: EvaluationResult) -> None:
        if result.step == 0:
            self.accuracy_before[result.kind] = result.accuracy
        self.accuracy[result.kind] = result.accuracy
        self._recorder.update(accuracy=dict(self.accuracy), accuracy_before=dict(self.accuracy_before))
        self._tell(lambda monitor: monitor.evaluated(result))

    def unevaluated(self, evaluation_kind: EvaluationKind) -> None:
        """Forget a kind's accuracy: its newest evaluation has none, and an older value must not be shown as newest."""
        self.accuracy.pop(evaluation_kind, None)
        self._recorder.update(accuracy=dict(self.accuracy))

    def _tell(self, call: Call) -> None:
        for member in (self._console, *self._members):
            member.tell(call)
