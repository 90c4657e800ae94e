"""Findings from measurements of several hosts: each problem names its hosts and has a hint."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts import verdicts
from asyncrl_cli.checks.hosts.probe import (
    ANOTHER_HOST,
    CLOSED,
    NO_ROUTE,
    REFUSED,
    SILENT,
    Host,
    HostProblem,
    HostReport,
)
from asyncrl_cli.checks.hosts.verdicts import MAX_LISTED
from asyncrl_cli.checks.machine import GIB

pytestmark = pytest.mark.slow

VERSIONS = {"asyncrl": "0.2", "python": "3.11.9", "torch": "2.11.0+cpu", "ray": "2.60.0", "mlflow": "3.10"}
FACTS = HostReport(port=1, versions=VERSIONS, code="c" * 64, memory=8 * GIB, token=True)
PROBLEMS = (ANOTHER_HOST, CLOSED, NO_ROUTE, REFUSED, SILENT)
pairs_of_hosts = st.integers(2, 9).map(lambda count: list(permutations([f"h{index}" for index in range(count)], 2)))


def with_versions(**versions: str | None) -> HostReport:
    return replace(FACTS, versions={k: v for k, v in (VERSIONS | versions).items() if v is not None})


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


def test_hosts_with_an_old_driver_are_named_together() -> None:
    old = replace(FACTS, driver=HostProblem("the NVIDIA driver is 550", "install driver 580"))
    (finding,) = verdicts.judge_drivers({"a": old, "b": FACTS, "c": old})
    assert finding == Finding("GPUs", Status.FAILURE, "a; c: the NVIDIA driver is 550", "install driver 580")
    assert list(verdicts.judge_drivers({"b": FACTS})) == []


@pytest.mark.parametrize(
    ("package", "version", "fails"),
    [
        ("torch", "2.12.0+cpu", True),
        ("torch", "2.11.0+cu130", False),
        ("torch", None, False),
        ("ray", "2.61.0", True),
        ("python", "3.12.9", True),
        ("python", "3.11.2", False),
        ("mlflow", "3.11", False),
    ],
)
def test_versions_that_cannot_work_together_name_both_hosts(package: str, version: str | None, fails: bool) -> None:
    (finding,) = verdicts.judge_versions({"a": FACTS, "b": with_versions(**{package: version}), "c": FACTS})
    assert finding.status == ("failure" if fails else "ok")
    if fails:
        assert finding.found == f"{package}: {VERSIONS[package]} on a, {version} on b" and finding.hint


def test_other_code_is_a_failure_even_with_equal_versions() -> None:
    (finding,) = verdicts.judge_versions({"a": FACTS, "b": replace(FACTS, code="d" * 64)})
    assert finding.status == "failure" and "on a: b" in finding.found


@given(pairs_of_hosts, st.data())
def test_a_pair_that_fails_is_named_with_both_ends_and_a_hint(
    pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    failed = data.draw(st.dictionaries(st.sampled_from(pairs), st.sampled_from(PROBLEMS)))
    findings = list(verdicts.judge_connections(failed, len(pairs)))
    failures = [finding for finding in findings if finding.status == "failure"]
    assert bool(failures) == bool(failed)
    for ((source, target), problem), finding in zip(failed.items(), failures[:MAX_LISTED], strict=False):
        assert finding.found == f"{source} -> {target}: {target} {problem.text}"
        assert finding.hint == problem.hint
    assert len(failures) == min(len(failed), MAX_LISTED + 1)
    if len(failed) > MAX_LISTED:
        assert failures[-1].found.startswith(f"{len(failed) - MAX_LISTED} more pairs fail; ")
    assert ("ok" in statuses(findings)) == (len(failed) < len(pairs))


def test_the_host_that_fails_with_all_others_is_pointed_out() -> None:
    hosts = [f"h{index}" for index in range(6)]
    failed = {pair: SILENT for pair in permutations(hosts, 2) if "h3" in pair}
    summary = list(verdicts.judge_connections(failed, 30))[MAX_LISTED]
    assert summary.found == "4 more pairs fail; h3 is in 10 of all 10" and "h3 first" in summary.hint


def memory(replica_bytes: int, **hosts: tuple[int, float]) -> Finding:
    """The finding for hosts with these GiB and shares of a version."""
    reports = {name: replace(FACTS, memory=gib * GIB) for name, (gib, _) in hosts.items()}
    with_shares = [Host(name, name, "", share) for name, (_, share) in hosts.items() if share]
    return verdicts.judge_memory(with_shares, reports, replica_bytes)


def test_hosts_with_weights_need_two_versions_of_them() -> None:
    assert memory(4 * GIB, a=(8, 1.0), driver=(0, 0.0)).status == "ok"
    finding = memory(4 * GIB, a=(8, 1.0), b=(7, 1.0))
    assert finding.status == "failure" and "b has 7.0 GiB available and needs 8.0" in finding.found
    assert "a has" not in finding.found
    shards = memory(4 * GIB, a=(9, 1.0), b=(3, 0.125))
    assert shards.status == "ok" and "9.0 GiB available (a); its share of two versions takes 8.0 GiB" in shards.found
    assert memory(0, a=(1, 1.0)).status == "ok", "without a spec the size of the weights is unknown"
    assert memory(0).status == "ok"


def test_a_cluster_without_a_token_is_a_warning() -> None:
    assert verdicts.judge_token({"a": FACTS, "b": FACTS}).status == "ok"
    finding = verdicts.judge_token({"a": FACTS, "b": replace(FACTS, token=False)})
    assert finding.status == "warning" and "on b" in finding.found and "RAY_AUTH_MODE" in finding.hint


def test_lost_hosts_and_unshared_folders_are_failures() -> None:
    lost, left = verdicts.judge_lost(dict.fromkeys("ab", HostProblem("the process died", "look")), {"b"})
    assert (lost.status, lost.found, lost.hint) == ("failure", "a: the process died", "look")
    assert (left.status, left.found) == ("warning", "b has left the cluster during the check") and left.hint
    assert verdicts.judge_folder(Path("/runs"), {}).found == "all hosts read and write /runs"
    unshared = verdicts.judge_folder(Path("/runs"), {"b": "has no folder /runs"})
    assert unshared.status == "failure" and unshared.found == "b has no folder /runs" and "runs_dir" in unshared.hint
