"""Hosts on one machine. Like machines, each has its own network, processes, /tmp, /dev/shm, IPC and name.

    with Network(folder) as network:
        one, other = network.host("one"), network.host("other")
        one.run("sh", "-c", "hostname > /dev/shm/mine")
        other.kill()

A host consists of unnamed namespaces, which exist as long as its first process. The switch between the hosts is
another namespace. When the process that created them ends, for any reason, the kernel kills them with SIGKILL. So
nothing remains, and the machine's network is neither used nor changed.

``folder`` is the hosts' shared file system, with the same path on every host and outside. All else below /tmp and
/dev/shm belongs to one host and is lost with it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUBNET = "10.213.77"
"""The hosts' addresses, which exist only in these namespaces."""
COMMAND_S = 300.0
"""Seconds that a command or a change of a host may take. It only ends what hangs."""

SWITCH = "ip link add switch type bridge && ip link set switch up && echo ready && exec sleep infinity"
FIRST_PROCESS = """
import os, time
print("ready", flush=True)
while True:  # orphaned processes become children of this one
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""


class HostError(Exception):
    """A command that creates, changes or queries a host has failed."""


@cache
def why_not() -> str | None:
    """The reason why this machine cannot have hosts; None if it can."""
    limit = "tc qdisc add dev veth0 root tbf rate 5mbps burst 128kb latency 1s"
    probe = f"ip link add veth0 type veth peer name veth1 && {limit}"
    try:
        found = subprocess.run(
            [*_unshared("--net", "--mount", "--pid", "--ipc", "--uts", "--mount-proc"), "sh", "-c", probe],
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
    except FileNotFoundError as error:
        return f"test hosts need {error.filename} (util-linux, iproute2)"
    if found.returncode:
        return f"test hosts need namespaces, and root to make them: {found.stderr.strip().splitlines()[-1:]}"
    return None


def until(condition: Callable[[], Any], what: str, seconds: float = COMMAND_S) -> Any:
    """The first true answer. Raises ``HostError`` if there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.05)
    raise HostError(f"waited {seconds:.0f} s for {what}")


@dataclass(slots=True)
class Command:
    """A command that runs on a host. Its output goes to ``output``."""

    argv: tuple[str, ...]
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def pid(self) -> int:
        """The command's process id outside the host's namespaces (not the id of nsenter)."""
        found: int = until(lambda: next(iter(children(self.process.pid)), 0), f"the process of {self.argv[0]}")
        return found

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with suppress(ProcessLookupError, HostError):
            if self.code is None:
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> int:
        """Wait for its exit code. Raises ``HostError`` if it does not end in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise HostError(
                f"{shlex.join(self.argv)} still runs after {seconds:.0f} s\n{self.printed()[-3000:]}"
            ) from None


@dataclass(slots=True)
class Host:
    """One host. ``index`` is the last part of its address."""

    network: Network
    name: str
    index: int
    shell: subprocess.Popen[bytes] | None = None
    pid: int = 0
    commands: int = 0

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.index}"

    @property
    def card(self) -> str:
        """The MAC address of its network card, the same after a restart."""
        return f"02:00:00:00:00:{self.index:02x}"

    @property
    def alive(self) -> bool:
        return self.shell is not None and self.shell.poll() is None

    # -- on and off

    def boot(self) -> None:
        """Turn it on. A killed host starts as at first, without other processes."""
        if self.alive:
            raise HostError(f"{self.name} is on")
        network = self.network
        self.shell = subprocess.Popen(
            [
                *_unshared("--net", "--mount", "--pid", "--ipc", "--uts", "--mount-proc"),
                *network.environment({}),
                *("sh", "-ec", self._boot_script()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(network.folder / f"{self.name}.boot").open("ab"),
        )
        _await_ready(self.shell, self.name)
        (self.pid,) = children(self.shell.pid)
        network.at_switch(f"ip link add {self.name} type veth peer name eth0 netns {self.pid}")
        network.at_switch(f"ip link set {self.name} master switch up")
        self._configure(f"ip link set eth0 address {self.card}")
        self._configure("ip link set lo up")
        self._configure(f"ip addr add {self.address}/24 dev eth0")
        self._configure("ip link set eth0 up")
        # Libraries ask for the interface of the default route.
        self._configure("ip route add default dev eth0")

    def kill(self, *, silent: bool = False) -> None:
        """Kill it with all its processes. ``silent``: without resetting its connections, like a power failure."""
        if silent:
            self.partition()
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        shell = self.shell
        if shell is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)  # the kernel kills a pid namespace's processes with its first process
        shell.wait(COMMAND_S)
        # A host with the same name may start soon; the kernel itself would remove the link only later.
        self.network.at_switch(f"ip link delete {self.name}", check=False)
        self.shell, self.pid = None, 0

    def _boot_script(self) -> str:
        network = self.network
        kept = " ".join(shlex.quote(str(path)) for path in network.kept)
        # Shared folders below /tmp are mounted at a temporary place first, then in the host's own /tmp.
        return f"""
            mount -t tmpfs shm /dev/shm
            mkdir /dev/shm/moved
            n=0; for path in {kept}; do
                n=$((n+1)); mkdir /dev/shm/moved/$n; mount --bind "$path" /dev/shm/moved/$n
            done
            mount -t tmpfs tmp /tmp; chmod 1777 /tmp /dev/shm
            n=0; for path in {kept}; do
                n=$((n+1)); mkdir -p "$path"; mount --move /dev/shm/moved/$n "$path"; rmdir /dev/shm/moved/$n
            done
            rmdir /dev/shm/moved
            mount --bind {shlex.quote(str(network.names))} /etc/hosts
            mount --bind /dev/null /etc/resolv.conf
            hostname {self.name}
            exec {shlex.quote(sys.executable)} -IS -c {shlex.quote(FIRST_PROCESS)}
        """

    # -- its disk

    def fill_disk(self) -> None:
        """Leave no free byte in its /tmp, apart from shared folders."""
        used = self.run("df", "--block-size=1K", "--output=used", "/tmp").split()[-1]
        self.run("mount", "--options", f"remount,size={used}K", "/tmp")

    def free_disk(self) -> None:
        self.run("mount", "--options", "remount,size=50%", "/tmp")

    # -- its network

    def partition(self) -> None:
        """Cut it off from all other hosts. Connections stay open."""
        self.network.at_switch(f"ip link set {self.name} down")

    def heal(self) -> None:
        self.network.at_switch(f"ip link set {self.name} up")

    def slow(self, bytes_per_second: int) -> None:
        """Limit sent and received bytes per second, each to this number."""
        limit = f"root tbf rate {bytes_per_second}bps burst 128kb latency 1s"
        self.network.at_switch(f"tc qdisc replace dev {self.name} {limit}")
        self._configure(f"tc qdisc replace dev eth0 {limit}")

    def fast(self) -> None:
        self.network.at_switch(f"tc qdisc delete dev {self.name} root", check=False)
        if self.alive:
            self._configure("tc qdisc delete dev eth0 root", check=False)

    def lose(self, other: Host) -> None:
        """Drop packets to another host silently. The opposite direction and other hosts are not affected."""
        self._configure(f"ip neigh replace {other.address} lladdr 02:00:00:00:00:99 dev eth0 nud permanent")

    def find(self, other: Host) -> None:
        self._configure(f"ip neigh replace {other.address} lladdr {other.card} dev eth0 nud reachable")

    def _configure(self, command: str, *, check: bool = True) -> None:
        _call(["nsenter", "--target", str(self.pid), "--net", *command.split()], check=check)

    # -- commands

    def entering(self, *argv: str, **environment: str) -> list[str]:
        """The start of a command line that runs a command on the host. Raises ``HostError``."""
        if not self.alive:
            raise HostError(f"{self.name} is off")
        namespaces = ("--net", "--mount", "--pid", "--ipc", "--uts")
        folder = f"--wdns={self.network.folder}"
        return [
            "nsenter",
            "--target",
            str(self.pid),
            *namespaces,
            folder,
            *self.network.environment(environment),
            *argv,
        ]

    def start(self, *argv: str | Path, **environment: str) -> Command:
        """Start a command on it, in the shared folder. It ends with the host."""
        self.commands += 1
        output = self.network.folder / f"{self.name}-{self.commands}.out"
        words = tuple(map(str, argv))
        with output.open("wb") as stream:
            process = subprocess.Popen(
                self.entering(*words, **environment), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
            )
        return Command(words, process, output)

    def run(self, *argv: str | Path, seconds: float = COMMAND_S, check: bool = True, **environment: str) -> str:
        """Run a command on it to its end; returns the output. Raises ``HostError`` if it fails."""
        command = self.start(*argv, **environment)
        try:
            code = command.wait(seconds)
        except HostError:
            command.signal(signal.SIGKILL)
            raise
        if check and code:
            raise HostError(f"{shlex.join(command.argv)} on {self.name}: exit {code}\n{command.printed()[-3000:]}")
        output = command.printed()
        command.output.unlink()
        return output

    def python(self, code: str, *argv: str, **settings: Any) -> str:
        return self.run(sys.executable, "-c", code, *argv, **settings)

    def processes(self) -> list[int]:
        """Its processes' ids outside the host's namespaces, in ascending order."""
        try:
            namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        except OSError:
            return []
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(entry / "ns/pid") == namespace:
                    found.append(int(entry.name))
        return sorted(found)

    def processes_titled(self, title: str) -> list[int]:
        """The processes with a command line that begins with ``title``."""
        return [pid for pid in self.processes() if _title(pid).startswith(title)]


@dataclass(slots=True)
class Network:
    """Hosts in one network. A context manager, which turns off all hosts at its exit.

    Args:
        folder: the hosts' shared file system. It must exist.
        kept: other folders below /tmp that every host has at the same path.
        variables: environment variables for every process on a host.
    """

    folder: Path
    kept: list[Path] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    _switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        self.folder = self.folder.resolve()
        wanted = [self.folder, ROOT, Path(sys.prefix).resolve(), *self.kept]
        self.kept = sorted({path for path in wanted if path.is_relative_to("/tmp")})
        self.names.write_text("127.0.0.1 localhost\n")
        self._switch = subprocess.Popen(
            [*_killed_with_us(), "unshare", "--net", "sh", "-c", SWITCH],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        _await_ready(self._switch, "switch")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.kill()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()

    @property
    def names(self) -> Path:
        """The file that is every host's /etc/hosts."""
        return self.folder / "names"

    def environment(self, more: Mapping[str, str]) -> list[str]:
        """The start of a command line that sets the environment of processes on a host."""
        path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
        settings = {"PYTHONPATH": str(ROOT), "PATH": path, "COLUMNS": "120", **self.variables, **more}
        without = [word for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "TMPDIR") for word in ("-u", name)]
        return ["env", *without, *(f"{name}={value}" for name, value in settings.items())]

    def at_switch(self, command: str, *, check: bool = True) -> None:
        """Run a command in the switch's network namespace. Raises ``HostError``."""
        assert self._switch is not None
        _call(["nsenter", "--target", str(self._switch.pid), "--net", *command.split()], check=check)

    def host(self, name: str) -> Host:
        """Start a new host. ``name``: at most 15 letters and digits, because it names an interface."""
        host = Host(self, name, len(self.hosts) + 1)
        with self.names.open("a") as names:
            names.write(f"{host.address} {name}\n")
        host.boot()
        self.hosts[name] = host
        return host


def _killed_with_us() -> list[str]:
    # Start hosts in the main thread: the kernel sends the signal when the thread that started the process ends.
    return ["setpriv", "--pdeathsig", "KILL"]


def _unshared(*namespaces: str) -> list[str]:
    return [*_killed_with_us(), "unshare", *namespaces, "--fork", "--kill-child"]


def _await_ready(process: subprocess.Popen[bytes], name: str) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        process.kill()
        raise HostError(f"{name} does not start: exit {process.wait()}")


def _call(command: list[str], *, check: bool) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMMAND_S)
    if check and done.returncode:
        raise HostError(f"{shlex.join(command)}: {done.stderr.strip()}")


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
