"""The reporter tells everyone: the run's folder and the view."""

from __future__ import annotations

import io
from pathlib import Path
from typing import cast

import pytest

from asyncrl_cli.monitors.console import PlainView
from asyncrl_cli.monitors.mlflow.tracker import TrackerClient
from asyncrl_cli.monitors.records import EvaluationResult
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder

METRICS = dict.fromkeys(
    [
        "reward/mean",
        "response/tokens_mean",
        "staleness/groups_mean",
        "staleness/groups_max",
        "tokens/generated_per_s",
        "share/trainer_busy",
        "share/engines_busy",
        "buffer/groups_running",
        "buffer/groups_finished",
    ],
    0.5,
)


def test_steps_and_evaluations_reach_disk_and_screen(tmp_path: Path) -> None:
    run, out = RunDirectory.create(tmp_path, "test"), io.StringIO()
    run.update(steps=10)
    recorder = Recorder(run, pytest.fail)
    reporter = Reporter(recorder, PlainView(10, out), None)
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
    reporter = Reporter(recorder, PlainView(10, io.StringIO()), None)
    reporter.evaluated(EvaluationResult("greedy", 8, 0.75, 0.75, 9.0, 4, 8, 8))
    assert recorder.close() == ""
    assert RunDirectory(run.path).state.accuracy == {"greedy": 0.75, "sampled": 0.25}
    assert reporter.accuracy_before == RunDirectory(run.path).state.accuracy_before == {"greedy": 0.125}


def test_warnings_reach_the_screen(tmp_path: Path) -> None:
    out = io.StringIO()
    Reporter(Recorder(RunDirectory(tmp_path), pytest.fail), PlainView(10, out), None).warn("engine-0: the process died")
    assert out.getvalue().endswith("! engine-0: the process died\n")


def test_the_tracker_is_told_of_steps_and_evaluations_after_they_are_on_disk(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "test")

    sent: list[tuple[int, dict[str, float]]] = []

    class Tracker:
        def more(self) -> None:
            on_disk = RunDirectory(run.path)
            sent.append((len(on_disk.read("metrics.jsonl")), dict(on_disk.state.accuracy)))

    recorder = Recorder(run, pytest.fail)
    reporter = Reporter(recorder, PlainView(10, io.StringIO()), cast("TrackerClient", Tracker()))
    reporter.stepped(1, 1, METRICS, 1234.5)
    reporter.evaluated(EvaluationResult("greedy", 1, 0.75, 0.75, 9.0, 4, 1, 1))
    assert recorder.close() == ""
    assert sent == [(1, {}), (1, {"greedy": 0.75})]
