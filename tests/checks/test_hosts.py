"""Hosts are examined over real connections, and each problem names its hosts and has a hint. No actor remains."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.checks import hosts as checks
from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts import (
    MAX_LISTED,
    Host,
    HostProbe,
    HostProblem,
    HostReport,
    connection_problem,
    examine_cluster,
    hosts_for,
    refuse,
)
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.orchestrator.cluster import Actors
from asyncrl_cli.orchestrator.nodes import Node
from asyncrl_cli.sizing.host import GIB
from asyncrl_cli.spec.sections import NodeSelector
from tests.orchestrator.stand_ins import spec

pytestmark = pytest.mark.slow

HERE = "127.0.0.1"
VERSIONS = {"asyncrl": "0.2", "python": "3.11.9", "torch": "2.11.0+cpu", "ray": "2.60.0", "mlflow": "3.10"}
REPORT = HostReport(port=1, versions=VERSIONS, code="c" * 64, memory=8 * GIB, token=True)
NODES = (
    Node("1" * 40, "10.0.0.1", "head", {}, {}),
    Node("2" * 40, "10.0.0.2", "cpus", {"role": "trainer"}, {"CPU": 8.0}),
    Node("3" * 40, "10.0.0.3", "gpus", {"role": "rollout"}, {"CPU": 8.0, "GPU": 4.0}),
)


def placed(engines: NodeSelector, trainer: NodeSelector, gpus: int = 0, ranks: int = 1) -> Any:
    base = spec()
    rollout = base.rollout.model_copy(update={"gpus_per_engine": gpus})
    trainers = base.trainer.model_copy(update={"ranks": ranks})
    cluster = base.cluster.model_copy(update={"engines": engines, "trainer": trainer})
    return base.model_copy(update={"rollout": rollout, "trainer": trainers, "cluster": cluster})


def test_only_hosts_that_the_run_may_use_are_examined() -> None:
    anywhere, there = NodeSelector(), NodeSelector(labels={"role": "rollout"})
    named = [(host.name, host.share) for host in hosts_for(None, NODES, "3" * 40)]
    assert named == [("gpus (10.0.0.3)", 1.0), ("head (10.0.0.1)", 1.0), ("cpus (10.0.0.2)", 1.0)]
    trainer = NodeSelector(labels={"role": "trainer"})
    for placement, expected in (
        (placed(anywhere, anywhere), {"head": 0.0, "cpus": 1.0, "gpus": 1.0}),
        (placed(there, there, gpus=4), {"head": 0.0, "gpus": 1.0}),
        (placed(there, trainer, ranks=32), {"head": 0.0, "cpus": 8 / 32, "gpus": 1.0}),
    ):
        assert {host.name.split()[0]: host.share for host in hosts_for(placement, NODES, "1" * 40)} == expected
    apart = placed(there, trainer)
    for actors, names in ((Actors(1, 0), ["head", "gpus"]), (Actors(0, 2), ["head", "cpus"])):
        assert [host.name.split()[0] for host in hosts_for(apart, NODES, "1" * 40, actors)] == names
    same = [Node(digit * 40, "10.0.0.1", "host") for digit in "12"]
    assert [host.name for host in hosts_for(None, same, "1" * 40)] == [
        "host (10.0.0.1) 11111111",
        "host (10.0.0.1) 22222222",
    ]


def test_start_is_refused_at_the_first_failure_after_warnings() -> None:
    warnings: list[str] = []
    findings = [
        Finding("token", Status.WARNING, "no token", "set one"),
        Finding("connections", Status.FAILURE, "a -> b: silence", "open it"),
    ]
    with pytest.raises(ConfigError, match="a -> b: silence") as error:
        refuse(iter(findings), warnings.append)
    assert (error.value.location, error.value.hint) == ("cluster: connections", "open it")
    assert warnings == ["token: no token. set one"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of three nodes on this machine."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    try:
        yield made.address
    finally:
        made.shutdown()


@pytest.mark.stack
def test_cluster_of_three_nodes_passes_all_checks(cluster: str, tmp_path: Path) -> None:
    findings = {finding.check: finding for finding in examine_cluster(cluster, None, tmp_path / "runs", 10_000 * GIB)}
    assert findings["cluster"].found == f"3 nodes at {cluster}"
    # The finding about the token depends on this machine's environment.
    passed = {"cluster", "versions", "connections", "shared folder"}
    assert {findings[name].status for name in passed} == {"ok"}
    assert findings.keys() - {"token"} == passed | {"host memory"}
    assert findings["connections"].found == "6 of 6 pairs"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.stack
def test_silent_hosts_are_named_and_the_others_examined(cluster: str, tmp_path: Path) -> None:
    import ray
    from ray._private.state import actors

    ray.init(cluster, log_to_driver=False, logging_level="ERROR")
    try:
        first, second, _ = ray.nodes()
        hosts = [
            Host(first["NodeID"], "one", first["NodeManagerAddress"]),
            Host(second["NodeID"], "two", second["NodeManagerAddress"]),
            Host("ab" * 28, "gone", "10.0.0.9"),
            Host(first["NodeID"], "elsewhere", "192.0.2.1"),
        ]
        findings = checks.examine_hosts(hosts, tmp_path, 0)
        states = {actor["State"] for actor in actors().values()}
    finally:
        ray.shutdown()
    lost = {re.split("[: ]", finding.found)[0]: finding for finding in findings if finding.check == "hosts"}
    assert {name: finding.status for name, finding in lost.items()} == {"gone": "failure", "elsewhere": "failure"}
    assert "cannot listen there" in lost["elsewhere"].found and "--node-ip-address" in lost["elsewhere"].hint
    (connections,) = (finding for finding in findings if finding.check == "connections")
    assert connections.found == "2 of 2 pairs" and states <= {"DEAD"}


async def problem_between(node_id: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The problem of a connection to a probe that should have this id."""
    monkeypatch.setattr(checks, "CONNECT_S", 1.0)
    report = await HostProbe(Host("two", "two", HERE)).open()
    assert "torch" in report.versions and len(report.code) == 64 and report.memory > 0
    return await connection_problem(Host(node_id, "two", HERE, port=report.port))


async def test_probe_reaches_its_host_and_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await problem_between("two", monkeypatch) == ""
    assert "another process answered" in await problem_between("three", monkeypatch)
    with socket.socket() as bound:
        bound.bind((HERE, 0))
        assert "Connection refused" in await connection_problem(Host("two", "two", HERE, port=bound.getsockname()[1]))
    with socket.create_server((HERE, 0)) as silent:
        assert "no answer within 1 s" in await connection_problem(
            Host("two", "two", HERE, port=silent.getsockname()[1])
        )


def test_shared_folder_is_proved_and_left_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    with checks.marked_folder(folder) as mark:
        assert checks.folder_problem(mark, "two") == ""
        assert checks.appears(mark / "two")
    assert list(tmp_path.iterdir()) == []
    here, there = tmp_path / "here", tmp_path / "there"
    with checks.marked_folder(here) as mark:
        (here / "a-run").mkdir()
        other = there / mark.name
        assert checks.folder_problem(other, "two", 0.0) == f"has no folder {there}"
        there.mkdir()
        assert checks.folder_problem(other, "two", 0.0) == f"does not see the driver's files in {there}"
        assert not checks.appears(mark / "two", 0.0)
    assert [path.name for path in here.iterdir()] == ["a-run"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"), checks.marked_folder(tmp_path / "file"):
        pass


def test_hosts_with_an_old_driver_are_named_together() -> None:
    old = replace(REPORT, driver=HostProblem("the NVIDIA driver is 550", "install driver 580"))
    (finding,) = checks.judge_drivers({"a": old, "b": REPORT, "c": old})
    assert finding == Finding("GPUs", Status.FAILURE, "a; c: the NVIDIA driver is 550", "install driver 580")


@pytest.mark.parametrize(
    ("package", "version", "fails"),
    [
        ("torch", "2.12.0+cpu", True),
        ("torch", "2.11.0+cu130", False),
        ("torch", None, False),
        ("python", "3.12.9", True),
        ("python", "3.11.2", False),
        ("mlflow", "3.11", False),
    ],
)
def test_versions_that_cannot_work_together_name_both_hosts(package: str, version: str | None, fails: bool) -> None:
    versions = {name: value for name, value in (VERSIONS | {package: version}).items() if value is not None}
    (finding,) = checks.judge_versions({"a": REPORT, "b": replace(REPORT, versions=versions), "c": REPORT})
    assert finding.status == ("failure" if fails else "ok")
    if fails:
        assert finding.found == f"{package}: {VERSIONS[package]} on a, {version} on b" and finding.hint
    (finding,) = checks.judge_versions({"a": REPORT, "b": replace(REPORT, code="d" * 64)})
    assert finding.status == "failure" and "on a: b" in finding.found


def test_failed_pairs_are_named_with_both_ends() -> None:
    pairs = {("a", str(index)): "gave no answer" for index in range(MAX_LISTED + 2)}
    (finding,) = checks.judge_connections(pairs, 30)
    assert finding.found.startswith("a -> 0: 0 gave no answer; ") and finding.found.endswith("and 2 more")
    assert finding.status == "failure" and finding.hint


def memory(replica_bytes: int, **hosts: tuple[int, float]) -> Finding:
    """The finding for hosts with these GiB and shares of a version."""
    reports = {name: replace(REPORT, memory=gib * GIB) for name, (gib, _) in hosts.items()}
    with_shares = [Host(name, name, "", share) for name, (_, share) in hosts.items() if share]
    return checks.judge_memory(with_shares, reports, replica_bytes)


def test_hosts_with_weights_need_memory_for_two_versions() -> None:
    assert memory(4 * GIB, a=(8, 1.0), driver=(0, 0.0)).status == "ok"
    finding = memory(4 * GIB, a=(8, 1.0), b=(7, 1.0))
    assert finding.status == "failure" and "b has 7.0 GiB available and needs 8.0" in finding.found
    assert "a has" not in finding.found
    shards = memory(4 * GIB, a=(9, 1.0), b=(3, 0.125))
    assert shards.status == "ok" and "9.0 GiB available (a); its share of two versions takes 8.0 GiB" in shards.found


def test_missing_token_is_a_warning_and_unshared_folder_a_failure() -> None:
    finding = checks.judge_token({"a": REPORT, "b": replace(REPORT, token=False)})
    assert finding.status == "warning" and "on b" in finding.found and "RAY_AUTH_MODE" in finding.hint
    unshared = checks.judge_folder(Path("/runs"), {"b": "has no folder /runs"})
    assert unshared.status == "failure" and unshared.found == "b has no folder /runs" and "runs_dir" in unshared.hint
