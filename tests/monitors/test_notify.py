"""Notices: their contents and targets, and that a failed delivery has no effect on the run."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl_cli.monitors import notify
from asyncrl_cli.monitors.base import Ending
from asyncrl_cli.monitors.console import PlainView
from asyncrl_cli.monitors.notify import LOG, Notifier
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder
from asyncrl_cli.spec.sections import NotifySpec
from asyncrl_cli.system.reaper import MARK


class Hook:
    """A webhook that stores what it receives, and answers with ``status``."""

    def __init__(self) -> None:
        self.got: Queue[tuple[str | None, Any]] = Queue()
        self.status = 204
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.got.put((self.headers["Content-Type"], json.loads(body)))
                self.send_response(hook.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/services/secret"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hook = Hook()
    yield hook
    hook.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "test")
    run.update(step=7, steps=10)
    return run


def warned(spec: NotifySpec, run: RunDirectory, event: Any = "failure", message: str = "engine-0: gone") -> list[str]:
    """Send a notice. Returns the warnings."""
    warnings: list[str] = []
    notifier = Notifier(spec, run, warnings.append)
    notifier.tell(event, message)
    notifier.wait()
    return warnings


def test_a_webhook_gets_json(run: RunDirectory, hook: Hook) -> None:
    assert warned(NotifySpec(webhook=hook.address), run) == []
    kind, notice = hook.got.get_nowait()
    assert kind == "application/json" and notice.pop("host")
    assert notice == {
        "event": "failure",
        "run": run.run_id,
        "message": "engine-0: gone",
        "text": f"{run.run_id}, failure: engine-0: gone",
        "step": 7,
        "steps": 10,
        "folder": str(run.path),
    }


def test_a_webhooks_address_may_stay_in_the_environment(
    run: RunDirectory, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = NotifySpec(webhook="env:MY_HOOK")
    assert warned(spec, run) == ["notify: the environment variable MY_HOOK has no http address"]
    monkeypatch.setenv("MY_HOOK", hook.address)
    assert warned(spec, run) == [] and hook.got.qsize() == 1
    monkeypatch.setenv("MY_HOOK", "file:///etc/passwd")
    assert "no http address" in warned(spec, run)[0]


def test_a_webhook_that_never_finishes_its_answer_does_not_delay_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(notify, "WAIT_S", 0.2)
    monkeypatch.setattr(notify, "AT_ONCE", 2)
    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as slow:  # accepts connections, and sends no answer
        spec = NotifySpec(webhook=f"http://127.0.0.1:{slow.getsockname()[1]}")
        notifier = Notifier(spec, run, warnings.append)
        for _ in range(3):
            notifier.tell("stall", "engine-0: gone")
        notifier.wait()
        assert warnings == [
            "notify: not sent, 2 others are still being delivered",
            "notify: 2 not delivered within 0 s",
        ]


def test_only_requested_events_are_sent(run: RunDirectory, hook: Hook) -> None:
    spec = NotifySpec(webhook=hook.address, on=["finish"])
    for event in ("finish", "failure", "stall"):
        warned(spec, run, event)
    assert [hook.got.get_nowait()[1]["event"] for _ in range(hook.got.qsize())] == ["finish"]


def test_a_failed_webhook_gives_a_warning_without_its_address(run: RunDirectory, hook: Hook) -> None:
    hook.status = 500
    (warning,) = warned(NotifySpec(webhook=hook.address), run)
    assert "did not accept the notice" in warning and "500" in warning and "secret" not in warning
    hook.close()
    (warning,) = warned(NotifySpec(webhook=hook.address), run)
    assert "did not accept the notice" in warning and "secret" not in warning


def test_a_command_gets_the_notice_and_is_not_part_of_the_run(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, "mark")
    command = f'cat > "$ASYNCRL_FOLDER/stdin"; env > {tmp_path}/env; echo printed'
    assert warned(NotifySpec(command=command), run, message='a "quoted" $(word)') == []
    assert json.loads((run.path / "stdin").read_text())["message"] == 'a "quoted" $(word)'
    lines = (tmp_path / "env").read_text().splitlines()
    assert {"ASYNCRL_EVENT=failure", f"ASYNCRL_RUN_ID={run.run_id}", 'ASYNCRL_MESSAGE=a "quoted" $(word)'} <= {*lines}
    assert not [line for line in lines if line.startswith(f"{MARK}=")]
    assert (run.path / LOG).read_text() == "printed\n"


def test_a_failed_command_gives_a_warning(run: RunDirectory) -> None:
    assert warned(NotifySpec(command="exit 3"), run) == [f"notify: the command ended with 3; its output is in {LOG}"]


def test_a_hanging_command_is_killed_with_its_child_processes(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "COMMAND_S", 0.5)
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    command = f"(echo up; exec sleep 60) > {tmp_path}/alive & wait"
    assert "and was ended" in warned(NotifySpec(command=command), run)[0]
    os.set_blocking(alive, True)
    assert os.read(alive, 10) == b"up\n"
    before = time.monotonic()
    assert os.read(alive, 10) == b"", "end of file: no process has it open for writing"
    os.close(alive)
    assert time.monotonic() - before < 30, "it was killed before the end of the sleep"


def test_webhook_and_command_do_not_wait_for_each_other(run: RunDirectory, hook: Hook, tmp_path: Path) -> None:
    spec = NotifySpec(webhook=hook.address, command=f"touch {tmp_path}/notified; exit 1")
    assert len(warned(spec, run)) == 1 and hook.got.qsize() == 1 and (tmp_path / "notified").exists()


def test_a_stall_is_shown_and_sent(run: RunDirectory, hook: Hook) -> None:
    out = io.StringIO()
    reporter = Reporter(Recorder(run, pytest.fail), PlainView(10, out))
    reporter.join(Notifier(NotifySpec(webhook=hook.address, on=["stall"]), run, pytest.fail))
    reporter.stalled("the trainer waits for a batch")
    reporter.finish(Ending("finished"))
    assert "! the trainer waits for a batch" in out.getvalue()
    assert hook.got.get_nowait()[1]["event"] == "stall"


@pytest.mark.parametrize("webhook", ["ftp://x", "env:", "env:A B", "hooks.example.com", "http://a b"])
def test_an_invalid_webhook_is_refused(webhook: str) -> None:
    with pytest.raises(ValidationError):
        NotifySpec(webhook=webhook)
