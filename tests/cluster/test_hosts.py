"""Each test host behaves like a separate machine, and leaves nothing when it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.hosts import ROOT, Host, HostError, Network, until

SERVER = """
import socket
server = socket.create_server(("", 7000))
print("listening", flush=True)
while True:
    with server.accept()[0] as peer:
        while peer.recv(1 << 16):
            pass
"""
CONNECTS = "import socket; socket.create_connection(('{0}', 7000), {1}).sendall(b'x'); print('connected')"


pytestmark = pytest.mark.slow


@pytest.fixture
def two(network: Network) -> tuple[Host, Host]:
    """Two hosts; a server listens on the second."""
    first, second = network.host("first"), network.host("second")
    server = second.start(sys.executable, "-c", SERVER)
    until(lambda: "listening" in server.printed(), "the server")
    return first, second


def connects(one: Host, other: Host, seconds: float = 60) -> bool:
    """True if a connection is made in time."""
    try:
        return "connected" in one.python(CONNECTS.format(other.name, seconds))
    except HostError:
        return False


def test_a_host_has_its_own_memory_files_processes_and_name(two: tuple[Host, Host], network: Network) -> None:
    first, second = two
    first.run("sh", "-c", "hostname > /tmp/mine; echo 1 > /dev/shm/mine; hostname > shared")
    assert second.run("sh", "-c", "cat shared; hostname") == "first\nsecond\n"
    assert "No such file" in second.run("ls", "/tmp/mine", check=False)
    assert not Path("/dev/shm/mine").exists()
    assert first.run("cat", "/proc/1/comm") == second.run("cat", "/proc/1/comm")
    assert set(first.processes()).isdisjoint(second.processes())
    assert (network.folder / "shared").read_text() == "first\n"


def test_a_mapping_of_one_host_cannot_be_opened_on_another(two: tuple[Host, Host]) -> None:
    """Engines map the weights through /proc: if hosts shared it, tests could pass with wrong code."""
    first, second = two
    code = "import os, time; fd = os.memfd_create('w'); os.write(fd, b'weights'); print(os.getpid(), fd, flush=True)"
    holds = first.start(sys.executable, "-c", f"{code}; time.sleep(600)")
    pid, descriptor = until(lambda: holds.printed().split(), "the mapping")
    path = f"/proc/{pid}/fd/{descriptor}"
    assert first.run("cat", path) == "weights"
    assert second.run("cat", path, check=False).startswith("cat: ")


def test_a_killed_host_takes_its_processes_along_and_comes_back_empty(two: tuple[Host, Host]) -> None:
    first, second = two
    second.run("touch", "/tmp/mine")
    inside = second.processes()
    assert connects(first, second)
    second.kill()
    assert not second.alive
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]
    assert not connects(first, second, 1)
    second.boot()
    assert "No such file" in second.run("ls", "/tmp/mine", check=False)
    second.start(sys.executable, "-c", SERVER)
    until(lambda: connects(first, second), "the host that came back")


MAKES_HOSTS = """
import sys, time
from pathlib import Path
from tests.cluster.hosts import Network
with Network(Path(sys.argv[1])) as network:
    host = network.host("lonely")
    host.start("sleep", "600")
    host.partition()
    print(*host.processes(), network._switch.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_hosts_end_with_their_killed_creator_and_leave_nothing(network: Network, number: int) -> None:
    def left() -> list[str]:
        """Mounts of the hosts' folder, and network links with the hosts' names."""
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        mounts = Path("/proc/self/mounts").read_text()
        names = (line.split(":")[1].strip().partition("@")[0] for line in links.splitlines())
        ours = [name for name in names if name in ("switch", "lonely")]
        return ours + [line for line in mounts.splitlines() if str(network.folder) in line]

    assert left() == []
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKES_HOSTS, str(network.folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) >= 3
    maker.send_signal(number)
    maker.wait()
    until(lambda: not any(map(_lives, pids)), "the end of what a killed process made")
    assert left() == []


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


INTERFACE = "import sys; from asyncrl_cli.system.network import interface_to; print(interface_to(sys.argv[1]))"


def test_the_interface_is_the_one_that_leads_to_the_other_host(network: Network) -> None:
    here, there = network.host("here"), network.host("there")
    for command in (
        "ip link add docker0 type bridge",
        "ip addr add 10.9.9.1/24 dev docker0",
        "ip link set docker0 up",
        "ip route replace default dev docker0",
    ):
        here._configure(command)
    assert interface(here, "127.0.0.1") == "lo"
    assert interface(here, here.address) == "eth0"
    assert interface(here, there.address) == "eth0"
    assert interface(here, "192.0.2.1") == "docker0"
    here._configure("ip route delete default")
    with pytest.raises(HostError, match=r"this host has no route to 192\.0\.2\.1"):
        interface(here, "192.0.2.1")


def interface(host: Host, address: str) -> str:
    """The interface through which a host reaches an address."""
    return host.python(INTERFACE, address).strip()
