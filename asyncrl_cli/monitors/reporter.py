"""The only place that a run reports to: it writes state and metrics to the run's folder, and calls a list of monitors.

Invariant: nothing here delays the run or ends it. A thread writes the files. asyncrl's own monitors return immediately,
because they have threads or processes for slow work; every other monitor is called in its own thread. A monitor that
raises, or that is too slow, is switched off with one warning and a row in ``LOG`` (decision 0020).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import methodcaller

from asyncrl_cli.core.background import Background
from asyncrl_cli.core.secrets import hide
from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.inspect.resolved import resolved_spec, setting
from asyncrl_cli.monitors.base import Ending, EvaluationKind, EvaluationResult, Monitor, RunInfo
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.recorder import Recorder
from asyncrl_cli.system.logs import bound_log

LOG = "logs/monitors.jsonl"
"""File in the run's folder that says why monitors were switched off, with tracebacks."""
CALLS = 1000
"""Largest number of calls that wait for a monitor's thread."""
PATIENCE_S: Mapping[str, float] = {"finished": 30.0, "failed": 10.0, "interrupted": 2.0}
"""Seconds that a run waits at its end for all monitors' threads, by the run's phase."""
GRACE_S = 0.5
"""Seconds for each thread even if earlier threads have used up the time, because it may have finished long ago."""

Call = Callable[[Monitor], object]


class _Member:
    """A monitor in the list, with its own thread if ``in_thread``."""

    def __init__(self, monitor: Monitor, in_thread: bool, switched_off: Callable[[str, str, str], None]) -> None:
        self.monitor = monitor
        self.name = monitor.name or type(monitor).__name__
        self.note = ""
        self._off = self.ended = False
        self._switched_off = switched_off
        self._thread = Background(f"monitor-{self.name}", CALLS) if in_thread else None

    def tell(self, call: Call) -> None:
        """Make a call, or let the thread make it."""
        if self.ended:
            return
        if self._thread is None:
            self._call(call)
        elif not self._off and not self._thread.submit(partial(self._call, call)):
            self._switch_off(f"it does not keep up: {CALLS} calls wait for it")

    def finish(self, ending: Ending) -> None:
        """The monitor's last call."""

        def call(monitor: Monitor) -> None:
            self.note = monitor.finish(ending) or ""

        self.tell(call)
        self.ended = True

    def close(self, patience_s: float) -> None:
        if self._thread is not None and not self._off and not self._thread.close(patience_s):
            self._switch_off("it has not finished in time")

    def _call(self, call: Call) -> None:
        if self._off:
            return
        try:
            call(self.monitor)
        except (Exception, SystemExit) as error:
            self._switch_off(f"{type(error).__name__}: {error}", traceback.format_exc())

    def _switch_off(self, reason: str, trace: str = "") -> None:
        if not self._off:  # a call that was too slow may also fail later
            self._off = True  # before the warning, which goes to all monitors, including this one
            self._switched_off(self.name, reason, trace)


class Reporter:
    """Passes events on to the run's folder and to all monitors."""

    def __init__(self, recorder: Recorder, console: Monitor) -> None:
        self._recorder = recorder
        self._members: list[_Member] = []
        self._run: RunInfo | None = None
        self.accuracy_before: dict[str, float] = dict(recorder.state.accuracy_before)
        self.accuracy: dict[str, float] = dict(recorder.state.accuracy)
        self.notes: dict[str, str] = {}
        """Texts of finished monitors, by name."""
        self.join(console)

    def join(self, monitor: Monitor, in_thread: bool = False) -> None:
        """Notify a monitor from now on, ``in_thread`` unless its calls return immediately."""
        if self._run is None:
            run, spec = self._recorder.run, resolved_spec(self._recorder.run)
            self._run = RunInfo(
                run.run_id, folder=run.path, steps=setting(spec, "stop.steps", self._recorder.state.steps), spec=spec
            )
        member = _Member(monitor, in_thread, self._switched_off)
        self._members.append(member)
        info = self._run
        member.tell(lambda monitor: monitor.started(info))

    def finish(self, ending: Ending, only: Collection[Monitor] | None = None) -> None:
        """Make the last call of all monitors, or of the monitors in ``only``. Monitors with threads together get
        ``PATIENCE_S``; monitors without threads limit their own waits."""
        ended = [one for one in self._members[1:] if not one.ended and (only is None or one.monitor in only)]
        for member in ended:
            member.finish(ending)
        deadline = time.monotonic() + PATIENCE_S[ending.phase]
        for member in ended:
            member.close(max(GRACE_S, deadline - time.monotonic()))
        if only is None:
            self._members[0].finish(ending)  # the console comes last, because it shows the other monitors' problems
        self.notes |= {member.name: member.note for member in ended if member.note}

    def status(self, text: str) -> None:
        self._tell(lambda monitor: monitor.status(text))

    def doing(self, text: str, counts: Counts) -> None:
        self._tell(lambda monitor: monitor.doing(text, counts))

    def warn(self, text: str) -> None:
        self._tell(lambda monitor: monitor.warn(text))

    def faulted(self, kind: str) -> None:
        self._tell(lambda monitor: monitor.faulted(kind))

    def stalled(self, text: str) -> None:
        self.warn(text)
        self._tell(lambda monitor: monitor.stalled(text))

    def stepped(self, step: int, version: int, metrics: Mapping[str, float], at: float) -> None:
        """A step is done, at the unix time ``at``."""
        # Before the monitors are called: MLflow's monitor reads its data from the folder.
        self._recorder.append("metrics.jsonl", {"step": step, "version": version, "time": at, **metrics})
        self._recorder.update(phase="running", step=step, version=version)
        bound_log()  # monitors and data sources print to the driver's log
        self._tell(lambda monitor: monitor.stepped(step, version, metrics))

    def health(self, step: int, changed: Sequence[HealthFinding], open_findings: Sequence[HealthFinding]) -> None:
        """Findings began or ended with a step; ``open_findings`` last."""
        self._recorder.update(findings=tuple(finding.rule for finding in open_findings))
        for finding in changed:
            self.warn(f"step {step}: {finding.text}")
            self._tell(methodcaller("health", finding))

    def engines(self, serving: int, wanted: int, wait: str) -> None:
        """Report how many engines serve and are wanted; ``wait`` says why engines are missing."""
        self._recorder.update(engines={"serving": serving, "wanted": wanted}, engines_wait=wait)
        self._tell(lambda monitor: monitor.engines(serving, wanted))

    def evaluated(self, result: EvaluationResult) -> None:
        if result.step == 0:
            self.accuracy_before[result.kind] = result.accuracy
        self.accuracy[result.kind] = result.accuracy
        self._recorder.update(accuracy=dict(self.accuracy), accuracy_before=dict(self.accuracy_before))
        self._tell(lambda monitor: monitor.evaluated(result))

    def unevaluated(self, kind: EvaluationKind) -> None:
        """Forget a kind's accuracy: its newest evaluation has none, and an older value must not be shown as newest."""
        self.accuracy.pop(kind, None)
        self._recorder.update(accuracy=dict(self.accuracy))

    def _tell(self, call: Call) -> None:
        for member in self._members:
            member.tell(call)

    def _switched_off(self, name: str, reason: str, trace: str) -> None:
        row = {"time": time.time(), "monitor": name, "reason": hide(reason), "traceback": hide(trace)}
        self._recorder.append(LOG, row)
        self.warn(hide(f"the monitor {name} is switched off: {reason}; the run continues (see {LOG})"))
