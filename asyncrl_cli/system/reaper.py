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

from asyncrl_cli.system.process_tree import below

MARK = "ASYNCRL_RUN"
PATIENCE_S = 15.0
"""Seconds to go on looking for processes that are still being started."""
AGAIN_S = 1.0
"""Seconds between two starts of a guardian."""


def marked_processes(mark: str) -> Iterator[int]:
    """Process ids of this user's processes that carry the mark, this one left out."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            yield int(entry.name)


def kill_marked(mark: str) -> None:
    """Kill until none is left."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = list(marked_processes(mark))
        if not found:
            return
        # What agents start may have an environment of its own.
        for pid in (*found, *(process.pid for process in below(found))):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        # A killed process stays in /proc until its parent has seen it; so does one that forks meanwhile.
        time.sleep(0.05)


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it; a dying process may still put something there meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


@contextmanager
def watched_guardian(mark: str, folder: Path, log: Path) -> Iterator[None]:
    """A guardian for the length of the block, and another one whenever it dies. At the end of the block it ends what
    carries the mark, and ``folder`` is gone, whatever became of the guardian."""

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "asyncrl_cli.system.reaper", mark, str(folder)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={key: value for key, value in os.environ.items() if key != MARK},
                start_new_session=True,
            )

    guardian, ended, changing = start(), Event(), Lock()

    def watch() -> None:
        nonlocal guardian
        while True:
            guardian.wait()
            with changing:
                if ended.is_set():
                    return
                with suppress(OSError):  # no memory for a process: perhaps there is some a moment later
                    guardian = start()
            ended.wait(AGAIN_S)

    Thread(target=watch, name="guardian", daemon=True).start()
    try:
        yield
    finally:
        with changing:
            ended.set()
        assert guardian.stdin is not None
        guardian.stdin.close()
        try:
            done = guardian.wait(timeout=2 * PATIENCE_S + 5) == 0
        except subprocess.TimeoutExpired:  # it is stopped, or hangs
            guardian.kill()
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
