"""The process that cleans up after a driver, also one that was killed.

    python -m asyncrl_cli.system.reaper FOLDER

FOLDER has a driver's temporary files. The reaper reads its standard input, which closes when the driver is gone. Then
it kills every process with ``ASYNCRL_RUN=FOLDER`` in its environment, and all descendants, and removes FOLDER. If
driver and reaper were killed together, the next driver does so.

Invariant: a driver locks the file ``driver`` in its folder for as long as it lives, so a folder with such a file that
is not locked belongs to a dead driver.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread

from asyncrl_cli.system.process_tree import descendants

MARK = "ASYNCRL_RUN"
NAME = re.compile(r"asyncrl-(check-)?[0-9a-f]{8}")
"""Names of drivers' folders. They are short, because paths of Ray's sockets are limited to about 100 characters."""
LOCK = "driver"
CLEAN_UP_S = 15.0
"""Seconds for which it searches processes that are still starting, and files that they still write."""
RESTART_S = 1.0
"""Seconds between two starts of a reaper."""


def marked_processes(mark: str) -> Iterator[int]:
    """Process ids of this user's processes that carry the mark, without this process."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # of another user, or it has ended
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def kill_marked(mark: str) -> None:
    """Kill until none is left."""
    deadline = time.monotonic() + CLEAN_UP_S
    while time.monotonic() < deadline:
        found = list(marked_processes(mark))
        if not found:
            return
        # Processes that agents start may have another environment.
        for pid in (*found, *(process.pid for process in descendants(found))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A killed process stays in /proc until its parent has seen it; so does one that forks meanwhile.
        time.sleep(0.05)


def remove(folder: Path) -> None:
    """Remove a folder with its contents; a dying process may still put something there meanwhile."""
    deadline = time.monotonic() + CLEAN_UP_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def remove_left_behind() -> None:
    """End the processes and remove the folders of drivers that were killed together with their reapers."""
    for folder in Path(tempfile.gettempdir()).glob("asyncrl-*"):
        with suppress(OSError):  # another driver removes it, or it has no lock
            found = folder.lstat()
            # Any user can make a folder here: its name says which processes are killed.
            if not (NAME.fullmatch(folder.name) and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()):
                continue
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kill_marked(str(folder))
                remove(folder)


def _make(folder: Path) -> int:
    """Make a driver's folder, which only this user may enter; returns the open file with the lock."""
    folder.mkdir(mode=0o700)
    lock = os.open(folder / f".{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / f".{LOCK}", folder / LOCK)  # only now: a file without a lock would tell that the driver is dead
    return lock


@contextmanager
def running_reaper(log: Path, kind: str = "") -> Iterator[Path]:
    """A new temporary folder with a reaper, which is replaced whenever it dies, for the length of the block.

    After the block, the folder is removed and no process has its path as mark, even if the reaper was killed.
    """
    remove_left_behind()
    folder = Path(tempfile.gettempdir(), f"asyncrl-{kind}{secrets.token_hex(4)}")
    mark = str(folder)

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", __name__, mark],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Without the mark and in another session: neither the mark nor Ctrl-C in the terminal ends it.
                env={key: value for key, value in os.environ.items() if key != MARK},
                start_new_session=True,
            )

    # Before the folder exists: neither a signal nor a kill, at any moment, must leave it behind (decision 0008).
    reaper, ended, changing = start(), Event(), Lock()
    lock: int | None = None

    def watch() -> None:
        nonlocal reaper
        while True:
            reaper.wait()
            with changing:
                if ended.is_set():
                    return
                with suppress(OSError):  # no memory for a process: perhaps there is some a moment later
                    reaper = start()
            ended.wait(RESTART_S)

    Thread(target=watch, name="reaper", daemon=True).start()
    try:
        lock = _make(folder)
        yield folder
    finally:
        with changing:
            ended.set()
        assert reaper.stdin is not None
        reaper.stdin.close()
        try:
            done = reaper.wait(timeout=2 * CLEAN_UP_S + 5) == 0
        except subprocess.TimeoutExpired:  # it is stopped, or hangs
            reaper.kill()
            done = False
        if not done:
            kill_marked(mark)
        remove(folder)
        if lock is not None:
            os.close(lock)


def main() -> None:
    (folder,) = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(folder)
    remove(Path(folder))


if __name__ == "__main__":
    main()
