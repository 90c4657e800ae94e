"""Whether hosts of a cluster can work together: for `asyncrl doctor --cluster`, and for every start on several hosts.

All hosts answer at once, and pairs are measured in rounds, so the time grows with the number of hosts and not with that
of pairs; every wait has a limit. What they answer is judged in verdicts.py.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl_cli.checks.finding import Finding
from asyncrl_cli.checks.hosts import shared_folder, verdicts
from asyncrl_cli.checks.hosts.probe import (
    CONNECT_S,
    SAMPLE_S,
    Facts,
    Failure,
    HostProbe,
    Speed,
    Target,
)
from asyncrl_cli.core.errors import ConfigError, RunError, UserError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.orchestrator.cluster import Actors, connected
from asyncrl_cli.orchestrator.nodes import (
    Node,
    check_resources,
    eligible,
    engine_wants,
    live_nodes,
    rank_wants,
    times_on,
)
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import on_node, wait_for

START_S = 60.0
"""Seconds that a host has to start its probe, a process that imports Ray."""
ANSWER_S = 20.0
"""Seconds that a probe has to answer, in addition to the limits of what it does."""
ROUNDS_S = 120.0
"""Seconds for all rounds; pairs that are left are reported as not measured."""
CLOCK_SAMPLES = 5
LOST_HINT = "check that asyncrl is installed there, read Ray's logs on that host, or remove it from the cluster"


@dataclass(frozen=True, slots=True)
class Host:
    """A node of the cluster: Ray's id, a unique readable name, and its address. ``share``: the part of a weight version
    that it may hold: all of it if it may have an engine, the shards of the ranks that it has room for, or nothing."""

    node_id: str
    name: str
    address: str
    share: float = 1.0


@dataclass(slots=True)
class Measured:
    """The measurements of the hosts, by host name. ``lost``: what happened to a host, and a hint. ``newcomer``: the
    only host whose pairs were measured; None: all pairs were."""

    newcomer: str | None
    lost: dict[str, tuple[str, str]] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    offsets: dict[str, verdicts.Offset] = field(default_factory=dict)
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    speeds: dict[tuple[str, str], Speed] = field(default_factory=dict)
    unshared: dict[str, str] = field(default_factory=dict)


def hosts_for(
    spec: ExperimentSpec | None, nodes: Sequence[Node], here: str, actors: Actors | None = None
) -> list[Host]:
    """The nodes that may have an engine or a trainer rank of the spec, and the driver's (``here``), which is the first;
    without a spec all of them. ``actors``: as ``ray_cluster``."""
    names = [str(node) for node in nodes]
    shares = {node.node_id: 1.0 for node in nodes}
    if spec is not None:
        engines, ranks = actors or Actors.of(spec)
        # By total resources: programs that use some of them now may end.
        shares = {
            node.node_id: min(times, ranks) / ranks
            for node in (eligible(nodes, spec.cluster.trainer) if ranks else ())
            if (times := times_on(node, rank_wants(spec)))
        }
        shares |= {
            node.node_id: 1.0
            for node in (eligible(nodes, spec.cluster.engines) if engines else ())
            if times_on(node, engine_wants(spec))
        }
    hosts = [
        Host(
            node.node_id,
            name if names.count(name) == 1 else f"{name} {node.node_id[:8]}",
            node.address,
            shares.get(node.node_id, 0.0),
        )
        for node, name in zip(nodes, names, strict=True)
        if node.node_id in {here, *shares}
    ]
    return sorted(hosts, key=lambda host: host.node_id != here)


def examine_cluster(address: str, spec: ExperimentSpec | None, runs_dir: Path, replica_bytes: int) -> Iterator[Finding]:
    """Join the cluster at ``address`` and make all checks; those between hosts only if the run may use several."""
    try:
        with connected(address):
            nodes = live_nodes()
            hosts = _hosts(spec, nodes)
            found = f"{counted(len(nodes), 'node')} at {address}"
            if spec is not None:
                found = f"{found}, {len(hosts)} for this run; {check_resources(spec, nodes, *Actors.of(spec))}"
            yield Finding("cluster", "ok", found)
            yield from examine_hosts(hosts, runs_dir, replica_bytes)
    except RunError as error:
        yield Finding("cluster", "failure", f"{error.location}: {error.message}", error.hint)


def check_cluster(spec: ExperimentSpec, actors: Actors, folder: Path, notice: Callable[[str], None]) -> None:
    """Make the checks between the hosts of the cluster, if the spec names one. ``notice`` gets the warnings.

    Raises ``ConfigError`` with the first failure, and ``RunError`` when the cluster cannot be reached.
    """
    if spec.cluster.address is not None:
        with connected(spec.cluster.address):
            refuse(examine_hosts(_hosts(spec, live_nodes(), actors), folder, 0), notice)


def _hosts(spec: ExperimentSpec | None, nodes: Sequence[Node], actors: Actors | None = None) -> list[Host]:
    import ray

    return hosts_for(spec, nodes, ray.get_runtime_context().get_node_id(), actors)


def examine_hosts(hosts: Sequence[Host], runs_dir: Path, replica_bytes: int) -> Iterator[Finding]:
    """All checks of several hosts, none for a single one. Versions must be those of the first. Ray must be joined.
    ``replica_bytes`` is the size of one version of the weights, 0 if there is no model."""
    if len(hosts) < 2:
        return
    try:
        measured = asyncio.run(_measure(hosts, runs_dir))
    except ConfigError as error:
        yield Finding("shared folder", "failure", error.message, error.hint)
    else:
        yield from _judged(hosts, measured, runs_dir, replica_bytes)


async def examine_newcomer(hosts: Sequence[Host], name: str, folder: Path, replica_bytes: int) -> list[Finding]:
    """The checks of the host with this name, which has joined, and between it and each of the others, the driver's
    first. What is wrong with the others is omitted."""
    measured = await _measure(hosts, folder, name)
    measured.lost = {host: lost for host, lost in measured.lost.items() if host == name}
    measured.unshared = {host: problem for host, problem in measured.unshared.items() if host == name}
    return await asyncio.to_thread(lambda: list(_judged(hosts, measured, folder, replica_bytes)))


def _judged(hosts: Sequence[Host], measured: Measured, runs_dir: Path, replica_bytes: int) -> Iterator[Finding]:
    alive = {node.node_id for node in live_nodes()}
    yield from verdicts.judge_lost(measured.lost, {host.name for host in hosts if host.node_id not in alive})
    facts = {host.name: measured.facts[host.name] for host in hosts if host.name in measured.facts}
    if not facts:
        return
    yield verdicts.judge_token(facts)
    yield from verdicts.judge_versions(facts)
    yield from verdicts.judge_drivers(facts)
    yield verdicts.judge_clocks(measured.offsets)
    failures = {pair: failure for pair, failure in measured.failures.items() if facts.keys() >= set(pair)}
    yield from verdicts.judge_pairs(list(facts), failures, measured.speeds, measured.newcomer)
    memory = {host.name: facts[host.name].memory for host in hosts if host.share and host.name in facts}
    needed = {host.name: round(2 * replica_bytes * host.share) for host in hosts}
    yield verdicts.judge_memory(memory, needed)
    yield verdicts.judge_folder(str(runs_dir.absolute()), measured.unshared)


def refuse(findings: Iterator[Finding], notice: Callable[[str], None]) -> None:
    """Raise the first failure as a ``ConfigError``; ``notice`` gets the warnings."""
    for finding in list(findings):  # all of them first: the cluster is left before an error is raised
        if finding.status == "failure":
            raise ConfigError(finding.found, location=f"cluster: {finding.check}", hint=finding.hint)
        if finding.status == "warning":
            notice(f"{finding.check}: {finding.found}. {finding.hint}")


async def _measure(hosts: Sequence[Host], runs_dir: Path, newcomer: str | None = None) -> Measured:
    """``newcomer``: the host whose pairs are measured; without it all pairs."""
    import ray

    secret = secrets.token_hex(16)
    remote = ray.remote(HostProbe)
    probes = {}
    for host in hosts:
        there = on_node(host.node_id)
        probes[host.name] = remote.options(num_cpus=0, scheduling_strategy=there).remote(host.node_id, secret)
    measurement = _Measurement({host.name: host for host in hosts}, probes, newcomer)
    try:
        with shared_folder.marked(runs_dir) as mark:
            await measurement.make(mark)
    finally:
        for probe in probes.values():
            ray.kill(probe)
    return measurement.found


class _Measurement:
    """Asks the probes. A host whose probe does not answer counts as lost, and is not asked again."""

    def __init__(self, hosts: Mapping[str, Host], probes: Mapping[str, Any], newcomer: str | None) -> None:
        self._hosts = hosts
        self._probes = probes
        self.found = Measured(newcomer)

    async def make(self, mark: shared_folder.Mark) -> None:
        await self._of_all(self._open)
        await self._of_all(self._clock)
        await self._of_all(lambda host: self._share(host, mark))
        await self._of_all(self._reach)
        deadline = time.monotonic() + ROUNDS_S
        names = list(self.found.facts)
        for pairs in rounds(len(names)):
            if time.monotonic() < deadline:
                named = [(names[a], names[b]) for a, b in pairs]
                await asyncio.gather(*(self._measure_pair(*pair) for pair in named if self._concerned(*pair)))

    def _concerned(self, a: str, b: str) -> bool:
        return self.found.newcomer in (None, a, b)

    async def _of_all(self, ask: Callable[[str], Awaitable[None]]) -> None:
        await asyncio.gather(*(ask(name) for name in self._hosts if name not in self.found.lost))

    async def _ask(self, name: str, call: Awaitable[Any], limit_s: float) -> Any:
        """The answer of a probe; None when its host is lost."""
        try:
            return await wait_for(call, name, limit_s)
        except UserError as error:
            hint = error.hint if isinstance(error, ConfigError) else LOST_HINT
            self.found.lost.setdefault(name, (error.message, hint))
            self.found.facts.pop(name, None)
            return None

    async def _open(self, name: str) -> None:
        facts = await self._ask(name, self._probes[name].open.remote(self._hosts[name].address), START_S)
        if facts is not None:
            self.found.facts[name] = facts

    async def _clock(self, name: str) -> None:
        samples = []
        for _ in range(CLOCK_SAMPLES):
            asked = time.time()
            answer = await self._ask(name, self._probes[name].clock.remote(), ANSWER_S)
            if answer is None:
                return
            samples.append((asked, answer, time.time()))
        self.found.offsets[name] = verdicts.Offset.of(samples)

    async def _share(self, name: str, mark: shared_folder.Mark) -> None:
        limit_s = shared_folder.VISIBLE_S + ANSWER_S
        problem = await self._ask(name, self._probes[name].share.remote(mark), limit_s)
        if problem == "":
            problem = await asyncio.to_thread(shared_folder.missing_answer, mark, self._hosts[name].node_id)
        if problem:
            self.found.unshared[name] = problem

    async def _reach(self, name: str) -> None:
        others = [other for other in self.found.facts if other != name and self._concerned(name, other)]
        targets = [self._target(other) for other in others]
        failures = await self._ask(name, self._probes[name].reach.remote(targets), CONNECT_S + ANSWER_S)
        for other in others:
            if failures and (failure := failures.get(self._hosts[other].node_id)):
                self.found.failures[name, other] = failure

    async def _measure_pair(self, a: str, b: str) -> None:
        """Measure one direction after the other: at the same time they would share the bandwidth."""
        for source, target in ((a, b), (b, a)):
            if (source, target) in self.found.failures or not {a, b} <= self.found.facts.keys():
                continue
            limit_s = 2 * CONNECT_S + SAMPLE_S + ANSWER_S
            answer = await self._ask(source, self._probes[source].measure.remote(self._target(target)), limit_s)
            if isinstance(answer, Speed):
                self.found.speeds[source, target] = answer
            elif answer is not None:
                self.found.failures[source, target] = answer

    def _target(self, name: str) -> Target:
        host = self._hosts[name]
        return Target(host.node_id, host.address, self.found.facts[name].port)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` hosts, each once, in rounds in which every host is in at most one pair, so that no pair
    slows another down.

    By the circle method of round-robin tournaments: one host keeps its position, and the others rotate by one position
    in each round.
    """
    seats = list(range(count + count % 2))  # with an odd number, one host has no partner in each round
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in found if pairs]
