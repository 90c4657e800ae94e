"""The driver's side of the host agents: one runs on each node with a trainer rank or an engine, and is restarted.

An agent owns the memory that holds weight versions on its host (``weights/replica.py``, decision 0038). When it dies,
this memory is lost, and it restarts empty. An engine's host then pulls the version from other hosts; parts that no host
has any more are written again by the trainer. Like an engine (engine_pool.py), an agent that is lost together with its
node is not restarted, and does not count as a restart.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.nodes import why_lost
from asyncrl_cli.orchestrator.trainers import TrainerLost, TrainerRanks
from asyncrl_cli.records.training import Probe
from asyncrl_cli.system.remote import START_TIMEOUT_S, ActorDied, ActorLost, Unreachable, seconds_for, wait_for
from asyncrl_cli.system.supervised_actor import RestartBudget, SupervisedActor
from asyncrl_cli.weights.layout import TensorSlot, size_of
from asyncrl_cli.weights.manifest import Endpoint, Manifest, Pulled, PullFailed, ReplicaGone, Superseded

CALL_S = 120.0
"""Seconds that an agent may take for a call that does not depend on other hosts, besides the time for its bytes."""
PULL_S = 600.0
"""Seconds after which a pull is restarted; it keeps the chunks that it already has."""
PEERS = 16
"""Number of hosts without ranks that a host asks for chunks."""
LOOK_S = 10.0
"""Seconds within which an agent must answer a ping."""


class AgentLost(RunError):
    """An agent died or did not answer, and the versions in its memory are lost; the next call starts another agent."""


class HostGone(RunError):
    """An agent is lost together with its node, and is not replaced."""


@dataclass(slots=True, eq=False)
class _Agent:
    """The agent of one node. ``held``: the ranks whose shards it has, by version and checksum. ``gone``: why it is not
    replaced, if it is lost with its node."""

    node: str
    process: SupervisedActor
    gone: str = ""
    endpoint: Endpoint | None = None
    held: dict[tuple[int, str], frozenset[int]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A version that the ranks have written into the replicas of their hosts.

    ``nodes`` are the nodes of the ranks, in rank order. ``losses``: how many agents had been lost before.
    """

    version: int
    probe: Probe
    nodes: tuple[str, ...]
    seconds: float
    losses: int


class Replicas:
    """The host agents of one run.

    Attributes:
        losses: how many agents were lost so far.
    """

    def __init__(
        self,
        make: Callable[[str, str], Any],
        address_of: Callable[[str], str],
        budget: RestartBudget,
        why_gone: Callable[[str], str] = lambda _: "",
    ) -> None:
        """``make(name, node)`` creates an agent on a node, ``address_of(node)`` is the address at which it serves.
        ``why_gone(node)``: why an actor there is lost with the node."""
        self._make = make
        self._why_gone = why_gone
        self._address_of = address_of
        self._budget = budget
        self._token = secrets.token_hex(32)
        self._agents: dict[str, _Agent] = {}
        self._slots: tuple[TensorSlot, ...] = ()
        self._ranks = 0
        self._writers: tuple[str, ...] = ()
        self.losses = 0

    def expect(self, node: str) -> None:
        """Request the agent of a node, so that its process starts in parallel with others."""
        self._agent(node).process.ask()

    def keep(self, nodes: Collection[str]) -> None:
        """End the agents of all other nodes."""
        for node in self._agents.keys() - set(nodes):
            self._agents.pop(node).process.kill()

    async def write(self, ranks: TrainerRanks, version: int, keep: Manifest | None = None) -> Written:
        """Have every rank write its shard of ``version``; ``keep`` is the version that engines serve.

        It is written again when an agent dies meanwhile. Raises ``TrainerLost``.
        """
        self._slots = self._slots or await ranks.layout()
        self._ranks = len(ranks.nodes)
        while True:
            losses, nodes = self.losses, ranks.nodes
            self._writers = nodes
            own = _ranks_by_node(nodes)
            begin = [self._call(node, "begin", version, keep, its_ranks) for node, its_ranks in own.items()]
            try:
                paths = dict(zip(own, await _all(begin), strict=True))
                started = time.monotonic()
                probe = await ranks.write(version, [paths[node] for node in nodes])
                return Written(version, probe, nodes, time.monotonic() - started, losses)
            except ReplicaGone:
                await self._look()
                if self.losses == losses:  # no agent has died: it would fail again
                    raise
            except RunError as error:
                # A lost host has no ranks any more, and Ray starts no agent there (decision 0038).
                await ranks.check()
                if isinstance(error, HostGone):
                    raise TrainerLost(error.location, error.message) from error  # its ranks are lost, too
                if not isinstance(error, AgentLost):
                    raise

    async def manifest(self, written: Written) -> Manifest:
        """The written version's digests. Raises ``AgentLost`` when a part of it is gone."""
        own = _ranks_by_node(written.nodes)
        agents = [self._agent(node) for node in own]
        try:
            parts = await _all([self._call(node, "digest", written.version, own[node]) for node in own])
        except RunError as error:
            if self.losses == written.losses:
                raise
            raise AgentLost(error.message, location=error.location) from error  # one that died before it was asked
        manifest = Manifest.of(written.version, self._slots, self._ranks, parts)
        for agent in agents:
            self._note_held(agent, manifest, own[agent.node])
        return manifest

    async def pull(self, node: str, manifest: Manifest) -> Pulled:
        """Have a node hold a complete version in memory; it pulls missing parts from other nodes.

        An agent that is lost during this is replaced, and pulls again. Raises ``PullFailed`` and ``HostGone``.
        """
        agent = self._agent(node)
        pulled: Pulled | None = None
        while pulled is None:
            try:
                pulled = await self._call(node, "pull", manifest, self._holders(agent), PULL_S, limit_s=PULL_S)
            except AgentLost:
                continue
            except Superseded:
                raise
            except PullFailed as failed:
                await self._note_fault(agent, node, failed.message)
                raise
        self._note_held(agent, manifest, range(manifest.ranks))
        for holder, fault in pulled.faults.items():
            await self._note_fault(agent, holder, fault)
        return pulled

    async def have(self, manifest: Manifest) -> bool:
        """Whether the live agents together have all parts of a version."""
        await self._look()
        key = manifest.version, manifest.checksum
        held = [agent.held.get(key, frozenset()) for agent in self._agents.values()]
        return len(frozenset[int]().union(*held)) == manifest.ranks

    def _holders(self, agent: _Agent) -> list[Endpoint]:
        """The hosts that an agent pulls from: all hosts of ranks, which may have parts that no other host has, and some
        others."""
        others = [other for other in self._agents.values() if other is not agent and other.endpoint is not None]
        random.shuffle(others)
        writers = [other for other in others if other.node in self._writers]
        peers = [other for other in others if other.node not in self._writers][:PEERS]
        return [other.endpoint for other in (*writers, *peers) if other.endpoint is not None]

    def _agent(self, node: str) -> _Agent:
        if node not in self._agents:
            name = f"host-agent-{node[:8]}"

            async def start(actor: Any) -> None:
                agent.held, agent.endpoint = {}, None
                settings = (self._slots, self._ranks, self._token, self._address_of(node))
                agent.endpoint = await wait_for(actor.start.remote(*settings), name, START_TIMEOUT_S)

            process = SupervisedActor("host-agent", name, lambda: self._make(name, node), start, self._budget)
            agent = self._agents[node] = _Agent(node, process)
        return self._agents[node]

    async def _call(self, node: str, method: str, *arguments: Any, limit_s: float = 0.0) -> Any:
        agent = self._agent(node)
        name = agent.process.name
        if agent.gone:
            raise HostGone(agent.gone, location=name)
        actor = await agent.process.running()
        try:
            # Twice the bytes: the memory of two versions is allocated in one call.
            limit_s += CALL_S + seconds_for(2 * size_of(self._slots))
            return await wait_for(getattr(actor, method).remote(*arguments), name, limit_s)
        except ActorLost as lost:
            await self._lose(agent, actor, lost)
            if agent.gone:
                raise HostGone(agent.gone, location=name) from lost
            raise AgentLost(lost.message, location=name) from lost

    async def _look(self) -> None:
        """Detect agents that have died since their last call."""
        await asyncio.gather(*(self._look_at(agent) for agent in list(self._agents.values())))

    async def _look_at(self, agent: _Agent) -> None:
        actor = agent.process.actor
        if agent.process.started:
            try:
                await wait_for(actor.report.remote(), agent.process.name, LOOK_S)
            except ActorDied as died:
                await self._lose(agent, actor, died)
            except RunError:
                pass  # it may be unreachable only for a while, and then still has its memory

    async def _lose(self, agent: _Agent, actor: Any, lost: ActorLost) -> None:
        # Until the state of the node is known, the agent counts as alive: a caller may stop waiting for it.
        gone = await why_lost(lambda: self._why_gone(agent.node), isinstance(lost, Unreachable))
        if self._agents.get(agent.node) is agent and actor is agent.process.actor:  # else it is no longer needed
            self.losses += 1
            agent.held, agent.endpoint, agent.gone = {}, None, gone
            if gone:
                agent.process.release()
            else:
                await agent.process.lose(actor, lost.message)

    def _note_held(self, agent: _Agent, manifest: Manifest, ranks: Collection[int]) -> None:
        if agent.endpoint is not None:  # else it was lost meanwhile
            # A host keeps two versions.
            agent.held = {key: held for key, held in agent.held.items() if key[0] >= manifest.version - 1}
            agent.held[manifest.version, manifest.checksum] = frozenset(ranks)

    async def _note_fault(self, agent: _Agent, holder: str, message: str) -> None:
        if agent.faults.get(holder) != message:  # a repeated pull may fail in the same way
            agent.faults[holder] = message
            await self._budget.note("weights", agent.process.name, message)


def _ranks_by_node(nodes: Sequence[str]) -> dict[str, list[int]]:
    """``nodes`` are those of the ranks, rank by rank."""
    return {node: [rank for rank, at in enumerate(nodes) if at == node] for node in nodes}


async def _all(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of all calls, once all have ended. Raises the first error of any."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
