"""bwrap's arguments for each sandbox, and the process that it starts.

A sandbox for judged code shows Python and its packages, one for commands the programs of this machine, too. Both see
this package's modules at ``OWN``, and one or two empty folders in memory that they may write to.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl_cli.sandbox import confine, gvisor, processes
from asyncrl_cli.spec.inputs import SandboxSpec

WORK_FOLDER = "/sandbox"
"""Where commands start, inside. No folder of Python's packages may be below it, because it would be visible there."""
OWN = "/box"
"""The folder with this package, inside."""
PACKAGES = Path(__file__).parents[2]
"""The folder with this package, outside."""
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/nix/store")
DATA = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Files of the system that Python needs."""
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
DATA_OF_PROGRAMS = (
    "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/mime.types",
)  # fmt: skip
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN")
"""A process of root needs them to take its id and to own its folder; then it drops them."""
OWN_IDS = range(0x70000000, 0x78000000)
"""User ids that no machine assigns."""
END_S = 10.0
"""Seconds that the kernel gets to end a process after SIGKILL."""


class SandboxError(OSError):
    """A sandbox that did not start, or has ended; says why."""


class Process:
    """A process in a sandbox of bwrap, or an unconfined one; started when made. Raises ``OSError``."""

    def __init__(
        self,
        command: Sequence[str],
        bwrap: Sequence[str] = (),
        *,
        passed: Sequence[int],
        environment: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """``bwrap``: bwrap and its arguments, if it starts the command. ``passed``: descriptors for the command."""
        self._info, info = os.pipe()
        os.set_blocking(self._info, False)
        self._info_text = b""
        self._pid = 0
        self._in_namespaces = bool(bwrap)
        if bwrap:
            command = [*bwrap, "--info-fd", str(info), "--", *command]
        try:
            # bwrap ends with the thread that has started it.
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[*passed, info] if bwrap else passed,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            os.close(self._info)
            raise
        finally:
            os.close(info)

    @property
    def pid(self) -> int:
        """PID of the sandbox's first process; PID of bwrap until bwrap has reported it."""
        if not self._in_namespaces:
            return self._process.pid
        if not self._pid:
            with suppress(BlockingIOError):
                self._info_text += os.read(self._info, 4096)
            if not self._info_text.rstrip().endswith(b"}"):
                return self._process.pid
            self._pid = int(json.loads(self._info_text)["child-pid"])
        return self._pid

    def last_line(self) -> str:
        """The last line that it printed to its standard error so far."""
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def end(self, patience_s: float = 0.0) -> None:
        """Wait until it has ended; kill it after ``patience_s``. The kernel ends a namespace with its first process."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            doomed = [] if self._in_namespaces else [*processes.below(self.pid)]  # commands are not in its group
            for pid in (self.pid, *doomed):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not self._in_namespaces:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(END_S)
        if self.pid != self._process.pid:
            # bwrap does not wait for the namespace's first process. If this process adopts orphans, it has to.
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Close the descriptors of a process that has ended."""
        os.close(self._info)
        assert self._process.stderr is not None
        self._process.stderr.close()


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


def unused_uid() -> int:
    """The user id that a process of root has to take; 0 for an ordinary user. Raises ``SandboxError`` if there is
    none."""
    if os.getuid() != 0:
        return 0
    ranges = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for uid in (secrets.choice(OWN_IDS), confine.SHARED_UID):
        if any(first <= uid < first + size for first, _, size in ranges):
            return uid
    if any(first == 0 == outside for first, outside, _ in ranges):
        raise SandboxError("root cannot become another user in this user namespace")
    return 0  # in a namespace that an ordinary user has made


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


@functools.cache
def for_code(disk_mb: int) -> Sequence[str]:
    """bwrap and its arguments for judged code."""
    return [
        *_namespaces(as_first_process=False),
        *_devices(),
        *_memory_folder("/tmp", disk_mb),
        *_bindings({path: path for path in (*readable(), *packages())} | _own_modules()),
        *("--remount-ro", "/", "--chdir", "/tmp"),
    ]


def for_commands(settings: SandboxSpec, visible: Mapping[str, str], accounts: Mapping[str, int]) -> list[str]:
    """bwrap and its arguments for commands. ``accounts``: descriptors with the content of small files."""
    in_gvisor = settings.kind == "gvisor"
    return [
        # gVisor's processes cannot end bwrap's own first process. Its end ends all of them.
        *_namespaces(as_first_process=not in_gvisor),
        *_devices(),
        *("--proc", "/proc"),
        *("--perms", "0755", "--dir", "/run"),
        *_memory_folder("/tmp", settings.disk_mb),
        *(_memory_folder(gvisor.SOCKET_FOLDER, 1, "0755") if in_gvisor else ()),
        *_memory_folder(WORK_FOLDER, settings.disk_mb),
        *("--perms", "0755", "--dir", "/etc"),
        *(word for path, file in accounts.items() for word in ("--perms", "0444", "--file", str(file), path)),
        *_bindings(visible),
        *("--remount-ro", "/", "--chdir", WORK_FOLDER),
    ]


def visible_to_commands(settings: SandboxSpec) -> dict[str, str]:
    """Files and folders of this machine that can be read inside: where they are inside, and here."""
    own = (sys.prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    bound = {path: path for path in (*PROGRAMS, *DATA_OF_PROGRAMS, *own) if os.path.exists(path)}
    bound |= {os.path.abspath(path): os.path.realpath(path) for path in settings.readable}
    if settings.kind == "gvisor":
        bound[gvisor.PROGRAM] = os.path.realpath(shutil.which("runsc") or "runsc")
    return bound | _own_modules()


def _own_modules() -> dict[str, str]:
    package = Path(__file__).parent
    return {f"{OWN}/{package.relative_to(PACKAGES)}": str(package)}


def _namespaces(as_first_process: bool) -> list[str]:
    """bwrap itself, in new namespaces, with few capabilities if any; it ends with its parent.

    ``as_first_process``: the command is the first process of its namespace, which no other in it can end; otherwise
    the first process is bwrap's. As root, bwrap makes no user namespace, because its user would be root outside.
    So the command has to take an unused id. The kernel does not send the signal of a parent's end to a process
    with another id, so such a first process has to notice itself that bwrap, or the process that started bwrap, has
    ended.
    """
    arguments = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--cap-drop", "ALL", *(["--as-pid-1"] if as_first_process else [])]
    if unused_uid():
        arguments += [word for name in CAPABILITIES for word in ("--cap-add", name)]
    elif os.getuid() != 0:
        arguments += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    return [*arguments, "--die-with-parent", "--hostname", "sandbox"]


def _devices() -> Iterable[str]:
    """A folder /dev with those that hold nothing."""
    yield from ("--perms", "0755", "--size", "65536", "--tmpfs", "/dev")
    for path in confine.DEVICES:
        yield from ("--dev-bind", path, path)
    yield from ("--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev")


def _memory_folder(path: str, size_mb: int, mode: str = "1777") -> tuple[str, ...]:
    """An empty folder in memory; with the default ``mode`` every user may write to it."""
    return "--perms", mode, "--size", str(size_mb * confine.MEGABYTE), "--tmpfs", path


def _bindings(bound: Mapping[str, str]) -> Iterable[str]:
    """Files and folders of this machine, read-only: where they are inside, and here."""
    for target in sorted(bound):
        if any(os.path.commonpath([target, other]) == other for other in bound if other != target):
            continue
        for parent in reversed(Path(target).parents):
            if str(parent) not in ("/", "/tmp"):
                yield from ("--perms", "0755", "--dir", str(parent))
        if os.path.islink(source := bound[target]) and source == target:
            yield from ("--symlink", os.readlink(source), target)
        else:
            yield from ("--ro-bind", source, target)
