"""Host agents without Ray, memory or network. Weights are arbitrary values, and a rank's shard is one chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from stand_ins import Actor, Notes, remote

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.replicas import Replicas
from asyncrl_cli.system.supervised_actor import RestartBudget
from asyncrl_cli.weights.layout import TensorSlot
from asyncrl_cli.weights.manifest import Endpoint, Manifest, Pulled, PullFailed, ReplicaGone

Shards = dict[int, Any]
"""Each rank's data, by rank."""


def layout(ranks: int) -> tuple[TensorSlot, ...]:
    """One tensor with one number for each rank."""
    return (TensorSlot("weight", "float32", (ranks,), 0, 4),)


def checksum(shards: Iterable[Any]) -> str:
    """The checksum of a version with these shards."""
    digests = tuple(map(digest, shards))
    return Manifest(0, layout(len(digests)), len(digests), digests).checksum


def digest(shard: Any) -> str:
    """The stand-in for a chunk's digest."""
    return f"digest of {shard!r}"


class StandInAgent(Actor):
    """Has at most two versions. Pulls fetch missing chunks while ``may_fetch`` is set; ``works`` is called at every
    call."""

    def __init__(self, hosts: StandInHosts, node: str) -> None:
        super().__init__()
        self._hosts = hosts
        self._node = node
        self.versions: dict[str, tuple[int, dict[int, str]]] = {}  # by path: the version, and the digests by rank
        self.may_fetch = asyncio.Event()
        self.may_fetch.set()
        self._written = ""  # the last path for ranks

    @remote
    async def start(self, slots: tuple[TensorSlot, ...], ranks: int, token: str, address: str) -> Endpoint:
        assert slots == layout(ranks)
        return Endpoint(self._node, address)

    @remote
    async def begin(self, version: int, keep: Manifest | None, ranks: Sequence[int]) -> str:
        await self._hosts.works(self)
        self._written = self._new(version, None if keep is None else self._having(keep, 1))
        return self._written

    @remote
    async def digest(self, version: int, ranks: Sequence[int]) -> dict[int, str]:
        await self._hosts.works(self)
        if self.versions.get(self._written, (None, {}))[0] != version:
            raise RunError(f"weight version {version} is not being written on this host")
        shards = self._hosts.memory[self._written]
        found = {rank: digest(shards[rank]) for rank in ranks}
        self.versions[self._written][1].update(found)
        return found

    @remote
    async def pull(self, manifest: Manifest, holders: Sequence[Endpoint], timeout_s: float) -> Pulled:
        await self._hosts.works(self)
        if (path := self._having(manifest, manifest.ranks)) is not None:
            return Pulled(path)
        await self.may_fetch.wait()
        path = self._having(manifest, 1) or self._new(manifest.version, max(self.versions, default=None))
        for rank, wanted in enumerate(manifest.digests):
            if self.versions[path][1].get(rank) != wanted:
                shard = next(self._hosts.lent(holders, manifest, rank), None)
                if shard is None:
                    raise PullFailed(f"no host has chunk {rank} of version {manifest.version}")
                self._hosts.memory[path][rank] = shard
                self.versions[path][1][rank] = wanted
        return Pulled(path, fetched_bytes=1, seconds=0.5)

    @remote
    async def report(self) -> dict[str, Any]:
        return {}

    def die(self) -> None:
        super().die()
        for path in self.versions:
            del self._hosts.memory[path]
        self.versions = {}

    def _having(self, manifest: Manifest, chunks: int) -> str | None:
        """The path of a version, if this host has at least this many of its chunks."""
        for path, (version, digests) in self.versions.items():
            same = sum(manifest.digests[rank] == found for rank, found in digests.items())
            if version == manifest.version and same >= chunks:
                return path
        return None

    def _new(self, version: int, kept: str | None) -> str:
        for path in self.versions.keys() - {kept}:
            del self.versions[path], self._hosts.memory[path]
        self._hosts.paths += 1
        path = f"{self._hosts.paths:09}"
        self.versions[path], self._hosts.memory[path] = (version, {}), {}
        return path


class StandInHosts:
    """The hosts' memory by path, the agents by node, and the lost nodes."""

    def __init__(self, budget: RestartBudget | None = None) -> None:
        self.gone: set[str] = set()
        self.memory: dict[str, Shards] = {}
        self.agents: dict[str, list[StandInAgent]] = {}
        self.paths = 0
        self.works: Callable[[StandInAgent], Awaitable[None]] = _at_once
        self.replicas = Replicas(self._make, str, budget or Notes().budget(1000), why_gone=self._why_gone)

    def write(self, path: str, rank: int, shard: Any) -> None:
        """A rank writes its shard. Raises ``ReplicaGone``."""
        if path not in self.memory:
            raise ReplicaGone("the memory is gone")
        self.memory[path][rank] = shard

    def agent(self, node: str) -> StandInAgent:
        """A node's newest agent."""
        return self.agents[node][-1]

    def lent(self, holders: Sequence[Endpoint], manifest: Manifest, rank: int) -> Iterator[Any]:
        """A rank's shard from every holder that has it."""
        for holder in holders:
            agent = self.agent(holder.node_id)
            for path, (version, digests) in agent.versions.items():
                if version == manifest.version and digests.get(rank) == manifest.digests[rank]:
                    yield self.memory[path][rank]

    def lose(self, node: str) -> None:
        """Kill a node with its agent."""
        self.gone.add(node)
        if node in self.agents:
            self.agent(node).die()

    def _why_gone(self, node: str) -> str:
        return "its node is gone" if node in self.gone else ""

    def _make(self, name: str, node: str) -> StandInAgent:
        if node in self.gone:
            raise RunError("ActorUnschedulableError: the node is gone")
        self.agents.setdefault(node, []).append(StandInAgent(self, node))
        return self.agent(node)


async def _at_once(agent: StandInAgent) -> None:
    pass
