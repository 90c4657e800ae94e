"""Runs that cannot continue name the cause, and leave no process or file."""

from __future__ import annotations

import json
import signal

import psutil
import pytest

from tests.small_models import UNTRAINED

from .conftest import Runs, mark_of, processes_of, until

pytestmark = [pytest.mark.stack, pytest.mark.rotating]


def test_ctrl_c_ends_an_evaluation(runs: Runs) -> None:
    spec = runs.write_spec(model=UNTRAINED)
    process = runs.start("evaluate", spec, "--samples", "500", "--json")
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any(line.startswith("generating") for line in lines), "it ended before"
    mark = mark_of(process.pid)
    assert mark and processes_of(mark)
    process.send_signal(signal.SIGINT)
    ended = runs.wait(process)
    assert (ended.code, ended.out, ended.err) == (130, "", "stopped\n")
    assert not processes_of(mark)


def test_the_end_of_rays_own_process_is_named_with_the_command_that_continues(runs: Runs) -> None:
    process = runs.start("train", runs.write_spec(model=UNTRAINED, stop={"steps": 300}))
    until(lambda: runs.steps_done() >= 1 or process.poll() is not None, "a step")
    mark = mark_of(process.pid)
    (own,) = [child for child in psutil.Process(process.pid).children() if child.name() == "gcs_server"]
    own.kill()
    ended = runs.wait(process)
    run = runs.newest()
    assert ended.code == 1, ended.out + ended.err
    assert (
        f"error: Ray's process gcs_server was ended by SIGKILL\n --> cluster\nhint: asyncrl resume {run}\n" in ended.err
    )
    assert "Traceback" not in ended.out + ended.err
    state = json.loads((run / "state.json").read_text())
    assert (state["phase"], "Ray's process" in state["reason"]) == ("failed", True)
    assert not processes_of(mark)


def test_an_engine_that_cannot_start_is_named_with_its_cause_and_not_started_again(runs: Runs) -> None:
    spec = runs.write_spec(model=UNTRAINED, rollout={"engine_args": {"block_size": 7}})
    ended = runs.run("train", spec)
    assert ended.code == 1, "processes were started"
    assert "vLLM does not start: " in ended.err
    assert "logs/engine-0.log" in ended.err
    assert "restart" not in ended.err
    assert "Traceback" not in ended.out + ended.err
