"""Between the reward's process and code that nobody has read: takes away what the code must not have.

    launcher: new namespaces -> init: mounts, limits -> runner: the code

It is started without site-packages and with an empty environment, so it imports little. The init process is the first
one of its own process namespace: when it ends, the kernel ends all others.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl_cli.runs.offspring import adopt_orphans, kill_below
from asyncrl_cli.runs.parent import die_with

START_S = 5.0
"""Seconds that starting takes at most, beside the code's own time."""
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
INSIDE = 1000
"""The user's id inside."""
HIDDEN = ("/run", "/dev/shm", "/tmp", "/var/tmp")
"""Folders that hold sockets of services, or files of other processes."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """The launcher: ``OWNER REPORT FOLDER`` are its arguments, and the order comes on stdin."""
    owner, report, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with(owner)
    adopt_orphans()
    order = json.loads(sys.stdin.buffer.read())
    isolated = _unshare()
    me = os.getpid()
    init = os.fork()
    if init == 0:
        try:
            if not isolated:
                die_with(me)
            else:  # the parent has no number in here
                _libc.prctl(1, signal.SIGKILL)
            _init(order, report, folder, isolated)
        finally:
            os._exit(1)
    os.close(report)
    while os.wait()[0] != init:
        pass
    kill_below()


def _init(order: dict[str, Any], report: int, folder: str, isolated: bool) -> None:
    limits = order["limits"]
    guarded = not isolated
    if isolated:
        try:
            _mount(folder, limits["disk_mb"], order["python"])
        except OSError as error:
            print(f"sandbox: {error}; audit hooks guard the files instead", file=sys.stderr)
            guarded = True
    started = time.monotonic()
    runner = os.fork()
    if runner == 0:
        try:
            _run(order, report, folder, guarded)
        finally:
            os._exit(1)
    os.close(report)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, max(0.01, limits["time_s"] - (time.monotonic() - started)))
    while os.wait()[0] != runner:
        pass
    os._exit(0)


def _run(order: dict[str, Any], report: int, folder: str, guarded: bool) -> None:
    """Become the runner."""
    limits = order["limits"]
    megabyte = 2**20
    for kind, limit in (
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_CPU, int(limits["time_s"]) + 1),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * megabyte),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError):  # the user has less anyhow
            resource.setrlimit(kind, (limit, limit))
    os.chdir(folder)
    given = os.memfd_create("order")
    with os.fdopen(os.dup(given), "wb") as file:
        file.write(json.dumps({name: order[name] for name in ("code", "tests", "proof")}).encode())
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.set_inheritable(report, True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    runner = str(Path(__file__).with_name("sandbox_runner.py"))
    environment = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    command = [order["python"], "-I", "-B", runner, str(report), folder, "guarded" if guarded else "isolated"]
    os.execve(command[0], command, environment | {"OPENBLAS_NUM_THREADS": "1"})


def _unshare() -> bool:
    """Leave the network, the processes and the mounts of the machine; False where the kernel refuses."""
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC) != 0:
        print(f"sandbox: no namespaces ({os.strerror(ctypes.get_errno())}); audit hooks guard it", file=sys.stderr)
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INSIDE} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{INSIDE} {group} 1")
    return True


def _mount(folder: str, disk_mb: int, python: str) -> None:
    """Make everything read-only, put a file system in memory over ``folder``, and hide what is nobody's business.

    Raises ``OSError``.
    """
    _call(_libc.mount, b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    _call(_libc.syscall, MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    needed = [str(Path(path).resolve()) for path in (python, sys.base_prefix, __file__)] + [python]
    for hidden in HIDDEN:
        inside = hidden + "/"
        if os.path.isdir(hidden) and not os.path.islink(hidden) and not any(map(_starts(inside), needed)):
            _tmpfs(hidden, 1)
            if folder.startswith(inside):
                os.makedirs(folder)
    _tmpfs(folder, disk_mb)
    try:
        _call(_libc.mount, b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV, None)
    except OSError:  # where a container hides parts of it, a whole one is refused
        _tmpfs("/proc", 1)


def _starts(prefix: str) -> Any:
    return lambda path: path.startswith(prefix)


def _tmpfs(path: str, megabytes: int) -> None:
    options = f"size={megabytes}m,mode=700".encode()
    _call(_libc.mount, b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)


def _call(function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
