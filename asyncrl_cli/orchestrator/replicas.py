"""The driver's side of the host agents. One agent runs on each node with a trainer rank or an engine.

An agent owns the memory that holds weight versions on its host (``weights/replica.py``, decision 0038). When it dies,
this memory is lost, and the agent restarts empty. An engine's host then pulls the version from other hosts; the trainer
writes parts again that every host has lost. Like an engine (engine_pool.py), an agent that is lost with its node is not
restarted, and does not count as a restart.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
"""Limit of a call that does not depend on other hosts, in seconds, without the time for its bytes."""
PULL_S = 600.0
"""Seconds after which a pull is restarted; chunks that arrived are kept."""
PEERS = 16
"""Number of hosts without ranks that a host asks for chunks."""
LOOK_S = 10.0
"""Seconds within which an agent must answer a ping."""


class AgentLost(RunError):
    """An agent died or did not answer. The versions in its memory are lost; the next call starts another agent."""


class HostGone(RunError):
    """An agent is lost with its node, and is not replaced."""


class AgentProcess(SupervisedActor):
    """One node's agent, through its restarts."""

    def __init__(
        self,
        node: str,
        make: Callable[[str, str], Any],
        *,
        settings: Callable[[], tuple[Any, ...]],
        budget: RestartBudget,
        why_gone: Callable[[str], str],
    ) -> None:
        """``settings()`` returns the arguments of the actor's start. For the other arguments see ``Replicas``."""
        name = f"host-agent-{node[:8]}"
        super().__init__("host-agent", name, partial(make, name, node), self._bring_up, budget)
        self.node = node
        self.gone = ""
        """The reason why it is not replaced, if it is lost with its node."""
        self.endpoint: Endpoint | None = None
        self.losses = 0
        """Number of agents lost here, each with the versions in its memory."""
        self.held_ranks: dict[tuple[int, str], frozenset[int]] = {}
        """The ranks whose shards this host has, by version and checksum."""
        self._settings = settings
        self._why_gone = why_gone
        self._faults: dict[str, str] = {}

    async def _bring_up(self, actor: Any) -> None:
        self.held_ranks, self.endpoint = {}, None
        self.endpoint = await wait_for(actor.start.remote(*self._settings()), self.name, START_TIMEOUT_S)

    async def ask_for(self, method: str, *arguments: Any, limit_s: float) -> Any:
        """Call the agent; returns its answer. Raises ``AgentLost`` and ``HostGone``."""
        if self.gone:
            raise HostGone(self.gone, location=self.name)
        actor = await self.running()
        try:
            return await wait_for(getattr(actor, method).remote(*arguments), self.name, limit_s)
        except ActorLost as lost:
            await self._note_loss(actor, lost)
            if self.gone:
                raise HostGone(self.gone, location=self.name) from lost
            raise AgentLost(lost.message, location=self.name) from lost

    async def look(self) -> None:
        """Detect whether it has died since the last call."""
        if self.started:
            actor = self.actor
            try:
                await wait_for(actor.report.remote(), self.name, LOOK_S)
            except ActorDied as died:
                await self._note_loss(actor, died)
            except RunError:
                pass  # it may be unreachable only for a while, and still have its memory

    async def _note_loss(self, actor: Any, lost: ActorLost) -> None:
        # Ask first, then note everything without an await: the caller may be cancelled during this wait.
        gone = await why_lost(lambda: self._why_gone(self.node), isinstance(lost, Unreachable))
        if actor is self.actor:
            self.losses += 1
            self.held_ranks, self.endpoint, self.gone = {}, None, gone
            if gone:
                self.release()
            else:
                await self.lose(actor, lost.message)

    def note_held(self, manifest: Manifest, ranks: Collection[int]) -> None:
        """Record that the agent has these ranks' shards of a version."""
        if self.endpoint is not None:  # otherwise it was lost in the meantime
            # A host keeps two versions.
            self.held_ranks = {
                key: rank_set for key, rank_set in self.held_ranks.items() if key[0] >= manifest.version - 1
            }
            self.held_ranks[manifest.version, manifest.checksum] = frozenset(ranks)

    async def note_fault(self, holder: str, message: str) -> None:
        """Record that this host could not fetch from ``holder``, once for each message."""
        if self._faults.get(holder) != message:
            self._faults[holder] = message
            await self._budget.note("weights", self.name, message)


@dataclass(frozen=True, slots=True, eq=False)
class WrittenVersion:
    """A version that the ranks have written into their hosts' replicas."""

    version: int
    probe: Probe
    ranks: Mapping[str, Sequence[int]]  # by node
    losses: Sequence[int]  # how often each node's agent had been lost before
    seconds: float


class Replicas:
    """The host agents of one run."""

    def __init__(
        self,
        make: Callable[[str, str], Any],
        address_of: Callable[[str], str],
        budget: RestartBudget,
        why_gone: Callable[[str], str] = lambda _: "",
    ) -> None:
        """``make(name, node)`` creates an agent on a node; ``address_of(node)`` returns the address at which it serves.
        ``why_gone(node)`` returns why an actor there is lost with the node; empty if the node lives."""
        self._make = make
        self._why_gone = why_gone
        self._address_of = address_of
        self._budget = budget
        self._token = secrets.token_hex(32)
        self._agents: dict[str, AgentProcess] = {}
        self._slots: tuple[TensorSlot, ...] = ()
        self._ranks = 0
        self._writers: Collection[str] = ()

    def expect(self, node: str) -> None:
        """Request a node's agent: its process starts in parallel with others."""
        self._agent(node).ask()

    def keep(self, nodes: Collection[str]) -> None:
        """End the agents of all other nodes."""
        for node in self._agents.keys() - set(nodes):
            self._agents.pop(node).release()

    async def write(self, ranks: TrainerRanks, version: int, keep: Manifest | None = None) -> WrittenVersion:
        """Have every rank write its shard of ``version``, again if an agent dies during the write.

        ``keep``: the version that engines serve; agents must not overwrite it. Raises ``TrainerLost``.
        """
        self._slots = self._slots or await ranks.layout()
        self._ranks = len(ranks.nodes)
        while True:
            nodes = ranks.nodes
            placement: dict[str, list[int]] = {}  # the ranks of each node
            for rank, node in enumerate(nodes):
                placement.setdefault(node, []).append(rank)
            self._writers = placement.keys()
            losses = [self._agent(node).losses for node in placement]
            try:
                paths = await self._ask_all("begin", version, keep, placement=placement)
                path_of = dict(zip(placement, paths, strict=True))
                started = time.monotonic()
                probe = await ranks.write(version, [path_of[node] for node in nodes])
                return WrittenVersion(version, probe, placement, losses, seconds=time.monotonic() - started)
            except ReplicaGone:
                await self._look()
                if losses == [self._agent(node).losses for node in placement]:
                    raise  # no agent has died: it would fail again
            except RunError as error:
                # If the host is lost, so are its ranks, and Ray starts no agent there (decision 0038).
                await ranks.check()
                if isinstance(error, HostGone):
                    raise TrainerLost(error.location, error.message) from error  # its ranks are lost, too
                if not isinstance(error, AgentLost):
                    raise

    async def manifest(self, version: WrittenVersion) -> Manifest:
        """Have the agents compute the written version's digests. Raises ``AgentLost`` if a part of it is lost."""
        agents = [self._agent(node) for node in version.ranks]
        try:
            shard_digests = await self._ask_all("digest", version.version, placement=version.ranks)
        except RunError as error:
            if [agent.losses for agent in agents] == version.losses:
                raise
            raise AgentLost(error.message, location=error.location) from error  # an agent died before this call
        manifest = Manifest.from_digests(version.version, self._slots, self._ranks, shard_digests)
        for agent in agents:
            agent.note_held(manifest, version.ranks[agent.node])
        return manifest

    async def pull(self, node: str, manifest: Manifest) -> Pulled:
        """Have a node pull the parts of a version that it lacks from other nodes.

        An agent that dies during the pull is replaced, and pulls again. Raises ``PullFailed`` and ``HostGone``.
        """
        pulled: Pulled | None = None
        while pulled is None:
            agent = self._agent(node)
            try:
                limit_s = PULL_S + self._limit_s
                pulled = await agent.ask_for("pull", manifest, self._holders(agent), PULL_S, limit_s=limit_s)
            except AgentLost:
                continue
            except Superseded:
                raise
            except PullFailed as failed:
                await agent.note_fault(node, failed.message)
                raise
        agent.note_held(manifest, range(manifest.ranks))
        for holder, fault in pulled.faults.items():
            await agent.note_fault(holder, fault)
        return pulled

    async def have(self, manifest: Manifest) -> bool:
        """True if the live agents together have all parts of a version."""
        await self._look()
        key = manifest.version, manifest.checksum
        held_ranks = [agent.held_ranks.get(key, frozenset()) for agent in self._agents.values()]
        return len(frozenset[int]().union(*held_ranks)) == manifest.ranks

    def _holders(self, puller: AgentProcess) -> list[Endpoint]:
        """The hosts that an agent pulls from: all hosts of ranks, because each may be the only one with its part, and a
        random choice of others, which spreads the load."""
        agents = [agent for agent in self._agents.values() if agent is not puller]
        random.shuffle(agents)
        writers = [agent.endpoint for agent in agents if agent.endpoint and agent.node in self._writers]
        peers = [agent.endpoint for agent in agents if agent.endpoint and agent.node not in self._writers]
        return writers + peers[:PEERS]

    def _agent(self, node: str) -> AgentProcess:
        if node not in self._agents:
            self._agents[node] = AgentProcess(
                node,
                self._make,
                settings=lambda: (self._slots, self._ranks, self._token, self._address_of(node)),
                budget=self._budget,
                why_gone=self._why_gone,
            )
        return self._agents[node]

    @property
    def _limit_s(self) -> float:
        # Twice the bytes: the memory of two versions is allocated in one call.
        return CALL_S + seconds_for(2 * size_of(self._slots))

    async def _ask_all(self, method: str, *arguments: Any, placement: Mapping[str, Sequence[int]]) -> list[Any]:
        """Ask each node's agent about its own ranks. Returns or raises only after all calls have ended: a retry must
        not overlap with a call of the previous attempt."""
        calls = [
            self._agent(node).ask_for(method, *arguments, ranks, limit_s=self._limit_s)
            for node, ranks in placement.items()
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _look(self) -> None:
        await asyncio.gather(*(agent.look() for agent in list(self._agents.values())))
