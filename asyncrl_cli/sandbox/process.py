"""A process in a sandbox, and the kinds of sandbox.

- ``bubblewrap``: bwrap starts the process in namespaces of its own, without a network, in an empty file system to which
  Python and its packages are bound read-only, with one folder in memory that it may write to.
- ``seccomp``: for machines without namespaces. Landlock closes the file system but for the same files and one folder.
- ``none``: nothing is confined; the limits on time, memory, files and threads hold.

In the first two, seccomp refuses every system call that ``filters`` does not name.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.sandbox import calls, confine, filters, program, values
from asyncrl_cli.sandbox.bubblewrap import (
    PACKAGES,
    SandboxError,
    bindings,
    devices,
    file_of,
    last_line,
    memory_folder,
    namespaces,
    packages,
    python,
    readable,
    unused_uid,
)

Kind = Literal["bubblewrap", "seccomp", "none"]
END_S = 10.0
"""Seconds that the kernel gets to end a process after SIGKILL."""
CAP_SYS_PTRACE = 19
MOST_FILES = 10_000
"""Files and folders that the code may have."""
MODULES = (program, calls, values, confine)
"""What the process imports of this package; they import nothing else of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the code may use: seconds (wall clock, and CPU), MiB of memory, MiB of files, and threads."""

    time_s: float = 10.0
    memory_mb: int = 1024
    disk_mb: int = 64
    processes: int = 32


def missing(kind: Kind) -> str:
    """What this machine lacks for a kind of sandbox; "" if it may work."""
    if kind == "none":
        return ""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if kind == "seccomp" and not confine.landlock_version():
        return "this kernel has no Landlock"
    try:
        filters.program()
    except OSError as error:
        return f"libseccomp cannot be used ({error})"
    return ""


class SandboxProcess:
    """One process in a sandbox; started when made. Raises ``SandboxError``."""

    def __init__(
        self, kind: Kind, limits: Limits, folder: str, reading: int, writing: int, order: dict[str, Any]
    ) -> None:
        """``reading`` and ``writing`` are the descriptors of the pipes to the other process, ``folder`` is the one that
        it may write to ("" with bubblewrap). ``order`` says what to do; its ``report`` is a descriptor, too."""
        uid = None if kind == "none" else unused_uid()
        passed = [reading, writing, *([order["report"]] if order["report"] is not None else [])]
        order |= {
            "limits": asdict(limits),
            "reading": reading,
            "writing": writing,
            "uid": uid,
            "landlock": kind == "seccomp",
            "removes": uid is None or _sees_other_users(),
            "filter": None if kind == "none" else base64.b64encode(filters.program()).decode(),
            "packages": packages(),
            "readable": readable(),
            "folder": "/tmp" if kind == "bubblewrap" else folder,
        }
        if uid is not None and kind == "seccomp":
            os.chown(folder, uid, uid)
        self._folder = os.path.realpath(folder) if kind == "seccomp" else None
        self._hidden: set[int] = set()
        self._limits = limits
        info, their_info = os.pipe()
        os.set_blocking(info, False)
        self._info, self._info_text = info, b""
        self._pid = 0
        command = python(program.__name__, "/box" if kind == "bubblewrap" else str(PACKAGES))
        if kind == "bubblewrap":
            passed.append(their_info)
            command = [*_bubblewrap(limits.disk_mb), "--info-fd", str(their_info), "--", *command]
        stdin = file_of(json.dumps(order).encode())
        try:
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                env=_environment(order["folder"]),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            os.close(info)
            raise SandboxError(f"the sandbox cannot be started: {error}") from error
        finally:
            os.close(stdin)
            os.close(their_info)
        self._kind = kind

    @property
    def pid(self) -> int:
        """Of the process inside, as seen from here; until bwrap has written it, that of bwrap, with which it ends."""
        if not self._pid:
            with suppress(BlockingIOError):  # bwrap has not written it yet
                self._info_text += os.read(self._info, 4096)
            if self._kind == "bubblewrap" and not self._info_text.rstrip().endswith(b"}"):
                return self._process.pid
            self._pid = int(json.loads(self._info_text)["child-pid"]) if self._info_text else self._process.pid
        return self._pid

    def exceeds_limits(self) -> bool:
        """Whether it has too many threads, or too many or too large files in its folder."""
        with suppress(OSError):  # it has ended meanwhile
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children")  # of bwrap, where that is the first process
            pids = [self.pid, *children.read_text().split()] if children.exists() else [self.pid]
            if sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids) - len(pids) + 1 > self._limits.processes:
                return True
        if self._kind == "bubblewrap":  # its file system has a size, and empty files take memory beside it
            with suppress(OSError):
                files = os.statvfs(f"/proc/{self.pid}/root/tmp")
                return files.f_files - files.f_ffree > MOST_FILES
        return self._folder is not None and self._uses_too_much(self._folder)

    def _uses_too_much(self, folder: str) -> bool:
        """Whether its files, those in its folder (which has no folders) and removed ones that it has open, are too many
        or too large.

        The size of a file that is removed and closed, but still mapped, is unknown: none may stay so for two checks.
        """
        names = [os.path.join(folder, name) for name in os.listdir(folder)]
        mapped: set[int] = set()
        with suppress(OSError):
            names += [f"/proc/{self.pid}/fd/{name}" for name in os.listdir(f"/proc/{self.pid}/fd")]
            mapped = _removed_and_mapped(self.pid, folder)
        found: dict[int, int] = {}
        for name in names:
            with suppress(OSError):  # it has been removed, or closed, meanwhile
                entry = os.stat(name, follow_symlinks=not name.startswith(folder))
                if name.startswith(folder) or entry.st_nlink == 0:
                    found[entry.st_ino] = entry.st_blocks * 512
        before, self._hidden = self._hidden, mapped - found.keys()
        too_large = sum(found.values()) > self._limits.disk_mb * confine.MEGABYTE
        return too_large or len(found) > MOST_FILES or bool(before & self._hidden)

    def last_line(self) -> str:
        """The last line that it printed before it was ready, or how it ended."""
        status = self._process.poll()
        return last_line(self._process) or ("" if status is None else f"exit status {status}")

    def end(self) -> None:
        """Kill it and wait until it is gone. With its first process the kernel ends all others of a namespace."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError, ValueError):
                os.kill(self.pid, signal.SIGKILL)
            if self._kind != "bubblewrap":
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(END_S)
        if self._kind == "bubblewrap":
            # bwrap does not wait for the first process of the namespace; where this process adopts orphans, it is ours.
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        os.close(self._info)
        assert self._process.stderr is not None
        self._process.stderr.close()


def _removed_and_mapped(pid: int, folder: str) -> set[int]:
    """The inodes of a folder's removed files that a process has in its memory."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
        if len(fields) == 6 and fields[5].startswith(folder) and fields[5].endswith(" (deleted)"):
            found.add(int(fields[4]))
    return found


@functools.cache
def _sees_other_users() -> bool:
    """Whether this process may look at the open files of another user's process."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> CAP_SYS_PTRACE & 1)


def _environment(folder: str) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"} | threads


@functools.cache
def _bubblewrap(disk_mb: int) -> Sequence[str]:
    """bwrap and its arguments, without the command."""
    bound = {path: path for path in (*readable(), *packages())}
    files = [str(module.__file__) for module in MODULES]
    bound |= {f"/box/asyncrl_cli/sandbox/{os.path.basename(path)}": path for path in files}
    return [
        *namespaces(as_first_process=unused_uid() is None),
        *(["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if unused_uid() is not None else []),
        *devices(),
        *memory_folder("/tmp", disk_mb),
        *bindings(bound),
        *("--remount-ro", "/", "--chdir", "/tmp"),
    ]
