"""The process that cleans up after a driver, also one that was killed.

    python -m asyncrl_cli.system.reaper MARK FOLDER

It reads its standard input, the driver's end of which closes when the driver is gone, and then kills every
process whose environment has ``ASYNCRL_RUN=MARK``, with all that came from it, and removes FOLDER.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread

from asyncrl_cli.system.process_tree import descendants

MARK = "ASYNCRL_RUN"
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
        # What agents start may have an environment of its own.
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


@contextmanager
def running_reaper(mark: str, folder: Path, log: Path) -> Iterator[None]:
    """A reaper for the length of the block, which is replaced whenever it dies. After the block, no process has the
    mark and ``folder`` is removed, even if the reaper was killed."""

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", __name__, mark, str(folder)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Without the mark, and in a session of its own: neither it nor Ctrl-C in the terminal ends it.
                env={key: value for key, value in os.environ.items() if key != MARK},
                start_new_session=True,
            )

    reaper, ended, changing = start(), Event(), Lock()

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
        yield
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


def main() -> None:
    mark, folder = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(mark)
    remove(Path(folder))


if __name__ == "__main__":
    main()
