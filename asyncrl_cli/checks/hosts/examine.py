"""Checks that a cluster's hosts can work together, for `asyncrl doctor --cluster` and every start on several hosts.

All hosts answer in parallel, and every wait has a limit, so the time does not grow with the number of hosts.
verdicts.py judges their answers (decision 0028).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts.probe import CONNECT_S, VISIBLE_S, Host, HostProbe, HostProblem, appears, marked_folder
from asyncrl_cli.checks.hosts.verdicts import Answers, findings_about
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
ANSWER_S = 20.0 + CONNECT_S + VISIBLE_S
"""Time limit for a probe's answer in seconds: 20 more than the sum of the probe's limits."""
LOST_HINT = "check that asyncrl is installed there, read Ray's logs on that host, or remove it from the cluster"


def hosts_for(
    spec: ExperimentSpec | None, nodes: Sequence[Node], driver_node: str, actors: Actors | None = None
) -> list[Host]:
    """Return the hosts that may have an engine or a trainer rank of the spec, or all hosts without a spec.

    The driver's node (``driver_node``) is always included, and comes first. ``actors``: as for ``ray_cluster``.
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
        if node.node_id in {driver_node, *shares}
    ]
    return sorted(hosts, key=lambda host: host.node_id != driver_node)


def examine_cluster(address: str, spec: ExperimentSpec | None, runs_dir: Path, replica_bytes: int) -> Iterator[Finding]:
    """Join the cluster at ``address`` and make all checks. Checks between hosts need a run that may use several."""
    try:
        with connected(address):
            nodes = live_nodes()
            hosts = _hosts(spec, nodes)
            text = f"{counted(len(nodes), 'node')} at {address}"
            if spec is not None:
                text = f"{text}, {len(hosts)} for this run; {check_resources(spec, nodes, *Actors.of(spec))}"
            yield Finding("cluster", Status.OK, text)
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

    return hosts_for(spec, nodes=nodes, driver_node=ray.get_runtime_context().get_node_id(), actors=actors)


def examine_hosts(hosts: Sequence[Host], runs_dir: Path, replica_bytes: int) -> list[Finding]:
    """Make all checks of several hosts; a single host needs none. The driver must have joined Ray.

    All hosts must have the first host's versions. ``replica_bytes`` is the size of one version of the weights, or 0
    without a model.
    """
    if len(hosts) < 2:
        return []
    try:
        answers = asyncio.run(_answers(hosts, runs_dir))
    except ConfigError as error:
        return [Finding("shared folder", status=Status.FAILURE, found=error.message, hint=error.hint)]
    live_ids = {node.node_id for node in live_nodes()}
    answers.departed = {host.name for host in hosts if host.node_id not in live_ids}
    return findings_about(hosts, answers, runs_dir.absolute(), replica_bytes)


def refuse(findings: Iterable[Finding], notice: Callable[[str], None]) -> None:
    """Raise the first failure as a ``ConfigError``; ``notice`` gets the warnings."""
    for finding in list(findings):  # a list, because the generator leaves the cluster at its end
        if finding.status is Status.FAILURE:
            raise ConfigError(finding.found, location=f"cluster: {finding.check}", hint=finding.hint)
        if finding.status is Status.WARNING:
            notice(str(finding))


async def _answers(hosts: Sequence[Host], runs_dir: Path) -> Answers:
    """Start a probe on every host, and collect the answers. A host without an answer is lost, and not asked again."""
    import ray

    secret = secrets.token_hex(16)
    remote_probe = ray.remote(HostProbe)
    probes: dict[str, Any] = {}
    for host in hosts:
        options = {"num_cpus": 0, "scheduling_strategy": on_node(host.node_id)}
        probes[host.name] = remote_probe.options(**options).remote(host, secret)
    answers = Answers()

    async def ask(host: Host, call: Awaitable[Any], limit_s: float) -> Any:
        try:
            return await wait_for(call, host.name, limit_s)
        except UserError as error:
            hint = error.hint if isinstance(error, ConfigError) else LOST_HINT
            answers.lost[host.name] = HostProblem(error.message, hint)
            answers.reports.pop(host.name, None)
            return None

    async def open_probe(host: Host) -> None:
        if (report := await ask(host, probes[host.name].open.remote(), START_S)) is not None:
            answers.reports[host.name] = report

    async def look(host: Host, listening: Sequence[Host], mark: Path) -> None:
        other_hosts = [other_host for other_host in listening if other_host != host]
        surroundings = await ask(host, probes[host.name].examine.remote(other_hosts, mark), ANSWER_S)
        if surroundings is None:
            return
        answers.unreachable |= {
            (host.name, other_host): problem for other_host, problem in surroundings.unreachable.items()
        }
        answers.pair_count += len(other_hosts)
        folder_problem = surroundings.folder_problem
        if not folder_problem and not await asyncio.to_thread(appears, mark / host.node_id):
            folder_problem = f"writes into another folder {mark.parent} than the driver's"
        if folder_problem:
            answers.unshared[host.name] = folder_problem

    try:
        with marked_folder(runs_dir) as mark:
            await asyncio.gather(*map(open_probe, hosts))
            listening = [
                replace(host, port=answers.reports[host.name].port) for host in hosts if host.name in answers.reports
            ]
            await asyncio.gather(*(look(host, listening, mark) for host in listening))
    finally:
        for probe in probes.values():
            ray.kill(probe)
    return answers
