"""Trainer ranks on several hosts use the right interface, and train the same weights as on one host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster import train_on_hosts
from tests.cluster.hosts import Host, HostError, Network
from tests.cluster.ray_cluster import RayCluster

pytestmark = pytest.mark.slow

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


# test_runs.py compares the results of such ranks bit for bit; tests/orchestrator/test_placement.py tests packing.
@pytest.mark.stack
@pytest.mark.nightly
def test_two_ranks_on_two_hosts_train_the_weights_of_two_ranks_on_one(ray_cluster: RayCluster) -> None:
    head, other = ray_cluster.hosts(head=2, other=1)
    addresses, one_host = trained(ray_cluster, held=0)
    assert addresses == [head.address, head.address], "they are packed"
    addresses, two_hosts = trained(ray_cluster, held=1)
    assert addresses == [head.address, other.address]
    assert one_host == two_hosts


def trained(cluster: RayCluster, held: int) -> tuple[list[str], bytes]:
    """All ranks' addresses, in order, and the trained weights. ``held``: number of the head's CPUs in use."""
    folder = cluster.network.folder / f"held-{held}"
    program = Path(train_on_hosts.__file__)
    output = cluster.head.run(sys.executable, program, cluster.address, folder, str(held), seconds=200)
    return json.loads(output.splitlines()[-1]), (folder / "model" / "model.safetensors").read_bytes()
