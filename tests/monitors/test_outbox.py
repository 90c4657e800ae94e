"""The run's folder alone determines which data remains to send."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asyncrl_cli.monitors.mlflow import outbox as module
from asyncrl_cli.monitors.mlflow.outbox import FILE, Outbox
from asyncrl_cli.runs.directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    (directory.path / "evaluations").mkdir(parents=True)
    return directory


def opened(run: RunDirectory, uri: str = "here") -> Outbox:
    return Outbox(run, uri, "experiment")


def steps(outbox: Outbox) -> list[int]:
    return [row["step"] for row in outbox.steps()]


def write(run: RunDirectory, step: int, time: float) -> None:
    run.append("metrics.jsonl", {"step": step, "version": step, "time": time, "loss": 0.5})


def test_an_empty_folder_has_nothing_to_send(run: RunDirectory) -> None:
    assert opened(run).steps() == []


def test_only_steps_after_the_last_sent_step_are_sent(run: RunDirectory) -> None:
    for step in range(1, 6):
        write(run, step, 100.0 + step)
    outbox = opened(run)
    assert steps(outbox) == [1, 2, 3, 4, 5]
    outbox.note(step=3, time=103.0)
    assert steps(outbox) == steps(opened(run)) == [4, 5], "another process reads the same"


def test_steps_that_are_done_again_are_sent_again(run: RunDirectory) -> None:
    for step in range(1, 6):
        write(run, step, 100.0 + step)
    opened(run).note(step=5, time=105.0)
    run.write_rows("metrics.jsonl", run.read("metrics.jsonl")[:3])
    assert steps(opened(run)) == []
    write(run, 4, 200.0)
    assert steps(opened(run)) == [4]


def test_a_clock_that_was_set_back_hides_no_step(run: RunDirectory) -> None:
    write(run, 1, 100.0)
    opened(run).note(step=1, time=100.0)
    write(run, 2, 50.0)
    assert steps(opened(run)) == [2]


@pytest.mark.parametrize("block", [1, 7, 64, 2**16])
def test_the_file_is_read_from_its_end(run: RunDirectory, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    for step in range(1, 8):
        write(run, step, step)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "ti')
    outbox = opened(run)
    assert steps(outbox) == [1, 2, 3, 4, 5, 6, 7], "an incomplete line does not count"
    outbox.note(step=5, time=5.0)
    assert steps(outbox) == [6, 7]


def test_new_and_rewritten_files_are_sent(run: RunDirectory) -> None:
    run.write_text("evaluations/step-1.jsonl", "{}\n")
    path = run.path / "evaluations/step-1.jsonl"
    assert next(opened(run).files("metrics", [path])) == path
    assert list(opened(run).files("metrics", [path])) == [path], "whoever stopped at it has not sent it"
    assert list(opened(run).files("metrics", [path])) == []
    assert list(opened(run).files("artifact", [path])) == [path], "as something else"
    os.utime(path, (1.0, 1.0))
    assert list(opened(run).files("metrics", [path])) == [path]


def test_everything_is_sent_to_another_server(run: RunDirectory) -> None:
    write(run, 1, 100.0)
    opened(run).note(step=1, time=100.0, run_id="abc")
    elsewhere = opened(run, "elsewhere")
    assert (elsewhere.sent.run_id, steps(elsewhere)) == ("", [1])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"unknown": 1}', json.dumps({"uri": "here"})])
def test_a_damaged_note_means_that_nothing_was_sent(run: RunDirectory, text: str) -> None:
    write(run, 1, 100.0)
    (run.path / FILE).write_text(text)
    assert steps(opened(run)) == [1]
