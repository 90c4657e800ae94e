"""Hosts are examined on a real cluster of several nodes on this machine. No actor remains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts import examine
from asyncrl_cli.checks.hosts.examine import examine_cluster, hosts_for, refuse
from asyncrl_cli.checks.hosts.probe import Host
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.orchestrator.cluster import Actors
from asyncrl_cli.orchestrator.nodes import Node
from asyncrl_cli.sizing.host import GIB
from asyncrl_cli.spec.sections import NodeSelector
from tests.orchestrator.stand_ins import spec

NODES = (
    Node("1" * 40, "10.0.0.1", "head", {}, {}),
    Node("2" * 40, "10.0.0.2", "cpus", {"role": "trainer"}, {"CPU": 8.0}),
    Node("3" * 40, "10.0.0.3", "gpus", {"role": "rollout"}, {"CPU": 8.0, "GPU": 4.0}),
)


def placed(engines: NodeSelector, trainer: NodeSelector, gpus: int = 0, ranks: int = 1) -> Any:
    wanted = spec()
    rollout = wanted.rollout.model_copy(update={"gpus_per_engine": gpus})
    trainers = wanted.trainer.model_copy(update={"ranks": ranks})
    cluster = wanted.cluster.model_copy(update={"engines": engines, "trainer": trainer})
    return wanted.model_copy(update={"rollout": rollout, "trainer": trainers, "cluster": cluster})


def test_only_hosts_that_the_run_may_use_are_examined() -> None:
    anywhere, there = NodeSelector(), NodeSelector(labels={"role": "rollout"})
    named = [(host.name, host.share) for host in hosts_for(None, NODES, "3" * 40)]
    assert named == [("gpus (10.0.0.3)", 1.0), ("head (10.0.0.1)", 1.0), ("cpus (10.0.0.2)", 1.0)]
    trainer = NodeSelector(labels={"role": "trainer"})
    for wanted, expected in (
        (placed(anywhere, anywhere), {"head": 0.0, "cpus": 1.0, "gpus": 1.0}),
        (placed(there, there, gpus=4), {"head": 0.0, "gpus": 1.0}),
        (placed(there, there), {"head": 0.0, "gpus": 1.0}),
        (placed(there, trainer), {"head": 0.0, "cpus": 1.0, "gpus": 1.0}),
        (placed(there, trainer, ranks=32), {"head": 0.0, "cpus": 8 / 32, "gpus": 1.0}),
    ):
        assert {host.name.split()[0]: host.share for host in hosts_for(wanted, NODES, "1" * 40)} == expected
    apart = placed(there, trainer)
    for actors, names in ((Actors(1, 0), ["head", "gpus"]), (Actors(0, 2), ["head", "cpus"])):
        found = hosts_for(apart, NODES, "1" * 40, actors)
        assert [host.name.split()[0] for host in found] == names


def test_hosts_with_one_name_and_address_get_different_names() -> None:
    same = [Node(digit * 40, "10.0.0.1", "host") for digit in "12"]
    assert [host.name for host in hosts_for(None, same, "1" * 40)] == [
        "host (10.0.0.1) 11111111",
        "host (10.0.0.1) 22222222",
    ]


def test_a_start_is_refused_at_the_first_failure_and_warned_before() -> None:
    warned: list[str] = []
    findings = [
        Finding("token", Status.WARNING, "no token", "set one"),
        Finding("versions", Status.OK, "equal"),
        Finding("connections", Status.FAILURE, "a -> b: silence", "open it"),
    ]
    with pytest.raises(ConfigError) as error:
        refuse(iter(findings), warned.append)
    assert (error.value.message, error.value.location, error.value.hint) == (
        "a -> b: silence",
        "cluster: connections",
        "open it",
    )
    assert warned == ["token: no token. set one"]
    refuse(iter(findings[:2]), warned.append)


def test_a_cluster_that_does_not_answer_is_a_finding(tmp_path: Path) -> None:
    (finding,) = examine_cluster("127.0.0.1:1", None, tmp_path, 0)
    assert (finding.check, finding.status) == ("cluster", "failure")
    assert "no Ray cluster answers at 127.0.0.1:1" in finding.found and "ray start" in finding.hint


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
def test_a_cluster_of_three_nodes(cluster: str, tmp_path: Path) -> None:
    found = {finding.check: finding for finding in examine_cluster(cluster, None, tmp_path / "runs", 10_000 * GIB)}
    assert found["cluster"].found == f"3 nodes at {cluster}"
    # The finding about the token depends on this machine's environment.
    assert {found[name].status for name in ("cluster", "versions", "connections", "shared folder")} == {"ok"}
    assert found.keys() - {"token"} == {
        *("cluster", "versions", "shared folder"),
        "connections",
        "host memory",
    }
    assert found["connections"].found == "6 of 6 pairs"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.stack
def test_hosts_that_give_no_answer_are_named_and_the_others_examined(cluster: str, tmp_path: Path) -> None:
    import ray

    ray.init(cluster, log_to_driver=False, logging_level="ERROR")
    try:
        first, second, _ = ray.nodes()
        hosts = [
            Host(first["NodeID"], "one", first["NodeManagerAddress"]),
            Host(second["NodeID"], "two", second["NodeManagerAddress"]),
            Host("ab" * 28, "gone", "10.0.0.9"),
            Host(first["NodeID"], "elsewhere", "192.0.2.1"),
        ]
        findings = examine.examine_hosts(hosts, tmp_path, 0)
        alive = {actor for actor in _states() if actor != "DEAD"}
    finally:
        ray.shutdown()
    lost = {re.split("[: ]", finding.found)[0]: finding for finding in findings if finding.check == "hosts"}
    assert {name: one.status for name, one in lost.items()} == {"gone": "warning", "elsewhere": "failure"}
    assert "cannot listen there" in lost["elsewhere"].found and "--node-ip-address" in lost["elsewhere"].hint
    (pairs,) = (one for one in findings if one.check == "connections")
    assert pairs.found == "2 of 2 pairs" and not alive


def _states() -> list[str]:
    """The states of all actors of the cluster."""
    from ray._private.state import actors

    return [actor["State"] for actor in actors().values()]
