"""Each test host behaves like a separate machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, HostError, Network, until

pytestmark = pytest.mark.slow


@pytest.fixture
def two(network: Network) -> tuple[Host, Host]:
    return network.host("first"), network.host("second")


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
    return host.python(INTERFACE, address).strip()
