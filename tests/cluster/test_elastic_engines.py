"""Real Ray over the hosts: a run notices a dead node, and the node can join again."""

from __future__ import annotations

import sys

import pytest

from tests.cluster.hosts import until
from tests.cluster.ray_cluster import RayCluster

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.rotating]

WATCHES = """
import sys, time, ray
from asyncrl_cli.orchestrator.nodes import why_gone
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1, label_selector={"role": "rollout"})
class Busy:
    def node(self):
        return ray.get_runtime_context().get_node_id()

busy = Busy.remote()
node = ray.get(busy.node.remote())
reason = None
while reason != "its node is gone":
    if (now := why_gone(node)) != reason:
        reason = now
        print("reason:", reason, flush=True)
    time.sleep(0.2)
"""


def test_a_death_is_noticed_and_the_host_can_rejoin(ray_cluster: RayCluster) -> None:
    head, other = ray_cluster.host("head"), ray_cluster.host("other", labels={"role": "rollout"})
    first_id = ray_cluster.nodes()[other.address]
    watching = head.start(sys.executable, "-c", WATCHES, ray_cluster.address)

    def reasons() -> list[str]:
        return [line.strip() for line in watching.printed().splitlines() if line.startswith("reason:")]

    until(lambda: reasons() == ["reason:"], "a living node")
    other.kill()
    until(lambda: reasons()[1:] == ["reason: its node is gone"], "Ray to notice the death")
    assert watching.wait(120) == 0, watching.printed()
    assert other.address not in ray_cluster.nodes()
    other.boot()
    ray_cluster.start(other)
    ray_cluster.wait_for(other)
    assert ray_cluster.nodes()[other.address] != first_id
