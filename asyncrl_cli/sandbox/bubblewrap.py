"""bwrap's arguments, by what they do, and what they are made of: for every sandbox that it starts. And what such a
sandbox is started with: a program of this package, and files in memory."""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl_cli.sandbox import confine

LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/nix/store")
DATA = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Beside Python, what it needs of the system."""
PACKAGES = Path(__file__).parents[2]
"""The folder that has this package."""
OWN_IDS = range(0x70000000, 0x78000000)
"""User ids that no machine assigns."""


class SandboxError(OSError):
    """A sandbox that did not start, or has ended; says why."""


def python(module: str, root: str, words: Sequence[str] = ()) -> list[str]:
    """The command that calls ``main`` of one of this package's modules, which are below ``root``."""
    start = f"import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", start, *words]


def file_of(data: bytes) -> int:
    """The descriptor of a file in memory, to be read from its beginning."""
    file = os.memfd_create("sandbox")
    with os.fdopen(os.dup(file), "wb") as writing:
        writing.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def last_line(process: subprocess.Popen[bytes]) -> str:
    """The last line that a process has printed to its standard error so far."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    lines = (process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def namespaces(as_first_process: bool) -> list[str]:
    """bwrap itself, in namespaces of its own, without capabilities; it ends with its parent.

    ``as_first_process``: the command is the first process of its namespace, which no other in it can end; otherwise
    the first process is bwrap's. As root, bwrap makes no user namespace, whose user would be root outside; so the
    command has to take an unused id. The kernel does not send the signal of a parent's end to a process
    with another id, so such a first process has to notice itself that bwrap, or the process that started bwrap, has
    ended.
    """
    arguments = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--cap-drop", "ALL", *(["--as-pid-1"] if as_first_process else [])]
    if unused_uid() is None and os.getuid() != 0:
        arguments += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    return [*arguments, "--die-with-parent", "--hostname", "sandbox"]


def devices() -> list[str]:
    """A folder /dev with those that hold nothing."""
    return [
        *("--perms", "0755", "--size", "65536", "--tmpfs", "/dev"),
        *(word for path in confine.DEVICES for word in ("--dev-bind", path, path)),
        *("--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"),
    ]


def memory_folder(path: str, size_mb: int, mode: str = "1777") -> list[str]:
    """An empty folder in memory; every user may write to it, if ``mode`` does not differ."""
    return ["--perms", mode, "--size", str(size_mb * confine.MEGABYTE), "--tmpfs", path]


def bindings(bound: Mapping[str, str]) -> list[str]:
    """Files and folders of this machine, read-only: where they are inside, and here."""
    arguments = []
    for target in sorted(bound):
        if any(os.path.commonpath([target, other]) == other for other in bound if other != target):
            continue
        for parent in reversed(Path(target).parents):
            if str(parent) not in ("/", "/tmp"):
                arguments += ["--perms", "0755", "--dir", str(parent)]
        if os.path.islink(source := bound[target]) and source == target:
            arguments += ["--symlink", os.readlink(source), target]
        else:
            arguments += ["--ro-bind", source, target]
    return arguments


def unused_uid() -> int | None:
    """The user id that a process of root has to take; None for an ordinary user. Raises ``SandboxError`` if there is
    none."""
    if os.getuid() != 0:
        return None
    ranges = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for uid in (secrets.choice(OWN_IDS), confine.SHARED_UID):
        if any(first <= uid < first + size for first, _, size in ranges):
            return uid
    if any(first == 0 == outside for first, outside, _ in ranges):
        raise SandboxError("root cannot become another user in this user namespace")
    return None  # in a namespace that an ordinary user has made


@functools.cache
def packages() -> Sequence[str]:
    """Folders of installed packages: of Python's path neither the project's folder nor any other."""
    named = (path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
    return [os.path.realpath(path) for path in named if os.path.isdir(path)]


@functools.cache
def readable() -> Sequence[str]:
    """Files and folders that Python itself needs."""
    own = [os.path.realpath(sys.executable), os.path.dirname(os.path.realpath(os.__file__))]
    own.append(os.path.join(os.path.realpath(sys.base_prefix), "lib"))
    return [path for path in (*LIBRARIES, *DATA, *own) if os.path.exists(path)]
