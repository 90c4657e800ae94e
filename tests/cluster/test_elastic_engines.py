"""Real Ray over the hosts: a run notices a drained or dead node, and the node can join again."""

from __future__ import annotations

import sys

import pytest

from tests.cluster.hosts import until
from tests.cluster.ray_cluster import RayCluster

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.rotating]

WATCHES = """
import sys, time, ray
from asyncrl_cli.orchestrator.nodes import draining_nodes, why_gone
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1, label_selector={"role": "rollout"})
class Busy:  # Ray ends a node that is drained and idle
    def node(self):
        return ray.get_runtime_context().get_node_id()

busy = Busy.remote()
node = ray.get(busy.node.remote())
reason = None
while reason != "its node is gone":
    if (now := why_gone(node).partition(",")[0]) != reason:
        reason = now
        print("reason:", reason, "by notice" if node in draining_nodes() else "", flush=True)
    time.sleep(0.2)
"""


def test_drain_notices_and_deaths_are_noticed_and_the_host_can_rejoin(ray_cluster: RayCluster) -> None:
    head, other = ray_cluster.host("head"), ray_cluster.host("other", labels={"role": "rollout"})
    first_id = ray_cluster.nodes()[other.address]
    watching = head.start(sys.executable, "-c", WATCHES, ray_cluster.address)

    def reasons() -> list[str]:
        return [line.strip() for line in watching.printed().splitlines() if line.startswith("reason:")]

    until(lambda: reasons() == ["reason:"], "a living node")
    ray_cluster.drain(other, 600)
    until(lambda: reasons()[1:] == ["reason: its node is being drained by notice"], "the notice")
    other.kill()
    until(lambda: reasons()[2:] == ["reason: its node is gone"], "Ray to notice the death")
    assert watching.wait(120) == 0, watching.printed()
    assert other.address not in ray_cluster.nodes()
    other.boot()
    ray_cluster.start(other)
    ray_cluster.wait_for(other)
    assert ray_cluster.nodes()[other.address] != first_id
    ray_cluster.drain(other)  # it is idle, so Ray ends it
    until(lambda: other.address not in ray_cluster.nodes(), "the drained host to leave")
