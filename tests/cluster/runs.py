"""Runs of `asyncrl` over a test's hosts. The commands run on the head, where a user would enter them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Host, children, until
from tests.cluster.ray_cluster import RayCluster
from tests.e2e.conftest import Runs
from tests.e2e.faults.disturbed import DisturbedRun

OF_EVERY_NODE = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Titles of Ray's processes on every node, with or without a run."""


@dataclass(frozen=True)
class HostedRuns(Runs):
    """A runs folder on the hosts' shared file system, with commands that run on the head."""

    cluster: RayCluster

    def command(self, *arguments: str | Path) -> list[str]:
        return self.cluster.head.entering(*super().command(*arguments))

    def write_spec(self, **sections: Any) -> Path:
        """The base spec for this cluster: ranks on hosts with the label role=trainer, engines on role=rollout."""
        placed = {
            "address": self.cluster.address,
            "trainer": {"labels": {"role": "trainer"}},
            "engines": {"labels": {"role": "rollout"}},
        }
        return super().write_spec(**{"cluster": placed} | sections)


@dataclass(slots=True)
class HostedRun(DisturbedRun):
    """A disturbed run with its driver on the head."""

    @property
    def pid(self) -> int:
        """The driver's process id, not the id of the command that entered the host."""
        assert self._process is not None
        entered = self._process.pid
        return until(lambda: next(iter(children(entered)), 0) or self.code is not None, "the driver's process")

    @property
    def mark(self) -> str:
        """Runs in a joined cluster have no mark."""
        return ""

    def living(self) -> list[int]:
        """The run's processes on any host: actors, and processes that they started."""
        return [pid for host in self._hosts() for title in ("ray::", "VLLM::") for pid in _of_run(host, title)]

    def _hosts(self) -> list[Host]:
        assert isinstance(self.runs, HostedRuns)
        return [host for host in self.runs.cluster.network.hosts.values() if host.alive]


def _of_run(host: Host, title: str) -> list[int]:
    others = {pid for own in OF_EVERY_NODE for pid in host.processes_titled(own)}
    return [pid for pid in host.processes_titled(title) if pid not in others]
