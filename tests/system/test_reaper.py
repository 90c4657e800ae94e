"""The reaper: after the driver's end it ends everything that the driver started, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl_cli.system.reaper import MARK, kill_marked, marked_processes, running_reaper

STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE, start_new_session=True, env={})
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""
"""A program that ignores SIGTERM and has a child in a separate session, without the mark; prints both pids."""

DRIVER = """
import os, signal, subprocess, sys
mark, folder, stubborn = sys.argv[1:]
reaper = subprocess.Popen([sys.executable, "-m", "asyncrl_cli.system.reaper", mark, folder],
                            stdin=subprocess.PIPE, start_new_session=True)
child = subprocess.Popen([sys.executable, "-c", stubborn], env=os.environ | {"ASYNCRL_RUN": mark},
                         stdout=subprocess.PIPE, text=True)
print(reaper.pid, child.stdout.readline(), flush=True)
signal.pause()
"""
TIMEOUT_S = 60.0


def is_alive(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python processes, which are killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, mark: str | None = None) -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if key != MARK}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment | ({MARK: mark} if mark else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in (process, *left):  # a child of the program above ignores SIGTERM and is in a separate session
            each.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    name = f"test-{os.getpid()}-{tmp_path.name}"
    yield name
    kill_marked(name)
    kill_marked(f"{name}0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "session"
    (folder / "sockets").mkdir(parents=True)
    (folder / "sockets/plasma").touch()
    return folder


def pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def test_everything_marked_is_killed_and_the_folder_removed(start: Start, mark: str, folder: Path) -> None:
    marked = pids(start("-c", STUBBORN, mark=mark))
    others = [*pids(start("-c", STUBBORN, mark=f"{mark}0")), *pids(start("-c", STUBBORN))]
    try:
        reaper = start("-m", "asyncrl_cli.system.reaper", mark, str(folder))
        assert reaper.stdin is not None
        reaper.stdin.close()
        assert reaper.wait(TIMEOUT_S) == 0
        assert len(marked) == 2
        assert not any(map(is_alive, marked))
        assert not folder.exists()
        assert len(others) == 4
        assert all(map(is_alive, others))
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)


def test_it_waits_for_the_pipe(start: Start, mark: str, folder: Path) -> None:
    marked = pids(start("-c", STUBBORN, mark=mark))
    reaper = start("-m", "asyncrl_cli.system.reaper", mark, str(folder))
    assert reaper.stdin is not None
    reaper.stdin.write("not the end\n")
    reaper.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        reaper.wait(1.0)
    assert all(map(is_alive, marked))
    assert folder.is_dir()
    reaper.stdin.close()
    reaper.wait(TIMEOUT_S)
    assert not any(map(is_alive, marked))


def test_a_killed_driver_takes_everything_with_it(start: Start, mark: str, folder: Path) -> None:
    driver = start("-c", DRIVER, mark, str(folder), STUBBORN)
    reaper, *marked = pids(driver)
    assert len(marked) == 2
    assert all(map(is_alive, [reaper, *marked]))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    eventually(lambda: not is_alive(reaper))
    assert not any(map(is_alive, marked))
    assert not folder.exists()


def test_with_nothing_left_it_ends(start: Start, mark: str, tmp_path: Path) -> None:
    reaper = start("-m", "asyncrl_cli.system.reaper", mark, str(tmp_path / "missing"))
    reaper.communicate()
    assert reaper.returncode == 0


def test_marked_processes_leaves_itself_out(start: Start, mark: str) -> None:
    script = f"import os; from asyncrl_cli.system.reaper import marked_processes as m; print(*m({mark!r}))"
    out, _ = start("-c", script, mark=mark).communicate()
    assert out.split() == []
    marked, _ = pids(start("-c", STUBBORN, mark=mark))
    assert list(marked_processes(mark)) == [marked]


def is_reaper(process: psutil.Process) -> bool:
    try:
        return "asyncrl_cli.system.reaper" in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def children(but: int = 0) -> list[int]:
    """The reapers of this process, except one."""
    return [process.pid for process in psutil.Process().children() if process.pid != but and is_reaper(process)]


def test_a_reaper_that_dies_gets_a_successor(start: Start, mark: str, folder: Path, tmp_path: Path) -> None:
    with running_reaper(mark, folder, tmp_path / "log"):
        marked = pids(start("-c", STUBBORN, mark=mark))
        (first,) = children()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: children(but=first) != [])
        assert all(map(is_alive, marked))
    assert not any(map(is_alive, marked)) and not folder.exists() and children() == []


def test_without_a_reaper_at_the_end_everything_is_cleaned_up(
    start: Start, mark: str, folder: Path, tmp_path: Path
) -> None:
    with running_reaper(mark, folder, tmp_path / "log"):
        marked = pids(start("-c", STUBBORN, mark=mark))
        (reaper,) = children()
        os.kill(reaper, signal.SIGKILL)
    assert not any(map(is_alive, marked)) and not folder.exists() and children() == []


def test_a_reaper_that_hangs_leaves_nothing_behind(
    start: Start, mark: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                raise subprocess.TimeoutExpired("reaper", timeout)
            return super().wait()

    marked = pids(start("-c", STUBBORN, mark=mark))
    monkeypatch.setattr(subprocess, "Popen", Stopped)
    with running_reaper(mark, folder, tmp_path / "log"):
        (reaper,) = children()
        os.kill(reaper, signal.SIGSTOP)
    eventually(lambda: not any(map(is_alive, [reaper, *marked])))
    assert not folder.exists()
