"""If output or files of a run cannot be written, the run continues and reports the missing part."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from asyncrl_cli.core import secrets
from asyncrl_cli.core.background import Background
from asyncrl_cli.monitors.console import PlainView
from asyncrl_cli.monitors.outlet import LINES, Outlet
from asyncrl_cli.monitors.reporter import Reporter
from asyncrl_cli.orchestrator.interrupts import SIGNALS
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.runs.recorder import Recorder
from tests.monitors.test_reporter import METRICS

pytestmark = pytest.mark.slow

LINE = "a line of a log\n"


def gone_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def gone_terminal() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


@pytest.fixture(params=[gone_reader, gone_terminal, lambda: os.open("/dev/full", os.O_WRONLY)])
def unwritable(request: pytest.FixtureRequest) -> Iterator[int]:
    """A descriptor that fails: the reader exited, the terminal was closed, or the disk is full."""
    descriptor = request.param()
    yield descriptor
    os.close(descriptor)


def test_failed_output_is_counted_and_raises_nothing(unwritable: int, tmp_path: Path) -> None:
    run, out = RunDirectory.create(tmp_path, "test"), Outlet(unwritable)
    recorder = Recorder(run, pytest.fail)
    reporter = Reporter(recorder, PlainView(10, out))
    for step in range(1, 4):
        reporter.stepped(step, step, METRICS, 0.0)
    reporter.warn("engine-0: the process died")
    out.close()
    assert out.lost_lines == 4
    assert recorder.close() == "" and RunDirectory(run.path).state.step == 3


def test_secrets_and_control_characters_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    out = Outlet(writer)
    monkeypatch.setattr(secrets, "_values", {})
    secrets.remember("WANDB_API_KEY", "0123456789abcdef")
    out.write("mlflow      experiment 0123456789abcdef \x1b[2J\n")
    assert out.close()
    assert os.read(reader, 1000).decode() == "mlflow      experiment ${env:WANDB_API_KEY} \\x1b[2J\n"
    os.close(reader)
    os.close(writer)


def test_a_stalled_reader_delays_nothing_and_learns_at_the_end_how_many_lines_are_missing() -> None:
    reader, writer = os.pipe()
    out = Outlet(writer)
    written = 3 * LINES
    for _ in range(written):
        out.write(LINE)
    assert out.lost_lines >= written - LINES - 2**17 // len(LINE)
    text = b""

    def read() -> None:
        nonlocal text
        while piece := os.read(reader, 2**16):
            text += piece

    thread = Thread(target=read)
    thread.start()
    assert out.close(60)
    os.close(writer)
    thread.join(60)
    os.close(reader)
    lines = text.decode().splitlines(keepends=True)
    assert lines[-1] == f"! {out.lost_lines} lines of output are missing: they were not read in time\n"
    assert lines[:-1] == [LINE] * (written - out.lost_lines)


STALLED = """
import os, sys
from pathlib import Path
from asyncrl_cli.monitors import outlet
outlet.Outlet.close.__defaults__ = (0.2,)
with outlet.run_terminal(Path(sys.argv[1])) as screen:
    for _ in range(1000):
        screen.out.write(1000 * "x" + "\\n")
    os.write(2, b"what a library prints\\n")
print("after the run")
"""


def test_a_reader_that_never_reads_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STALLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.wait(60) == 0
    assert (tmp_path / "driver.log").read_text() == "what a library prints\nafter the run\n"


ENDED = """
import os, sys
from pathlib import Path
from asyncrl_cli.monitors import outlet
with outlet.run_terminal(Path(sys.argv[1])) as screen:
    if len(sys.argv) > 2:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        sys.stdout = open(1, "w", closefd=False)  # buffered, whatever PYTHONUNBUFFERED says
        sys.stdout.write("what a library prints")
    screen.out.write("step 1\\n")
    raise SystemExit("out of memory")
"""


@pytest.mark.parametrize("fault", ["gone reader", "full disk"])
def test_output_that_cannot_be_written_does_not_hide_how_the_run_ended(tmp_path: Path, fault: str) -> None:
    words, writer = (["full"], subprocess.PIPE) if fault == "full disk" else ([], gone_reader())
    program = [sys.executable, "-c", ENDED, str(tmp_path), *words]
    process = subprocess.run(program, check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    if fault == "gone reader":
        os.close(writer)
    assert (process.returncode, process.stderr) == (1, "out of memory\n")
    assert fault == "gone reader" or process.stdout.startswith("step 1\n")


def test_on_a_stopped_terminal_lines_are_counted_and_frames_are_not() -> None:
    reader, writer = os.pipe()
    out = Outlet(writer)
    for _ in range(3 * LINES):
        out.draw("picture" * 100)
    out.write("the last line\n")
    assert out.lost_lines == 0
    for _ in range(2 * LINES):
        out.draw(f"picture and {LINE}", line_count=1)
    assert out.lost_lines > LINES // 2
    os.close(reader)
    out.close(1.0)
    os.close(writer)


def test_an_error_in_a_job_does_not_end_the_thread_and_no_job_is_taken_after_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[int] = []
    background = Background("test")
    background.submit(lambda: done.append(1 // 0))
    background.submit(lambda: done.append(1))
    assert background.close(60) and done == [1] and "ZeroDivisionError" in caplog.text
    assert not background.submit(lambda: done.append(2))


def in_the_way(run: RunDirectory) -> Path:
    """A folder with the state file's name."""
    path = run.path / "state.json"
    path.unlink(missing_ok=True)
    path.mkdir()
    return path


def test_a_replaced_file_is_complete_again_after_a_success(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "test")
    hindrance = in_the_way(run)
    warnings: list[str] = []
    recorder = Recorder(run, warnings.append)
    for step in (1, 2):
        recorder.update(step=step)
    recorder.append("rows.jsonl", {"value": object()})
    recorder.wait()
    hindrance.rmdir()
    recorder.update(step=3)
    missing = recorder.close()
    assert len(warnings) == 2 and "state.json" in warnings[0] and "rows.jsonl" in warnings[1]
    assert missing.startswith("rows.jsonl is not complete: TypeError") and "state.json" not in missing


def test_unwritable_files_give_one_warning_and_are_named_at_the_end(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "test")
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    in_the_way(run)
    warnings: list[str] = []
    recorder = Recorder(run, warnings.append)
    reporter = Reporter(recorder, PlainView(10, sys.stderr))
    for step in (1, 2):
        reporter.stepped(step, step, METRICS, 0.0)
    missing = recorder.close()
    assert len(warnings) == 2 and "state.json" in warnings[1]
    assert "metrics.jsonl cannot be written: No space left on device" in warnings[0]
    assert "metrics.jsonl is not complete" in missing and "state.json is not complete: Is a directory" in missing


# -- signals


WAITING = """
import asyncio, sys, time
from asyncrl_cli.orchestrator.interrupts import stop_on_signals

async def work(stop):
    stop.attach()
    stuck = asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)  # a disk that hangs
    print("up", flush=True)
    await stop.event.wait()
    print("stopped", flush=True)

with stop_on_signals() as stop:
    asyncio.run(work(stop))
"""

NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
BEFORE_THE_LOOP = """
import signal
from asyncrl_cli.orchestrator.interrupts import stop_on_signals
try:
    with stop_on_signals():
        print("up", flush=True)
        signal.pause()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@contextmanager
def signalled(script: str, *signals: signal.Signals) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that gets these signals when it is up, and the next line that it prints."""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            for number in signals:
                process.send_signal(number)
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("script", "signals"),
    [*((WAITING, [number]) for number in SIGNALS), (f"{NOHUP}\n{WAITING}", [signal.SIGHUP, signal.SIGTERM])],
    ids=[*(number.name for number in SIGNALS), "nohup ignores SIGHUP"],
)
def test_a_signal_ends_the_work_and_a_second_ctrl_c_the_process(script: str, signals: list[signal.Signals]) -> None:
    with signalled(script, *signals) as (process, line):
        assert line == "stopped\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_a_signal_before_the_loop_starts_acts_like_ctrl_c() -> None:
    with signalled(BEFORE_THE_LOOP, signal.SIGHUP) as (_, line):
        assert line == "interrupted\n"
