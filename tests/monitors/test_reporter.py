"""The reporter reports to the run's folder and to the view."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from asyncrl_cli.core.background import Background
from asyncrl_cli.inspect.health import HealthFinding
from asyncrl_cli.monitors.base import Ending, EvaluationResult, Monitor
from asyncrl_cli.monitors.console import PlainView
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.records.groups import Counts
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder

NAMES = [
    *("reward/mean", "response/tokens_mean", "staleness/groups_mean", "staleness/groups_max", "share/trainer_busy"),
    *("tokens/generated_per_s", "share/engines_busy", "buffer/groups_running", "buffer/groups_finished"),
]
METRICS = dict.fromkeys(NAMES, 0.5)

RESULT = EvaluationResult("greedy", 1, 0.75, 0.75, 9.0, 4, 1, 1)

FINDING = HealthFinding("equal_groups", 1, None, "32 of 32 groups", "a constant reward", "change it", True)


def reporting(folder: Path) -> tuple[RunDirectory, io.StringIO, Recorder, Reporter]:
    """A new run, its displayed lines, its recorder and its reporter."""
    run, out = RunDirectory.create(folder, "test"), io.StringIO()
    recorder = Recorder(run, pytest.fail)
    return run, out, recorder, Reporter(recorder, PlainView(10, out))


def test_steps_and_evaluations_reach_disk_and_screen(tmp_path: Path) -> None:
    run, out, recorder, reporter = reporting(tmp_path)
    recorder.update(steps=10)
    reporter.evaluated(EvaluationResult("greedy", 0, 0.25, 0.25, 9.0, 4, 0, 0))
    reporter.stepped(1, 1, METRICS, 1234.5)
    reporter.evaluated(EvaluationResult("greedy", 1, 0.75, 0.75, 9.0, 4, 1, 1))
    assert recorder.close() == ""
    reader = RunDirectory(run.path)
    assert reader.read("metrics.jsonl") == [{"step": 1, "version": 1, "time": 1234.5, **METRICS}]
    state = reader.state
    assert (state.phase, state.step, state.steps, state.version) == ("running", 1, 10, 1)
    assert state.accuracy == reporter.accuracy == {"greedy": 0.75}
    assert reporter.accuracy_before == {"greedy": 0.25}
    assert len(out.getvalue().splitlines()) == 3


def test_a_resumed_run_remembers_its_accuracy(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "test")
    run.update(accuracy={"greedy": 0.5, "sampled": 0.25}, accuracy_before={"greedy": 0.125})
    recorder = Recorder(RunDirectory(run.path), pytest.fail)
    reporter = Reporter(recorder, PlainView(10, io.StringIO()))
    reporter.evaluated(EvaluationResult("greedy", 8, 0.75, 0.75, 9.0, 4, 8, 8))
    reporter.unevaluated("sampled")
    assert recorder.close() == ""
    assert RunDirectory(run.path).state.accuracy == {"greedy": 0.75}, "the newest sampled one has none"
    assert reporter.accuracy_before == RunDirectory(run.path).state.accuracy_before == {"greedy": 0.125}


def test_findings_reach_the_screen_and_the_state_until_they_end(tmp_path: Path) -> None:
    run, out, recorder, reporter = reporting(tmp_path)
    reporter.health(3, [FINDING], [FINDING])
    recorder.wait()
    assert RunDirectory(run.path).state.findings == ("equal_groups",)
    reporter.health(9, [replace(FINDING, last_step=6)], [])
    assert recorder.close() == ""
    assert RunDirectory(run.path).state.findings == ()
    begun, ended = out.getvalue().splitlines()
    assert "! step 3: 32 of 32 groups, since step 1. Usual cause: " in begun
    assert ended.endswith("! step 9: equal_groups has ended: it lasted from step 1 to step 6")


# -- faulty monitors


class RecordingMonitor(Monitor):
    """Records the names of the calls that it receives; raises at the call ``breaks``."""

    def __init__(self, breaks: str = "", wait: Event | None = None) -> None:
        self.name = f"breaks-{breaks}"
        self.calls: list[str] = []
        self._breaks = breaks
        self._wait = wait

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)

        def call(*arguments: Any) -> str:
            self.calls.append(name)
            if self._wait is not None:
                self._wait.wait(120)
            if name == self._breaks:
                raise SystemExit("enough") if name == "finish" else ZeroDivisionError("no reason")
            return "all is well"

        return call


EVENTS = {name for name, member in vars(Monitor).items() if callable(member) and not name.startswith("_")}


def call_everything(reporter: Reporter) -> None:
    reporter.status("starting")
    reporter.status("training", Counts(1, 2, 3, 4, 5, 6))
    reporter.stepped(1, 1, METRICS, 1234.5)
    reporter.evaluated(RESULT)
    reporter.faulted("engine")
    reporter.health(1, [FINDING], [FINDING])
    reporter.engines(1, 2, "no room")
    reporter.warn("the trainer waits")


@pytest.mark.parametrize("breaks", sorted(EVENTS))
def test_a_monitor_that_raises_is_switched_off_with_one_warning(
    breaks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, out, recorder, reporter = reporting(tmp_path)
    broken, intact = RecordingMonitor(breaks), RecordingMonitor()
    for monitor in (broken, intact):
        reporter.join(monitor)
    call_everything(reporter)
    reporter.finish(Ending("finished"))
    assert recorder.close() == ""
    assert broken.calls[-1] == breaks, "and no later call"
    assert set(intact.calls) == EVENTS
    assert intact.calls[0] == "started" and intact.calls[-1] == "finish"
    (warning,) = [line for line in out.getvalue().splitlines() if "switched off" in line]
    assert broken.name in warning and ("enough" if breaks == "finish" else "no reason") in warning
    assert 'raise SystemExit("enough")' in caplog.text, "the traceback"
    assert reporter.notes == {intact.name: "all is well"}


def test_a_monitor_that_hangs_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_cli.monitors.reporter.FINISH_S", {"failed": 0.1})
    monkeypatch.setattr("asyncrl_cli.monitors.reporter.GRACE_S", 0.1)
    monkeypatch.setattr("asyncrl_cli.monitors.reporter.CALLS", 3)
    threads: list[Background] = []

    class Thread(Background):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            threads.append(self)

    monkeypatch.setattr("asyncrl_cli.monitors.reporter.Background", Thread)
    (_, out, _, reporter), wait = reporting(tmp_path), Event()
    reporter.join(RecordingMonitor(wait=wait))
    call_everything(reporter)
    assert out.getvalue().count("it does not keep up: 3 calls wait for it") == 1
    intact = RecordingMonitor("nothing")
    for monitor in (RecordingMonitor("started", wait), intact):
        reporter.join(monitor)
    reporter.finish(Ending("failed"))
    assert out.getvalue().count("it has not finished in time") == 1, "but not for the monitor that has finished"
    assert reporter.notes == {intact.name: "all is well"}
    wait.set()
    assert all(thread.wait(120) for thread in threads[:2])
    assert out.getvalue().count("is switched off") == 2, "one warning each, also for a monitor that fails at the end"


def test_finished_monitors_get_no_further_calls(tmp_path: Path) -> None:
    recorder = Recorder(RunDirectory.create(tmp_path, "test"), pytest.fail)
    console, monitor = RecordingMonitor(), RecordingMonitor("nothing")
    reporter = Reporter(recorder, console)
    reporter.join(monitor)
    reporter.finish(Ending("failed"))
    assert reporter.notes == {monitor.name: "all is well"}
    reporter.status("stopping")
    reporter.finish(Ending("failed"))
    assert monitor.calls == ["started", "finish"]
    assert console.calls == ["started", "status"], "and no warning from a thread that has ended"
    assert recorder.close() == ""


def test_a_broken_console_ends_nothing(tmp_path: Path) -> None:
    recorder = Recorder(RunDirectory.create(tmp_path, "test"), pytest.fail)
    reporter = Reporter(recorder, RecordingMonitor("stepped"))
    call_everything(reporter)
    assert recorder.close() == "" and recorder.state.step == 1
