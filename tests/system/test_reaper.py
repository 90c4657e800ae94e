"""After the driver's end, the reaper ends everything that the driver started, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl_cli.system import reaper
from asyncrl_cli.system.reaper import MARK, has_ended, kill_marked, marked_processes, running_reaper

pytestmark = pytest.mark.slow

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
from pathlib import Path
import psutil
from asyncrl_cli.system.reaper import running_reaper
with running_reaper(Path(sys.argv[1])) as folder:
    (reaper,) = psutil.Process().children()
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=os.environ | {"ASYNCRL_RUN": str(folder)},
                             stdout=subprocess.PIPE, text=True)
    print(folder, reaper.pid, child.stdout.readline(), flush=True)
    signal.pause()
"""
TIMEOUT_S = 60.0


def is_alive(pid: int) -> bool:
    """True if a process runs; a zombie does not."""
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
        for each in (process, *left):  # the child of the program above ignores SIGTERM, in a separate session
            each.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder for each test: other tests' folders must not be removed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "session"
    (folder / "sockets").mkdir(parents=True)
    (folder / "sockets/plasma").touch()
    yield folder
    kill_marked(str(folder))
    kill_marked(f"{folder}0")


@pytest.fixture
def mark(folder: Path) -> str:
    return str(folder)


def pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def test_everything_marked_is_killed_and_the_folder_removed(start: Start, mark: str, folder: Path) -> None:
    marked = pids(start("-c", STUBBORN, mark=mark))
    others = [*pids(start("-c", STUBBORN, mark=f"{mark}0")), *pids(start("-c", STUBBORN))]
    try:
        reaper = start("-m", "asyncrl_cli.system.reaper", str(folder))
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


def drive(start: Start, log: Path) -> tuple[subprocess.Popen[str], Path, list[int]]:
    """A driver, its folder, and the pids of its reaper and of two processes with its mark."""
    driver = start("-c", DRIVER, str(log), STUBBORN)
    assert driver.stdout is not None
    folder, *words = driver.stdout.readline().split()
    return driver, Path(folder), [int(word) for word in words]


def test_a_killed_driver_takes_everything_with_it(start: Start, tmp_path: Path) -> None:
    driver, folder, (reaper, *marked) = drive(start, tmp_path / "log")
    assert len(marked) == 2
    assert folder.is_dir()
    assert all(map(is_alive, [reaper, *marked]))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    eventually(lambda: not is_alive(reaper))
    assert not any(map(is_alive, marked))
    assert not folder.exists()


def test_a_driver_removes_what_a_driver_killed_with_its_reaper_left(start: Start, tmp_path: Path) -> None:
    living, lived_in, others = drive(start, tmp_path / "log")
    driver, folder, (reaper, *marked) = drive(start, tmp_path / "log")
    os.kill(driver.pid, signal.SIGSTOP)  # otherwise it would start another reaper
    os.kill(reaper, signal.SIGKILL)
    driver.kill()
    driver.wait()
    assert folder.is_dir() and all(map(is_alive, marked))
    foreign = [tmp_path / name for name in ("asyncrl-results", "asyncrl-0123abcd", "asyncrl-check-0123abcd")]
    for path in foreign:
        path.mkdir()
    (foreign[0] / "driver").touch()
    (tmp_path / "asyncrl-89abcdef").symlink_to(lived_in)
    with running_reaper(tmp_path / "log"):
        assert not folder.exists() and not any(map(is_alive, marked))
        assert lived_in.is_dir() and all(map(is_alive, [living.pid, *others]))
        assert all(path.is_dir() for path in foreign)
    living.send_signal(signal.SIGINT)
    living.wait()
    assert not lived_in.exists()


@pytest.mark.parametrize("does_it", [False, True], ids=["before the call", "after the call"])
@pytest.mark.parametrize("name", ["mkdir", "open", "rename"])
def test_no_interruption_of_a_start_leaves_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, does_it: bool
) -> None:
    real = getattr(os, name)

    def interrupted(*arguments: Any, **named: Any) -> None:
        if does_it:
            real(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, name, interrupted)
    with pytest.raises(KeyboardInterrupt), running_reaper(tmp_path / "log"):
        pass
    assert not list(tmp_path.glob("asyncrl-*")) and children() == []


def test_process_has_not_ended_while_one_of_its_threads_has_not(start: Start) -> None:
    exit_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]  # the system call that ends only one thread
    process = start(
        "-c",
        "import ctypes, threading; threading.Thread(target=threading.Event().wait).start(); print('up', flush=True); "
        f"ctypes.CDLL(None).syscall({exit_thread}, 0)",
    )
    assert process.stdout is not None and process.stdout.readline()
    eventually(lambda: not is_alive(process.pid))
    assert not has_ended(process.pid)
    process.kill()
    process.wait()
    assert has_ended(process.pid)


def test_killed_process_counts_until_it_has_ended(start: Start, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("-c", STUBBORN, mark=mark)
    stubborn = pids(process)
    with monkeypatch.context() as patch:
        # As if a GPU's driver held the processes: their environment is gone after the first look, and they stay.
        looks = iter([marked_processes(mark)])
        patch.setattr(reaper, "CLEAN_UP_S", 0.2)
        patch.setattr(reaper, "marked_processes", lambda _: next(looks, ()))
        patch.setattr(os, "kill", lambda *_: None)
        assert kill_marked(mark) == sorted(stubborn)
    assert kill_marked(mark) == []
    assert not any(map(is_alive, stubborn))


def is_reaper(process: psutil.Process) -> bool:
    try:
        return "asyncrl_cli.system.reaper" in process.cmdline()
    except psutil.Error:  # the process has ended
        return False


def children(but: int = 0) -> list[int]:
    """This process's reapers, except one."""
    return [process.pid for process in psutil.Process().children() if process.pid != but and is_reaper(process)]


def test_a_reaper_that_dies_gets_a_successor(start: Start, tmp_path: Path) -> None:
    with running_reaper(tmp_path / "log") as folder:
        marked = pids(start("-c", STUBBORN, mark=str(folder)))
        (first,) = children()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: children(but=first) != [])
        assert all(map(is_alive, marked))
    assert not any(map(is_alive, marked)) and not folder.exists() and children() == []


def test_without_a_reaper_at_the_end_everything_is_cleaned_up(start: Start, tmp_path: Path) -> None:
    with running_reaper(tmp_path / "log") as folder:
        marked = pids(start("-c", STUBBORN, mark=str(folder)))
        (reaper,) = children()
        os.kill(reaper, signal.SIGKILL)
    assert not any(map(is_alive, marked)) and not folder.exists() and children() == []


def test_a_reaper_that_hangs_leaves_nothing_behind(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                raise subprocess.TimeoutExpired("reaper", timeout)
            return super().wait()

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", Stopped)
    with running_reaper(tmp_path / "log") as folder:
        monkeypatch.setattr(subprocess, "Popen", popen)
        marked = pids(start("-c", STUBBORN, mark=str(folder)))
        (reaper,) = children()
        os.kill(reaper, signal.SIGSTOP)
    eventually(lambda: not any(map(is_alive, [reaper, *marked])))
    assert not folder.exists()
