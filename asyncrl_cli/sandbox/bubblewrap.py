"""bwrap's arguments for each kind of sandbox, and the process that it starts.

Judged code sees Python and its packages. Commands also see the machine's programs. Both see this package at ``OWN``,
and may write only to one or two empty folders in memory.
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
from typing import TYPE_CHECKING

from asyncrl_cli.sandbox import confine
from asyncrl_cli.system.process_tree import descendants

if TYPE_CHECKING:  # pydantic cannot be imported by the supervisor of a container
    from asyncrl_cli.spec.inputs import SandboxSpec

WORK_FOLDER = "/sandbox"
"""Working folder of commands inside. No folder of Python's packages may be below it, because it would show there."""
PACKAGE_ROOT_INSIDE = "/box"
"""The folder that holds this package inside."""
PACKAGE_ROOT = Path(__file__).parents[2]
"""The folder that holds this package outside."""
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/nix/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
"""System files that Python needs."""
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
PROGRAM_FILES = (
    "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/mime.types",
)  # fmt: skip
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN")
"""If the run is root's, the first process needs these to take its user id and own its folder; then it drops them."""
SANDBOX_UIDS = range(0x70000000, 0x78000000)
"""User ids that no machine assigns."""
END_S = 10.0
"""Seconds that the kernel has to end a process after SIGKILL."""


class SandboxError(OSError):
    """The sandbox did not start, or has ended; the message says why."""


class Process:
    """A process in a sandbox of bwrap, or an unconfined one. The constructor starts it and raises ``OSError``."""

    def __init__(
        self,
        command: Sequence[str],
        bwrap: Sequence[str] = (),
        *,
        inherited_descriptors: Sequence[int],
        environment: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """``bwrap``: bwrap with its arguments, if it is to start the command. ``inherited_descriptors``: those that it
        inherits."""
        self._info, info = os.pipe()
        os.set_blocking(self._info, False)
        self._info_text = b""
        self._pid = 0
        self._in_namespaces = bool(bwrap)
        if bwrap:
            command = [*bwrap, "--info-fd", str(info), "--", *command]
        try:
            # bwrap ends with the thread that starts it (PR_SET_PDEATHSIG), so callers use a thread that lives on.
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[*inherited_descriptors, info] if bwrap else inherited_descriptors,
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
        """The last line on its standard error so far."""
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def end(self, patience_s: float = 0.0) -> None:
        """Wait for the process to end; kill it after ``patience_s``.

        The kernel ends a namespace with its first process. Without namespaces the descendants are killed here, because
        commands start their own sessions, outside the process group.
        """
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            left_processes = [] if self._in_namespaces else descendants([self.pid])
            for pid in (self.pid, *(process.pid for process in left_processes)):
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
            # bwrap does not wait for the namespace's first process. A process that adopts orphans must reap it itself.
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Close the descriptors of a process that has ended."""
        os.close(self._info)
        assert self._process.stderr is not None
        self._process.stderr.close()


def python(module: str, root: str, words: Sequence[str] = ()) -> list[str]:
    """The command that calls ``main`` of a module of this package; ``root`` is the folder that holds the package."""
    start = f"import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", start, *words]


def file_of(data: bytes) -> int:
    """Return the descriptor of a file in memory, positioned at its beginning."""
    file = os.memfd_create("sandbox")
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def unused_uid() -> int:
    """The user id that root's sandbox must take; 0 for an ordinary user. Raises ``SandboxError`` if none is free."""
    if os.getuid() != 0:
        return 0
    ranges = [[int(bound) for bound in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for uid in (secrets.choice(SANDBOX_UIDS), confine.SHARED_UID):
        if any(start <= uid < start + size for start, _, size in ranges):
            return uid
    if any(start == 0 == outside_start for start, outside_start, _ in ranges):
        raise SandboxError("root cannot become another user in this user namespace")
    return 0  # an ordinary user who is root only in its own namespace


@functools.cache
def packages() -> Sequence[str]:
    """Folders of installed packages. Other folders of Python's path, such as the project's, stay hidden."""
    folders = (path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
    return [os.path.realpath(path) for path in folders if os.path.isdir(path)]


@functools.cache
def readable() -> Sequence[str]:
    """Files and folders that the interpreter needs."""
    interpreter_paths = [os.path.realpath(sys.executable), os.path.dirname(os.path.realpath(os.__file__))]
    interpreter_paths.append(os.path.join(os.path.realpath(sys.base_prefix), "lib"))
    return [path for path in (*LIBRARIES, *SYSTEM_FILES, *interpreter_paths) if os.path.exists(path)]


@functools.cache
def for_code(disk_mb: int) -> Sequence[str]:
    """bwrap with its arguments for judged code."""
    return [
        *_namespaces(as_first_process=False),
        *_devices(),
        *_memory_folder("/tmp", disk_mb),
        *_bindings({path: path for path in (*readable(), *packages())} | _package_modules()),
        *("--remount-ro", "/", "--chdir", "/tmp"),
    ]


def for_commands(settings: SandboxSpec, visible: Mapping[str, str], accounts: Mapping[str, int]) -> list[str]:
    """bwrap with its arguments for commands. ``accounts``: paths of small files, with descriptors of their content."""
    return [
        *_namespaces(as_first_process=True),
        *_devices(),
        *("--proc", "/proc"),
        *("--perms", "0755", "--dir", "/run"),
        *_memory_folder("/tmp", settings.disk_mb),
        *_memory_folder(WORK_FOLDER, settings.disk_mb),
        *("--perms", "0755", "--dir", "/etc"),
        *(word for path, file in accounts.items() for word in ("--perms", "0444", "--file", str(file), path)),
        *_bindings(visible),
        *("--remount-ro", "/", "--chdir", WORK_FOLDER),
    ]


def visible_to_commands(settings: SandboxSpec) -> dict[str, str]:
    """Files and folders that commands may read: their path inside, mapped to their path on this machine."""
    interpreter_paths = (sys.prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    sources = {path: path for path in (*PROGRAMS, *PROGRAM_FILES, *interpreter_paths) if os.path.exists(path)}
    sources |= {os.path.abspath(path): os.path.realpath(path) for path in settings.readable}
    return sources | _package_modules()


def _package_modules() -> dict[str, str]:
    package = Path(__file__).parent
    return {f"{PACKAGE_ROOT_INSIDE}/{package.relative_to(PACKAGE_ROOT)}": str(package)}


def _namespaces(as_first_process: bool) -> list[str]:
    """bwrap in new namespaces, with few or no capabilities; it ends with its parent.

    ``as_first_process``: the command is the first process of its namespace, and no other process there can kill it.
    Otherwise bwrap's own process is.

    As root, bwrap makes no user namespace, because the user inside would be root outside. Instead the command takes an
    unused id. The kernel does not signal a parent's end to a process with another user id, so such a command must
    notice itself that bwrap or the worker has ended (decision 0021).
    """
    arguments = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--cap-drop", "ALL", *(["--as-pid-1"] if as_first_process else [])]
    if unused_uid():
        arguments += [word for name in CAPABILITIES for word in ("--cap-add", name)]
    elif os.getuid() != 0:
        arguments += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    return [*arguments, "--die-with-parent", "--hostname", "sandbox"]


def _devices() -> Iterable[str]:
    """A read-only /dev with devices that store nothing."""
    yield from ("--perms", "0755", "--size", "65536", "--tmpfs", "/dev")
    for path in confine.DEVICES:
        yield from ("--dev-bind", path, path)
    yield from ("--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev")


def _memory_folder(path: str, size_mb: int) -> tuple[str, ...]:
    """An empty folder in memory that every user may write to."""
    return "--perms", "1777", "--size", str(size_mb * confine.MEGABYTE), "--tmpfs", path


def _bindings(sources: Mapping[str, str]) -> Iterable[str]:
    """Bind files and folders of this machine read-only: path inside, mapped to path on this machine."""
    for target in sorted(sources):
        if any(
            os.path.commonpath([target, other_target]) == other_target
            for other_target in sources
            if other_target != target
        ):  # bound above it
            continue
        for parent in reversed(Path(target).parents):
            if str(parent) not in ("/", "/tmp"):
                yield from ("--perms", "0755", "--dir", str(parent))
        if os.path.islink(source := sources[target]) and source == target:
            yield from ("--symlink", os.readlink(source), target)
        else:
            yield from ("--ro-bind", source, target)
