"""Checks nodes that join the cluster during a run, before an actor of the run starts there.

All other nodes were checked before the run began. A node that fails is reported, and the run does not use it: Ray is
asked for resources on other nodes (placement.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path

from asyncrl_cli.checks.finding import Status
from asyncrl_cli.checks.hosts.examine import examine, hosts_for
from asyncrl_cli.core.errors import UserError
from asyncrl_cli.orchestrator.nodes import live_nodes
from asyncrl_cli.spec.sections import ExperimentSpec


class Newcomers:
    """Implements ``placement.Examiner``."""

    def __init__(
        self,
        spec: ExperimentSpec,
        replica_bytes: int,
        folder: Path,
        rank_nodes: Callable[[], Collection[str]],
        note: Callable[[str, str, str], Awaitable[None]],
        warn: Callable[[str], None],
    ) -> None:
        """Treat all nodes that are in the cluster now as examined.

        ``replica_bytes`` is the size of a weight version. Other arguments: as for ``placement.ExaminerFactory``.
        """
        self._spec = spec
        self._folder = folder
        self._replica_bytes = replica_bytes
        self._rank_nodes = rank_nodes
        self._note = note
        self._warn = warn
        self._good = {node.node_id for node in live_nodes()}
        self._bad: set[str] = set()
        self._lock = asyncio.Lock()

    @property
    def avoided(self) -> frozenset[str]:
        """The ids of nodes that must not be used."""
        return frozenset(self._bad)

    async def usable(self, nodes: Collection[str]) -> bool:
        """Return True if the run's actors may start on all of these nodes. New nodes are examined one after another."""
        if self._good.issuperset(nodes):
            return True
        async with self._lock:  # two actors that want the same new node wait for one examination
            for node in dict.fromkeys(nodes):
                if node in self._bad or (node not in self._good and not await self._examine(node)):
                    return False
        return True

    async def _examine(self, node: str) -> bool:
        driver_node = _driver_node()
        run_nodes = {driver_node, *self._rank_nodes()}
        hosts = [
            # The other hosts already have their weights in memory, so they need no further room.
            host if host.node_id == node else replace(host, share=0.0)
            for host in hosts_for(self._spec, await asyncio.to_thread(live_nodes), driver_node)
            if host.node_id in {node, *run_nodes}
        ]
        name = next((host.name for host in hosts if host.node_id == node), None)
        if name is None:
            return True  # it has left already, and Ray finds another node
        try:
            findings = await examine(hosts, self._folder, self._replica_bytes, newcomer=name)
        except UserError as error:  # a problem of the driver's host, such as a full disk
            self._warn(f"{name} has joined, and could not be examined: {error.message}")
            return True
        for finding in findings:
            if finding.status is Status.WARNING:
                self._warn(f"{name} has joined: {finding}")
        failures = [finding for finding in findings if finding.status is Status.FAILURE]
        if not failures:
            self._good.add(node)
            return True
        self._bad.add(node)
        reason = "; ".join(f"{finding.check}: {finding.found} ({finding.hint})" for finding in failures)
        await self._note("hosts", name, f"the run does not use this host: {reason}")
        return False


def _driver_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
