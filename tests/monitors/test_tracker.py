"""A run's numbers arrive in a real MLflow once it is available."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.monitors.base import Ending, RunInfo
from asyncrl_cli.monitors.mlflow import tracker
from asyncrl_cli.monitors.mlflow.outbox import FILE, SAMPLES
from asyncrl_cli.monitors.mlflow.sender import PARAMETER_LENGTH, Sender, Target
from asyncrl_cli.monitors.mlflow.tracker import TRACKING_S, Mlflow, Tracker
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder
from asyncrl_cli.workers.scoring import METRIC_NAME
from tests.inspect.made_runs import SITUATIONS, made_run

from .mlflow_runs import Logged, do_steps, empty_store, evaluate, local, sent, spec_of, started_run, tracking_at
from .mlflow_server import Server, Way

LIMIT_S = 120.0
pytestmark = pytest.mark.stack


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return started_run(tmp_path)


def losses(last: int) -> list[tuple[int, float]]:
    return [(step, step / 8) for step in range(1, last + 1)]


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


# -- one attempt


@given(st.from_regex(METRIC_NAME, fullmatch=True))
def test_mlflow_accepts_every_metric_name_that_a_reward_may_return(name: str) -> None:
    from mlflow.utils.validation import _validate_length_limit, _validate_metric_name

    longest = f"eval/offline-{'s' * 32}/sampled_{'t' * 64}/{name}"
    _validate_length_limit("key", 250, longest)
    for metric in (longest, f"task/{name}"):
        _validate_metric_name(metric)


def test_repeated_attempts_send_everything_once(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    do_steps(run, 1, 3)
    evaluate(run, 0, 0.25)
    run.update(step=3)
    Sender(run, target).send("RUNNING")
    noted = sent(run)
    do_steps(run, 4, 5)
    evaluate(run, 5, 0.75)
    assert Logged(target.uri).run.data.tags["health"] == "ok"
    run.update(findings=("equal_groups", "entropy"))
    again = Sender(run, target)
    again.send("RUNNING")
    assert (again.steps, again.evaluations) == (2, 1)

    # As if killed before recording the sent data and the MLflow run.
    (run.path / FILE).unlink()
    Sender(run, target).send("FINISHED")
    logged = Logged(target.uri)
    assert logged.run.info.run_id == noted["run_id"] == sent(run)["run_id"]
    assert logged.run.info.status == "FINISHED"
    assert logged.run.info.run_name == "spelling-1"
    assert logged.run.data.tags["health"] == "equal_groups, entropy"
    assert logged.run.info.start_time == 1767225600000
    assert logged.run.info.end_time == int(run.state.updated * 1000)
    assert logged.run.data.params["seed"] == "3"
    assert logged.run.data.params["task.options.a_b_"] == "[1, 2]"
    assert len(logged.run.data.params["long"]) == PARAMETER_LENGTH
    assert logged.history("loss") == losses(5)
    assert len(logged.history("ratio")) == 5
    assert logged.history("eval/greedy_accuracy") == [(0, 0.25), (5, 0.75)]
    assert {
        "spec.yaml",
        "evaluations/step-000000-greedy.jsonl",
        "evaluations/step-000005-greedy.jsonl",
    } <= logged.files()
    idle = Sender(run, target)
    idle.send("FINISHED")
    assert (idle.steps, idle.evaluations) == (0, 0)


def test_a_resumed_run_continues_the_same_mlflow_run(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    do_steps(run, 1, 3)
    Sender(run, target).send("KILLED")
    run.write_rows("metrics.jsonl", run.read("metrics.jsonl")[:2])
    run.write_text("spec.yaml", "seed: 4\nadded: 1\n")
    do_steps(run, 3, 4, at=2_000_000.0)
    Sender(run, target).send("RUNNING")
    logged = Logged(target.uri)
    assert logged.run.info.status == "RUNNING"
    assert {step for step, _ in logged.history("loss")} == {1, 2, 3, 4}
    assert (logged.run.data.params["seed"], logged.run.data.params["added"]) == ("3", "1")


def test_a_store_that_was_removed_is_filled_again(run: RunDirectory, tmp_path: Path) -> None:
    do_steps(run, 1, 2)
    Sender(run, local(tmp_path)).send("RUNNING")
    noted = sent(run)
    elsewhere = tmp_path / "new"
    elsewhere.mkdir()
    run.write_json(FILE, noted | {"uri": local(elsewhere).uri})
    Sender(run, local(elsewhere)).send("RUNNING")
    assert Logged(local(elsewhere).uri).history("loss") == losses(2)


def test_numbers_arrive_although_the_artifact_store_fails(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("a file where a folder should be")
    do_steps(run, 1, 2)
    evaluate(run, 0, 0.5)
    with pytest.raises(OSError):  # noqa: PT011
        Sender(run, local(tmp_path)).send("FINISHED")
    logged = Logged(local(tmp_path).uri)
    assert logged.history("loss") == losses(2)
    assert logged.history("eval/greedy_accuracy") == [(0, 0.5)]
    assert logged.run.info.status == "FINISHED"


# -- a server that is down


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "server.db").write_bytes(empty_store())
    server = Server(folder)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """A server that is down at first, and a tracker that soon tries again."""
    monkeypatch.setattr(tracker, "FIRST_WAIT_S", 0.1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    way = Way(running)
    yield way
    way.close()


def sending(run: RunDirectory, target: Target) -> tuple[Tracker, Thread]:
    """A tracker as in the child process, in a thread."""
    child = Tracker(run, target)
    thread = Thread(target=child.send_until_done, daemon=True)
    thread.start()
    return child, thread


def send_to_the_end(run: RunDirectory, target: Target, ending: Ending) -> None:
    child = Tracker(run, target)
    child.end(ending)
    child.send_until_done()


def until_failed(run: RunDirectory, server: Way) -> None:
    until(lambda: sent(run).get("problem") == f"no answer from {server.uri}", "an attempt to fail")


def test_what_a_server_missed_arrives_once_it_is_up(run: RunDirectory, server: Way) -> None:
    child, thread = sending(run, Target(server.uri, "tests"))
    do_steps(run, 1, 3)
    child.more()
    until_failed(run, server)
    server.start()
    until(lambda: sent(run)["step"] == 3 and not sent(run)["problem"], "the steps to be sent")
    server.stop()
    do_steps(run, 4, 6)
    evaluate(run, 6, 0.5)
    child.more()
    until_failed(run, server)
    child.end(Ending("finished"))
    server.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    logged = Logged(server.uri)
    assert logged.history("loss") == losses(6)
    assert logged.run.info.status == "FINISHED"
    assert {"spec.yaml", "evaluations/step-000006-greedy.jsonl"} <= logged.files()


# -- the end of a run


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with all kinds of files: a journal, an evaluation and a model."""
    run = made_run(tmp_path / "runs", monkeypatch, SITUATIONS["slow trainer"])
    for name in ("evaluations", "model"):
        (run.path / name).mkdir()
    run.write_text("spec.yaml", "seed: 3\n")
    run.write_text("model/config.json", '{"architectures": ["Qwen3ForCausalLM"]}')
    (run.path / "model/model.safetensors").write_bytes(b"weights")
    do_steps(run, 1, 3)
    evaluate(run, 3, 0.5, [{"uid": "a", "response": "yes"}])
    run.append(SAMPLES, {"step": 3, "time": 1e6, "system/cpu_utilization_percentage": 50.0})
    run.update(phase="running", step=3)
    return run


ALL_KINDS = {
    "spec.yaml",
    "evaluations/step-000003-greedy.jsonl",
    "evaluations/step-000003-greedy.json",
    "report.html",
    "models/step-000003/MLmodel",
    "models/step-000003/model/model.safetensors",
}


@pytest.mark.rotating
def test_a_server_that_is_down_at_the_end_gets_everything_later(whole: RunDirectory, server: Way) -> None:
    target = Target(server.uri, "whole", model="speller")
    child, thread = sending(whole, target)
    until_failed(whole, server)
    child.end(Ending("finished"))
    server.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()

    (whole.path / FILE).unlink()  # as if killed before recording the sent data
    Sender(whole, target).send("FINISHED", whole.as_if(phase="finished"))
    logged = Logged(server.uri, "whole")
    assert logged.run.info.status == "FINISHED"
    assert logged.files() >= ALL_KINDS
    assert logged.history("loss") == losses(3)
    assert logged.history("system/cpu_utilization_percentage") == [(3, 50.0)]
    assert b"</html>" in logged.content("report.html")[-20:]
    assert logged.content("models/step-000003/model/model.safetensors") == b"weights"
    [version] = logged.client.search_model_versions("name = 'speller'")
    assert (version.run_id, version.tags["asyncrl_step"]) == (logged.run.info.run_id, "3")
    with tracking_at(server.uri):
        table = logged.client.load_table(logged.run.info.experiment_id, "evaluations/step-000003-greedy.json")
    assert table["response"].tolist() == ["yes"]


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (Ending("finished"), "Nothing: no part had a fault."),
        (Ending("failed", reason="no disk"), "The run failed: no disk."),
    ],
)
def test_the_report_says_how_the_run_ended(whole: RunDirectory, tmp_path: Path, ending: Ending, text: str) -> None:
    send_to_the_end(whole, local(tmp_path), ending)
    assert text in Logged(local(tmp_path).uri).content("report.html").decode()


def test_an_interrupted_run_sends_no_report_because_it_has_no_time(whole: RunDirectory, tmp_path: Path) -> None:
    send_to_the_end(whole, local(tmp_path, "speller"), Ending("interrupted"))
    files = Logged(local(tmp_path).uri).files()
    assert "evaluations/step-000003-greedy.json" in files
    assert not files & {"report.html", "models/step-000003/MLmodel"}


# -- the child process


def monitor_of(run: RunDirectory, tmp_path: Path, **tracking: Any) -> tuple[Mlflow, Recorder]:
    recorder = Recorder(run, pytest.fail)
    monitor = Mlflow(recorder, spec_of({"experiment": "tests", **tracking}, runs_dir=str(tmp_path)))
    monitor.started(RunInfo(run.run_id, run.path, 4, {}))
    return monitor, recorder


def test_a_killed_child_starts_again_and_sends_the_rest(run: RunDirectory, tmp_path: Path) -> None:
    target = local(tmp_path)
    monitor, recorder = monitor_of(run, tmp_path)
    do_steps(run, 1, 2)
    monitor.stepped(2, 2, {})
    until(lambda: sent(run)["step"] == 2, "the first steps")
    monitor._child.kill()
    monitor._child.wait()
    do_steps(run, 3, 4)
    monitor.stepped(4, 4, {})
    recorder.wait()
    assert monitor.finish(Ending("finished")).startswith("run ")
    logged = Logged(target.uri)
    assert logged.history("loss") == losses(4)
    assert logged.run.info.status == "FINISHED"


def test_a_child_that_dies_at_the_end_leaves_the_rest_to_track(run: RunDirectory, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monitor, _ = monitor_of(run, tmp_path, uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        do_steps(run, 1, 2)
        connection, _ = silent.accept()  # it has connected
        with connection:
            Thread(target=monitor._child.send_signal, args=[signal.SIGKILL]).start()
            note = monitor.finish(Ending("finished"))
    assert note.startswith("2 steps kept, not sent (the sending process ended with exit code -9); later: ")


def test_a_server_that_never_answers_delays_the_end_by_its_limit_at_most(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKING_S, "finished", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monitor, _ = monitor_of(run, tmp_path, uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()
        with connection:
            note = monitor.finish(Ending("finished"))
    assert note.startswith("the rest kept, not sent (not done within 0 s); later: ")
    assert monitor._child.poll() == -signal.SIGKILL


def test_the_child_ends_when_its_driver_is_gone(run: RunDirectory, tmp_path: Path) -> None:
    monitor, _ = monitor_of(run, tmp_path)
    monitor._input.close()
    assert monitor._child.wait(LIMIT_S) == 1
