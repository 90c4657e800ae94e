"""Checks that a cluster's hosts can work together, for `asyncrl doctor --cluster` and every start on several hosts.

All hosts answer in parallel, and every wait has a limit, so the time does not grow with the number of hosts.
verdicts.py judges their answers (decision 0028).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts import shared_folder, verdicts
from asyncrl_cli.checks.hosts.probe import CONNECT_S, SAMPLE_S, Facts, Failure, Host, HostProbe
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
"""Time limit, in seconds, for a host to start its probe, a process that imports Ray."""
ANSWER_S = 20.0 + 2 * CONNECT_S + SAMPLE_S + shared_folder.VISIBLE_S
"""Time limit for a probe's answer in seconds: 20 more than the sum of the probe's limits."""
LOST_HINT = "check that asyncrl is installed there, read Ray's logs on that host, or remove it from the cluster"


@dataclass(slots=True)
class Answers:
    """The hosts' answers, by host name."""

    lost: dict[str, tuple[str, str]] = field(default_factory=dict)  # the reason and a hint
    facts: dict[str, Facts] = field(default_factory=dict)
    ahead: dict[str, float] = field(default_factory=dict)  # seconds that its clock is ahead of the driver's clock
    failures: dict[verdicts.Pair, Failure] = field(default_factory=dict)
    speeds: dict[verdicts.Pair, float] = field(default_factory=dict)
    unshared: dict[str, str] = field(default_factory=dict)


def hosts_for(
    spec: ExperimentSpec | None, nodes: Sequence[Node], here: str, actors: Actors | None = None
) -> list[Host]:
    """Return the hosts that may have an engine or a trainer rank of the spec, or all hosts without a spec.

    The driver's node (``here``) is always included, and comes first. ``actors``: as for ``ray_cluster``.
    """
    names = [str(node) for node in nodes]
    shares = {node.node_id: 1.0 for node in nodes}
    if spec is not None:
        engines, ranks = actors or Actors.of(spec)
        # Total resources count, not free ones: programs that use some of them now may end.
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
            node_id=node.node_id,
            name=name if names.count(name) == 1 else f"{name} {node.node_id[:8]}",
            address=node.address,
            share=shares.get(node.node_id, 0.0),
        )
        for node, name in zip(nodes, names, strict=True)
        if node.node_id in {here, *shares}
    ]
    return sorted(hosts, key=lambda host: host.node_id != here)


def examine_cluster(address: str, spec: ExperimentSpec | None, runs_dir: Path, replica_bytes: int) -> Iterator[Finding]:
    """Join the cluster at ``address`` and make all checks. Checks between hosts need a run that may use several."""
    try:
        with connected(address):
            nodes = live_nodes()
            hosts = _hosts(spec, nodes)
            found = f"{counted(len(nodes), 'node')} at {address}"
            if spec is not None:
                found = f"{found}, {len(hosts)} for this run; {check_resources(spec, nodes, *Actors.of(spec))}"
            yield Finding("cluster", Status.OK, found)
            yield from examine_hosts(hosts, runs_dir, replica_bytes)
    except RunError as error:
        yield Finding("cluster", status=Status.FAILURE, found=f"{error.location}: {error.message}", hint=error.hint)


def check_cluster(spec: ExperimentSpec, actors: Actors, folder: Path, notice: Callable[[str], None]) -> None:
    """Make the checks between hosts if the spec names a cluster. ``notice`` gets the warnings.

    Raises ``ConfigError`` with the first failure, and ``RunError`` when the cluster cannot be reached.
    """
    if spec.cluster.address is not None:
        with connected(spec.cluster.address):
            refuse(examine_hosts(_hosts(spec, live_nodes(), actors), folder, 0), notice)


def _hosts(spec: ExperimentSpec | None, nodes: Sequence[Node], actors: Actors | None = None) -> list[Host]:
    import ray

    return hosts_for(spec, nodes=nodes, here=ray.get_runtime_context().get_node_id(), actors=actors)


def examine_hosts(hosts: Sequence[Host], runs_dir: Path, replica_bytes: int) -> list[Finding]:
    """Make all checks of several hosts; a single host needs none. The driver must have joined Ray.

    All hosts must have the first host's versions. ``replica_bytes`` is the size of one version of the weights, or 0
    without a model.
    """
    if len(hosts) < 2:
        return []
    try:
        return asyncio.run(examine(hosts, runs_dir, replica_bytes))
    except ConfigError as error:
        return [Finding("shared folder", status=Status.FAILURE, found=error.message, hint=error.hint)]


async def examine(
    hosts: Sequence[Host], runs_dir: Path, replica_bytes: int, newcomer: str | None = None
) -> list[Finding]:
    """Do the work of ``examine_hosts``. With ``newcomer``, the name of a host that has just joined, look only for its
    problems and for problems between it and the other hosts."""
    answers = await _ask(hosts, runs_dir, newcomer)
    alive = {node.node_id for node in await asyncio.to_thread(live_nodes)}
    facts = {host.name: answers.facts[host.name] for host in hosts if host.name in answers.facts}
    names = {host.name for host in hosts} if newcomer is None else {newcomer}
    lost = {name: reason for name, reason in answers.lost.items() if name in names}
    findings = verdicts.judge_lost(lost, {host.name for host in hosts if host.node_id not in alive})
    if not facts:
        return findings
    failures = {pair: failure for pair, failure in answers.failures.items() if facts.keys() >= set(pair)}
    memory = {host.name: facts[host.name].memory for host in hosts if host.share and host.name in facts}
    needed = {host.name: round(2 * replica_bytes * host.share) for host in hosts}
    unshared = {name: problem for name, problem in answers.unshared.items() if name in names}
    return [
        *findings,
        verdicts.judge_token(facts),
        *verdicts.judge_versions(facts),
        *verdicts.judge_drivers(facts),
        verdicts.judge_clocks(answers.ahead),
        *verdicts.judge_pairs(list(facts), failures, answers.speeds, newcomer=newcomer),
        verdicts.judge_memory(memory, needed),
        verdicts.judge_folder(str(runs_dir.absolute()), unshared),
    ]


def refuse(findings: Iterable[Finding], notice: Callable[[str], None]) -> None:
    """Raise the first failure as a ``ConfigError``; ``notice`` gets the warnings."""
    for finding in list(findings):  # a list, because the generator leaves the cluster at its end
        if finding.status is Status.FAILURE:
            raise ConfigError(finding.found, location=f"cluster: {finding.check}", hint=finding.hint)
        if finding.status is Status.WARNING:
            notice(str(finding))


async def _ask(hosts: Sequence[Host], runs_dir: Path, newcomer: str | None = None) -> Answers:
    """Start a probe on every host, and collect the answers. A host without an answer is lost, and not asked again.

    ``newcomer``: examine only pairs with this host.
    """
    import ray

    secret = secrets.token_hex(16)
    remote = ray.remote(HostProbe)
    probes: dict[str, Any] = {}
    for host in hosts:
        options = {"num_cpus": 0, "scheduling_strategy": on_node(host.node_id)}
        probes[host.name] = remote.options(**options).remote(host, secret)
    answers = Answers()

    async def ask(host: Host, call: Awaitable[Any], limit_s: float) -> Any:
        try:
            return await wait_for(call, host.name, limit_s)
        except UserError as error:
            hint = error.hint if isinstance(error, ConfigError) else LOST_HINT
            answers.lost[host.name] = (error.message, hint)
            answers.facts.pop(host.name, None)
            return None

    async def open_probe(host: Host) -> None:
        if (facts := await ask(host, probes[host.name].open.remote(), START_S)) is not None:
            answers.ahead[host.name] = facts.clock - time.time()
            answers.facts[host.name] = facts

    async def look(host: Host, before: Host, mark: Path) -> None:
        others = [other for other in listening if other != host and newcomer in (None, host.name, other.name)]
        neighbour = before if before in others else None
        found = await ask(host, probes[host.name].examine.remote(others, neighbour, mark), ANSWER_S)
        if found is None:
            return
        answers.failures |= {(host.name, other): failure for other, failure in found.failures.items()}
        if found.speed is not None:
            answers.speeds[host.name, before.name] = found.speed
        if problem := found.unshared or await asyncio.to_thread(shared_folder.missing_answer, mark, host.node_id):
            answers.unshared[host.name] = problem

    try:
        with shared_folder.marked(runs_dir) as mark:
            await asyncio.gather(*map(open_probe, hosts))
            listening = [
                replace(host, port=answers.facts[host.name].port) for host in hosts if host.name in answers.facts
            ]
            # Each host gets bytes from the host before it in a ring, so no transfer slows down another one.
            pairs = zip(listening, [*listening[-1:], *listening[:-1]], strict=True)
            await asyncio.gather(*(look(host, before, mark) for host, before in pairs))
    finally:
        for probe in probes.values():
            ray.kill(probe)
    return answers
