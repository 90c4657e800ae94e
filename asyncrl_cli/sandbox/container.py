"""A sandbox in a container with an image of the task, through podman or docker.

Commands, files and limits go through the same messages as in a sandbox of bwrap. The supervisor stays outside, because
an image may lack Python, and starts each command with ``podman exec``.

Invariant: the container lives as long as its standard input. Its first process reads a pipe that the supervisor holds,
and ``--rm`` removes the container when that process ends. So the container also ends if the supervisor is killed. No
process of the engine is killed with the supervisor (``system.process_tree``): half a start would stay for good.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from asyncrl_cli.sandbox import supervisor, work_files
from asyncrl_cli.sandbox.bubblewrap import WORK_FOLDER, SandboxError, file_of

ENGINES = ("podman", "docker")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Processors by the kernel's name, mapped to the engines' names."""
ENGINE_VARIABLES = (
    "PATH", "HOME", "USER", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "DBUS_SESSION_BUS_ADDRESS",
    "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "CONTAINER_HOST", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG",
)  # fmt: skip
"""The engine's environment. Proxies are left out, because podman would pass them to the container."""
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""Root inside an image needs them to install packages, to change the user, and to end its processes."""
OPEN_FILES = 1024
USER_PROCESSES = 2**15
"""Limit of processes: the kernel counts RLIMIT_NPROC over all containers with the same user."""
SPARE_PROCESSES = 4
"""Processes beyond the limit: the container's first one, the shell around a command, and the one that ends others."""
ENGINE_FAILURES = (125, 255)
"""Exit statuses of the engine itself, if a container is missing or has ended."""
EXEC_S = 30.0
"""Seconds to end a container's processes on a busy machine."""
CLIENT_END_S, CLIENT_POLL_S = 1.0, 0.01
"""Seconds that the engine's client gets to end after the processes inside, and seconds between two checks."""
SIZE_INTERVAL_S = 2.0
"""Seconds between two counts of the bytes that a command has written outside of the work folder."""
READY = b"ready\n"
FIRST_PROCESS = (
    "for program in cat head mkdir; do command -v $program >/dev/null || "
    # For each line, `jobs` reaps orphans that have ended, without a further process. They count towards the limit.
    '{ echo "the image has no program $program" >&2; exit 1; }; done; echo ready; while read -r line; do jobs; done'
)
ENTER_WORK_FOLDER = f'[ "$PWD" != / ] || cd {WORK_FOLDER}; '
"""Enter the work folder: the image's working folder, if it has one."""
RUN_COMMAND = (
    f"exec 3>&2 2>/dev/null; {ENTER_WORK_FOLDER}shell=/bin/sh; [ ! -x /bin/bash ] || shell=/bin/bash; "
    # `kill -1` reaches all processes but the first and this one.
    '"$shell" -c "$(cat)" </dev/null 2>&ERRORS 3>&-; status=$?; kill -9 -1; exit $status'
)
WRITE_FILE = ENTER_WORK_FOLDER + 'case "$1" in */*) mkdir -p "${1%/*}/" || exit 1;; esac; '
WRITE_FILE += f'[ ! -e "$1" ] || [ -f "$1" ] || exit {errno.EINVAL}; cat >"$1"'  # a pipe would wait for a reader
READ_FILE = (
    ENTER_WORK_FOLDER + f'[ -e "$1" ] || exit {errno.ENOENT}; [ -f "$1" ] || exit {errno.EINVAL}; head -c "$2" "$1"'
)
END_PROCESSES = "kill -9 -1"


def engine() -> str:
    """Path of podman, or of docker if podman is not installed. Raises ``SandboxError``."""
    for program in ENGINES:
        if path := shutil.which(program):
            return path
    raise SandboxError("neither podman nor docker is installed")


def image_problem(image: str) -> str:
    """Why this machine cannot use an image; "" if nothing is known. Raises ``SandboxError`` without an engine."""
    words = [engine(), "image", "inspect", "--format", "{{.Os}}/{{.Architecture}}", image]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        message = (result.stderr.strip().splitlines() or ["no message"])[-1]
        is_missing = any(text in message.lower() for text in ("not known", "no such image", "not found"))
        return f"there is no image {image} here" if is_missing else f"{image} cannot be inspected: {message}"
    platform, machine = result.stdout.strip(), os.uname().machine
    if platform != (own_platform := f"linux/{ARCHITECTURES.get(machine, machine)}"):
        return f"the image {image} is for {platform}, and this machine is {own_platform}"
    return ""


def engine_environment() -> dict[str, str]:
    """The variables of this process that the engine needs."""
    return {name: os.environ[name] for name in ENGINE_VARIABLES if name in os.environ}


class ContainerSupervisor(supervisor.Supervisor):
    """Answers the worker's messages for one container."""

    _client: subprocess.Popen[bytes]
    """The engine's process, which is attached to the container."""
    _size: subprocess.Popen[bytes] | None
    """The engine's process that counts written bytes."""

    def _open(self, order: dict[str, Any]) -> None:
        """Start the container. Raises ``SandboxError``."""
        self._name = f"asyncrl-sandbox-{secrets.token_hex(8)}"
        runtime = ["--runtime", order["runtime"]] if order["runtime"] else []
        # An option of podman, and of docker's `run`.
        is_podman = os.path.basename(program := engine()) == "podman"
        is_gvisor = os.path.basename(order["runtime"] or "") == "runsc"
        if is_gvisor and order["port"]:
            raise SandboxError("runsc has a network of its own, so the gateway is not in it: set network: none")
        # gVisor's network would need an interface in the container's.
        flags = ["--runtime-flag", "network=none"] if is_gvisor else []
        self._engine = [program, *([*runtime, *flags] if is_podman else [])]
        memory, processes = f"{order['memory_mb']}m", order["processes"] + SPARE_PROCESSES
        arguments = [
            *([] if is_podman else runtime),
            *("--rm", "--interactive", "--name", self._name, "--label", f"asyncrl.run={order['run']}"),
            *("--pull", "never", "--network", "none", "--hostname", "sandbox", "--log-driver", "none"),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(processes)),
            *(word for limit in _limits() for word in ("--ulimit", limit)),
            *("--cap-drop", "ALL", *(word for name in CAPABILITIES for word in ("--cap-add", name))),
            *("--security-opt", "no-new-privileges", "--security-opt", "label=disable"),
            *("--tmpfs", f"{WORK_FOLDER}:rw,exec,nosuid,nodev,mode=1777,size={order['disk_mb']}m"),
            *(word for path in order["readable"] for word in ("--volume", f"{path}:{path}:ro")),
            *("--entrypoint", "/bin/sh", order["image"], "-c", FIRST_PROCESS),
        ]
        self._client = subprocess.Popen(
            [*self._engine, "run", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        if _stream(self._client.stdout).readline() != READY:
            self._client.wait()
            raise SystemExit(1)  # the engine has printed the reason
        inspect = [*self._engine, "inspect", "--format", "{{.State.Pid}}", self._name]
        self._pid = int(subprocess.run(inspect, capture_output=True, check=True).stdout)
        self._cgroups = control_groups(Path(f"/proc/{self._pid}/cgroup").read_text())
        self._check_limits()
        self._disk_bytes = order["disk_mb"] * 2**20
        self._counts, self._size, self._next_size_s = self._limit_counts(), None, 0.0
        with suppress(PermissionError, FileNotFoundError):  # it stays open, because the process may end
            disk = os.open(f"/proc/{self._pid}/root{WORK_FOLDER}", os.O_PATH | os.O_CLOEXEC)
            self._disks = (f"/proc/self/fd/{disk}",)
        if order["port"]:
            self._listen(order["port"])

    def clear(self) -> None:
        """End the container, which is removed with its files."""
        _stream(self._client.stdin).close()
        with suppress(subprocess.TimeoutExpired):
            self._client.wait(EXEC_S)
            return
        subprocess.run([*self._engine, "rm", "--force", self._name], stderr=subprocess.DEVNULL, check=False)

    def _answer(self, action: bytes, fields: list[bytes]) -> list[bytes]:
        """Raises ``EOFError`` if the container has ended."""
        if self._client.poll() is not None:
            raise EOFError("the container has ended")
        if action == b"write":
            self._exec(WRITE_FILE, fields[0], data=fields[1])
            return [b"done"]
        if action == b"read":
            data = self._exec(READ_FILE, fields[0], b"%d" % (work_files.MAX_BYTES + 1))
            if len(data) > work_files.MAX_BYTES:
                raise OSError(errno.EFBIG, f"larger than {work_files.MAX_BYTES >> 20} MiB")
            return [b"done", data]
        return super()._answer(action, fields)

    def _started(self, command: str, environment: dict[str, str], outputs: Sequence[int]) -> int:
        if "\0" in command:
            raise ValueError("embedded null byte")
        # Through standard input: other users of this machine can read the arguments of its processes.
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in environment.items())
        self._counts, self._next_size_s = self._limit_counts(), time.monotonic() + SIZE_INTERVAL_S
        script = file_of((exports + command).encode(errors="surrogateescape"))
        try:
            # One stream is joined inside, because the engine does not keep the order of two.
            line = RUN_COMMAND.replace("ERRORS", "1" if len(outputs) == 1 else "3")
            words = [*self._engine, "exec", "--interactive", self._name, "/bin/sh", "-c", line]
            return supervisor.spawned(words, dict(os.environ), outputs, source=script)
        finally:
            os.close(script)

    def _exceeded(self) -> bytes:
        return self._exceeded_at_end() or (b"disk" if self._written_bytes() > self._disk_bytes else b"")

    def _exceeded_at_end(self) -> bytes:
        return next((limit for limit, count in self._limit_counts().items() if count > self._counts[limit]), b"")

    def _written_bytes(self) -> int:
        """Bytes written outside of the work folder, if the engine has just counted them; it does so now and then."""
        if self._size is None:
            if (now_s := time.monotonic()) >= self._next_size_s:
                self._next_size_s = now_s + SIZE_INTERVAL_S
                words = [*self._engine, "inspect", "--size", "--format", "{{.SizeRw}}", self._name]
                self._size = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        elif self._size.poll() is not None:
            text, _ = self._size.communicate()
            self._size = None
            return int(text) if text.strip().isdigit() else 0
        return 0

    def _end_all(self, pid: int) -> None:
        """Kill processes that the command's shell has not killed. Raises ``EOFError`` if the container has ended."""
        with suppress(OSError):
            _stream(self._client.stdin).write(b"\n")
        process_count = None
        with suppress(OSError, ValueError):  # the kernel may not count them
            process_count = int((self._cgroups["pids"] / "pids.current").read_text())
        if process_count != 1:
            words = [*self._engine, "exec", "--user", "0", self._name, "/bin/sh", "-c", END_PROCESSES]
            subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=EXEC_S, check=False)
        if self._client.poll() is not None:
            raise EOFError("the container has ended")
        with suppress(ChildProcessError):  # it was reaped when it ended
            deadline = time.monotonic() + CLIENT_END_S
            while not os.waitpid(pid, os.WNOHANG)[0]:
                # Nobody reads its output any more, so it may wait for ever.
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                time.sleep(CLIENT_POLL_S)

    def _exec(self, script: str, *words: bytes, data: bytes = b"") -> bytes:
        """Run a script inside; return its output. Raises ``OSError``, and ``EOFError`` if the container has ended."""
        result = subprocess.run(
            [*self._engine, "exec", "--interactive", self._name, "/bin/sh", "-c", script, "sh", *words],
            input=data,
            capture_output=True,
            check=False,
        )
        if result.returncode in (errno.ENOENT, errno.EINVAL):
            reason = "not a file" if result.returncode == errno.EINVAL else os.strerror(errno.ENOENT)
            raise OSError(result.returncode, reason)
        if result.returncode in ENGINE_FAILURES:
            raise EOFError("the container has ended")
        if result.returncode:
            raise OSError(errno.EIO, result.stderr.decode(errors="replace").strip() or "cannot be done")
        return result.stdout

    def _check_limits(self) -> None:
        """Raise ``SandboxError`` if the kernel does not hold the limit on memory."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(KeyError, OSError, ValueError):
                if int((self._cgroups["memory"] / name).read_text()) <= self._memory:
                    return
        raise SandboxError("the engine does not limit memory (as an ordinary user podman needs cgroups v2)")

    def _limit_counts(self) -> dict[bytes, int]:
        """How often each limit was reached."""
        # The file of control groups v2, or of v1.
        memory = (
            _count(self._cgroups["memory"] / name, "oom_kill") for name in ("memory.events", "memory.oom_control")
        )
        return {b"memory": max(memory), b"processes": _count(self._cgroups["pids"] / "pids.events", "max")}

    def _listen(self, port: int) -> None:
        """Listen in the container's network, from a process that enters it. Raises ``SandboxError``."""
        child = os.fork()
        if child == 0:
            try:
                _enter_network(self._pid)
                supervisor.hand_over(self._control, port)
                os._exit(0)
            except OSError as error:
                print(f"the container's network cannot be entered: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            raise SandboxError("the gateway cannot be reached from the container; as an ordinary user, use podman")


def _limits() -> Iterator[str]:
    """Resource limits, none above this process's own: an engine without privileges cannot raise them."""
    for name, limit, resource_type in (
        ("nofile", OPEN_FILES, resource.RLIMIT_NOFILE),
        ("nproc", USER_PROCESSES, resource.RLIMIT_NPROC),
    ):
        own_limit = resource.getrlimit(resource_type)[1]
        value = limit if own_limit == resource.RLIM_INFINITY else min(limit, own_limit)
        yield f"{name}={value}:{value}"


def control_groups(text: str) -> dict[str, Path]:
    """Folders of the control groups that limit a process, by controller. ``text``: its /proc/PID/cgroup."""
    folders: dict[str, Path] = {}
    for line in reversed(text.splitlines()):  # version 2 is the last line, and version 1 has precedence
        _, controllers, path = line.split(":", 2)
        for controller in ("memory", "pids"):
            if controller in controllers.split(","):
                folders[controller] = Path("/sys/fs/cgroup", controller, path.lstrip("/"))
            elif not controllers:  # podman keeps the process one group below the limits
                folders[controller] = Path("/sys/fs/cgroup", path.lstrip("/").removesuffix("/container"))
    return folders


def _count(file: Path, name: str) -> int:
    """A named number in a control group's file; 0 if it is missing."""
    with suppress(OSError):
        fields: Mapping[str, str] = dict(line.split() for line in file.read_text().splitlines())
        return int(fields.get(name, 0))
    return 0


def _enter_network(pid: int) -> None:
    """Move this process into a container's network. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    # An ordinary user owns the user namespace of its containers, and may enter their network from there.
    for name in ("net",) if os.getuid() == 0 else ("user", "net"):
        with open(f"/proc/{pid}/ns/{name}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def main() -> None:
    """Serve the socket at the descriptor in the first argument."""
    try:
        supervisor.main(ContainerSupervisor)
    except SandboxError as error:
        sys.exit(str(error))
