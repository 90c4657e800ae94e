"""A Ray cluster over test hosts, with a node on each host, token authentication and pinned ports.

ray = RayCluster(network)
head, other = ray.hosts(head=2, other=1)
head.python("import ray; ray.init(address='auto')")
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from tests.cluster.hosts import Command, Host, HostError, Network, until

NODES = """
import sys
from ray._raylet import GcsClient
from ray.core.generated.gcs_pb2 import GcsNodeInfo
for node in GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10).values():
    if node.state == GcsNodeInfo.ALIVE:
        print("node", node.node_manager_address, node.node_id.hex())
"""
"""Asks the head without joining the cluster: this takes a tenth of the time, and starts no worker."""


@dataclass(slots=True)
class RayCluster:
    """Ray on the hosts of a network. The first host has the head node."""

    network: Network
    commands: dict[str, Command] = field(default_factory=dict)

    def __post_init__(self) -> None:
        token = self.network.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.network.variables |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "300",  # several nodes start at the same time
            # setproctitle would overwrite the environment, where tests look for marks of processes.
            "SPT_NOENV": "1",
        }

    @property
    def head(self) -> Host:
        return next(iter(self.network.hosts.values()))

    @property
    def address(self) -> str:
        """The value of `cluster.address` in a spec."""
        return f"{self.head.address}:6379"

    def host(self, name: str, cpus: float = 1, labels: dict[str, str] | None = None) -> Host:
        """A new host with a node of the cluster. The first one gets the head node."""
        host = self.network.host(name)
        self.start(host, cpus, labels)
        self.wait_for(host)
        return host

    def hosts(self, **cpus: float) -> list[Host]:
        """New hosts by name, each with a node of this many CPUs. They start in parallel."""
        hosts = [self.network.host(name) for name in cpus]
        for host in hosts:
            self.start(host, cpus[host.name])
        self.wait_for(*hosts)
        return hosts

    def start(self, host: Host, cpus: float = 1, labels: dict[str, str] | None = None) -> None:
        """Start Ray's node on a host, without waiting for it. Its labels are ``host=NAME`` and ``labels``.

        Ports are fixed, as in the launch templates; every host has its own address.
        """
        where = [f"--address={self.address}"]
        if host is self.head:
            where = ["--head", "--port=6379", "--include-dashboard=false"]
        shown = ",".join(f"{key}={value}" for key, value in ({"host": host.name} | (labels or {})).items())
        self.commands[host.name] = host.start(
            *("ray", "start", "--block", *where, f"--node-ip-address={host.address}"),
            *(f"--num-cpus={cpus:g}", "--num-gpus=0", f"--labels={shown}"),
            *("--temp-dir=/tmp/ray", f"--object-store-memory={100 * 2**20}"),
            *("--node-manager-port=6380", "--object-manager-port=6381", "--runtime-env-agent-port=6382"),
            *("--dashboard-agent-grpc-port=6383", "--dashboard-agent-listen-port=6384"),
            *("--metrics-export-port=6385", "--min-worker-port=10002", "--max-worker-port=10200"),
        )

    def wait_for(self, *hosts: Host) -> None:
        """Wait until the cluster has a living node on each of these hosts. Raises ``HostError``."""
        for host in hosts:

            def started(command: Command = self.commands[host.name], name: str = host.name) -> bool:
                if command.code is not None:
                    raise HostError(f"Ray ended on {name}\n{command.printed()[-3000:]}")
                return "Ray runtime started" in command.printed()

            until(started, f"Ray to start on {host.name}")
        # Not earlier: each query is a process that imports Ray, and would delay the starting nodes.
        until(lambda: {host.address for host in hosts} <= set(self.nodes()), "Ray's nodes")

    def ended(self, host: Host) -> bool:
        """True if Ray's node on a host has ended, or was never started."""
        command = self.commands.get(host.name)
        return command is None or command.code is not None

    def nodes(self) -> dict[str, str]:
        """The ids of the living nodes, by address. Empty while the head starts."""
        answer = self.head.python(NODES, self.address, check=False)
        return dict(line.split()[1:] for line in answer.splitlines() if line.startswith("node "))
