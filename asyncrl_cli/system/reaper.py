"""The process that cleans up after a driver, even if the driver was killed (decision 0008).

    python -m asyncrl_cli.system.reaper FOLDER

FOLDER has a driver's temporary files. The reaper reads its standard input, which the kernel closes when the driver
ends. Then it kills every process with ``ASYNCRL_RUN=FOLDER`` in its environment and all their descendants, and removes
FOLDER. If driver and reaper were killed together, the next driver does this.

Invariant: a driver holds a lock on the file ``driver`` in its folder while it lives. So if the file exists and is not
locked, the driver is dead.
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
"""Names of drivers' folders. They are short because the paths of Ray's sockets may have only about 100 characters."""
LOCK = "driver"
CLEAN_UP_S = 15.0
"""Limit in seconds for killing processes and for removing files: dying processes may still start and write others."""
RESTART_S = 1.0
"""Seconds between two starts of a reaper."""


def marked_processes(mark: str) -> Iterator[int]:
    """The pids of this user's processes with the mark, except this process."""
    entry_with_mark = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has ended, or belongs to another user
                if entry_with_mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def has_ended(pid: int) -> bool:
    """True if no thread of a process is left. Its first thread may be a zombie while another one still ends."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state in "ZX" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True


def kill_marked(mark: str) -> list[int]:
    """Kill the marked processes and their descendants until none is left; returns those that do not end in time.

    A dying process loses its environment before it closes its files, and with them its GPU. So a process that was
    killed counts until it has ended: the next run must not find the memory taken.
    """
    deadline = time.monotonic() + CLEAN_UP_S
    dying: set[int] = set()
    while True:
        pids = list(marked_processes(mark))
        # Descendants, too: processes that agents start may have another environment, without the mark.
        targets = {*pids, *(process.pid for process in descendants(pids))}
        dying = {pid for pid in dying | targets if not has_ended(pid)}
        if not dying or time.monotonic() > deadline:
            return sorted(dying)
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Look again: a process may have forked during the search.
        time.sleep(0.05)


def remove(folder: Path) -> None:
    """Remove a folder with its contents, again if a dying process puts a file there."""
    deadline = time.monotonic() + CLEAN_UP_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.05)


def remove_left_behind() -> None:
    """Clean up after drivers that were killed together with their reapers."""
    for folder in Path(tempfile.gettempdir()).glob("asyncrl-*"):
        with suppress(OSError):  # its driver lives, another driver removes it, or it has no lock file
            status = folder.lstat()
            # Other users can make folders here, and must not choose the processes that we kill.
            if not (NAME.fullmatch(folder.name) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()):
                continue
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kill_marked(str(folder))
                remove(folder)


def _make(folder: Path) -> int:
    """Make a driver's folder, which only this user may enter; returns the open lock file."""
    folder.mkdir(mode=0o700)
    lock = os.open(folder / f".{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / f".{LOCK}", folder / LOCK)  # after locking: an unlocked file means that the driver is dead
    return lock


@contextmanager
def running_reaper(log: Path, name_prefix: str = "") -> Iterator[Path]:
    """A new temporary folder with a reaper, which is restarted whenever it dies.

    After the block, the folder is removed and no process has its path as mark, even if the reaper was killed.
    """
    remove_left_behind()
    folder = Path(tempfile.gettempdir(), f"asyncrl-{name_prefix}{secrets.token_hex(4)}")
    mark = str(folder)

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", __name__, mark],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # The reaper must outlive the run: without the mark it does not kill itself, and in another session
                # Ctrl-C in the terminal does not reach it.
                env={key: value for key, value in os.environ.items() if key != MARK},
                start_new_session=True,
            )

    # Before the folder exists: a kill between the two must not leave the folder behind (decision 0008).
    reaper, block_ended, changing = start(), Event(), Lock()
    lock: int | None = None

    def watch() -> None:
        nonlocal reaper
        while True:
            reaper.wait()
            with changing:
                if block_ended.is_set():
                    return
                with suppress(OSError):  # no memory for a process; the next attempt may succeed
                    reaper = start()
            block_ended.wait(RESTART_S)

    Thread(target=watch, name="reaper", daemon=True).start()
    try:
        lock = _make(folder)
        yield folder
    finally:
        with changing:
            block_ended.set()
        assert reaper.stdin is not None
        reaper.stdin.close()
        try:
            cleaned_up = reaper.wait(timeout=2 * CLEAN_UP_S + 5) == 0
        except subprocess.TimeoutExpired:  # it is stopped, or hangs
            reaper.kill()
            cleaned_up = False
        if not cleaned_up:
            kill_marked(mark)
        remove(folder)
        if lock is not None:
            os.close(lock)


def main() -> None:
    (folder,) = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    if alive := kill_marked(folder):
        pids = ", ".join(map(str, alive))
        hint = "a GPU's driver may hold them: see nvidia-smi, and restart the machine if they stay"
        print(f"killed, but not ended after {CLEAN_UP_S:.0f} s: processes {pids}; {hint}", file=sys.stderr)
    remove(Path(folder))


if __name__ == "__main__":
    main()
