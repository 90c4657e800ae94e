"""Placement groups: ranks are numbered by node and GPU, and missing resources are reported while Ray has no room."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import run, spec

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator import placement
from asyncrl_cli.orchestrator.actors import ActorFactory
from asyncrl_cli.orchestrator.nodes import Node, engine_wants, live_nodes, rank_wants
from asyncrl_cli.orchestrator.placement import PlacementGroup, rank_order
from asyncrl_cli.records.training import RankLocation
from asyncrl_cli.spec.sections import ExperimentSpec, NodeSelector


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 15)), min_size=1, max_size=16, unique=True).flatmap(
        st.permutations
    )
)
def test_ranks_are_numbered_by_node_and_by_gpu_on_a_node(places: list[tuple[int, int]]) -> None:
    locations = [RankLocation(f"id{host}", f"10.0.0.{host}", (str(gpu),)) for host, gpu in places]
    assert [places[index] for index in rank_order(locations)] == sorted(places)


def test_ranks_without_gpus_keep_the_order_of_their_bundles_on_a_node() -> None:
    locations = [RankLocation("b", "10.0.0.10"), RankLocation("a", "10.0.0.9")] * 2
    assert rank_order(locations) == [1, 3, 0, 2]


# -- waiting


class FullGroup(PlacementGroup):
    """A group without room, until ``room`` is set."""

    def __init__(self) -> None:
        super().__init__("engine-0", {"CPU": 1, "GPU": 2}, selector=NodeSelector())
        self.asked = 0
        self.room = False

    def ask(self) -> None:
        self.asked += 1

    async def ready(self, timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return self.room


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "FIRST_NOTICE_S", 0.0)
    monkeypatch.setattr(placement, "NOTICE_S", 0.0)
    monkeypatch.setattr(placement, "LOOK_S", 0.001)


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (Node("id", "10.0.0.1", total={"CPU": 8.0, "GPU": 4.0}, free={"CPU": 3.0}),)
    monkeypatch.setattr(placement, "live_nodes", lambda: nodes)
    monkeypatch.setattr(placement, "report_again", lambda _: None)


NEEDS = "it needs 1 CPU and 2 GPUs, all on one node; free: 3 of 8 CPUs, 0 of 4 GPUs on 10.0.0.1"


@pytest.mark.usefixtures("one_node")
def test_missing_resources_are_reported_until_there_is_room() -> None:
    group, reported = FullGroup(), list[str]()

    def warn(text: str) -> None:
        reported.append(text)
        group.room = len(reported) == 2

    run(group.wait_for_room(warn, limit_s=None))
    assert reported == [f"engine-0 waits until Ray has room for it: {NEEDS}"] * 2


@pytest.mark.usefixtures("one_node")
def test_a_wait_for_room_ends_with_the_numbers() -> None:
    with pytest.raises(RunError, match=rf"Ray found no room for engine-0 within 0 s: {NEEDS}") as error:
        run(FullGroup().wait_for_room(pytest.fail, limit_s=0.0))
    assert error.value.location == "cluster"
    assert error.value.hint


@pytest.mark.usefixtures("one_node")
async def test_a_node_that_dies_before_the_first_answer_is_noticed() -> None:
    group, reported = FullGroup(), list[str]()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def warn(text: str) -> None:
        reported.append(text)
        group.room = True
        answer.set_result("here")

    assert await group.first_answer(answer, warn) == "here"
    assert reported == [f"engine-0 waits until Ray has room for it: {NEEDS}"]


# -- Ray


FAILURES = {"num_failures": 3, "req_failure_prob": 100, "resp_failure_prob": 0, "in_flight_failure_prob": 0}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A cluster of two nodes on this machine: a head with one CPU; a node with two, two logical GPUs and a label.

    The first reservations fail, as on a host that has just come back under its old address.
    """
    failing = {"NodeManagerService.grpc_client.PrepareBundleResources": FAILURES}
    monkeypatch.setenv("RAY_testing_rpc_failure", json.dumps(failing))
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(placement, "LOOK_S", 3.0)
    head = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, num_gpus=2, labels={"role": "rollout"}, object_store_memory=80 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def sharing(pairs: int) -> ExperimentSpec:
    """Engines and ranks that share GPUs, 0.6 and 0.4, one CPU for both."""
    shared = spec(rollout={"engines": pairs, "gpus_per_engine": 0.6}, trainer={"ranks": pairs, "gpus_per_rank": 0.4})
    rollout = shared.rollout.model_copy(update={"threads_per_engine": 0})
    return shared.model_copy(update={"rollout": rollout})


def node_id(role: str | None) -> str:
    (found,) = (node.node_id for node in live_nodes() if node.labels.get("role") == role)
    return found


def nodes_of(group: PlacementGroup) -> tuple[str, ...]:
    """The node of each bundle."""
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(group._group)["bundles_to_node_id"]
    return tuple(nodes[index] for index in range(group.count))


@pytest.mark.stack
@pytest.mark.slow
async def test_groups_in_a_cluster(cluster: object) -> None:
    """One cluster for all checks, because each cluster takes ten seconds to start."""
    import ray

    @ray.remote
    class Somewhere:
        def where(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

        def gpus(self) -> list[str]:
            return [str(gpu) for gpu in ray.get_gpu_ids()]

    worker, head = node_id("rollout"), node_id(None)
    # By label: all resources of a bundle are on the node with the label.
    engine = PlacementGroup("engine-0", {"CPU": 1, "GPU": 0}, selector=NodeSelector(labels={"role": "rollout"}))
    engine.ask()
    engine.ask()
    # The first reservations fail, and Ray counts the node as full until it reports its resources again.
    waits = list[str]()
    await engine.wait_for_room(waits.append, limit_s=60.0)
    assert waits and "free: 0 of 2 CPUs" in waits[0]
    assert nodes_of(engine) == (worker,)
    first = Somewhere.options(**engine.options()).remote()
    assert await first.where.remote() == worker
    # A restart must use the same group: only the killed actor's room is free.
    ray.kill(first)
    again = Somewhere.options(**engine.options()).remote()
    assert await again.where.remote() == worker

    # More ranks than fit: the wait names the resources of each node, and ends when another group is removed.
    trainer = PlacementGroup("the trainer", {"CPU": 1}, selector=NodeSelector(), count=3)
    reported = list[str]()

    def warn(text: str) -> None:
        if not reported:
            engine.remove()
        reported.append(text)

    await trainer.wait_for_room(warn, limit_s=60.0)
    assert "it needs 3 × 1 CPU, each on one node; free:" in reported[0]
    assert reported[0].count(" of 1 CPUs on ") == reported[0].count(" of 2 CPUs on ") == 1
    assert sorted(nodes_of(trainer)) == sorted([head, worker, worker])
    actors = [Somewhere.options(**trainer.options(index)).remote() for index in range(3)]
    assert tuple(await asyncio.gather(*(actor.where.remote() for actor in actors))) == nodes_of(trainer)
    trainer.remove()

    # By id, and not by label.
    on_head = PlacementGroup("engine-1", {"CPU": 1}, selector=NodeSelector(labels={"ray.io/node-id": head}))
    await on_head.wait_for_room(pytest.fail, limit_s=60.0)
    assert nodes_of(on_head) == (head,)
    on_head.remove()
    nowhere = PlacementGroup("engine-1", {"CPU": 1}, selector=NodeSelector(labels={"role": "none"}))
    nowhere.ask()
    assert not await nowhere.ready(0.5)
    nowhere.remove()
    # After a cancelled wait, a group can be removed and requested again.
    full = PlacementGroup("engine-2", {"CPU": 3}, selector=NodeSelector())
    full.ask()
    waiting = asyncio.ensure_future(full.ready(60.0))
    assert not await full.ready(0.2)
    waiting.cancel()
    full.remove()
    full.remove()

    # Engines that share GPUs with ranks: each pair has one GPU, and each rank another one.
    factory = ActorFactory(sharing(2), Path(), Path())
    trainer = factory.trainer_group()
    await trainer.wait_for_room(pytest.fail, limit_s=60.0)
    share = engine_wants(factory.spec)
    engines = [Somewhere.options(**trainer.options(index, share)).remote() for index in range(2)]
    ranks = [Somewhere.options(**trainer.options(index, rank_wants(factory.spec))).remote() for index in range(2)]
    gpus = [await actor.gpus.remote() for actor in (*engines, *ranks)]
    assert gpus[:2] == gpus[2:], "an engine is on the GPU of its rank"
    assert sorted(gpus[2:]) == [["0"], ["1"]]
    # When an engine is ended, the rank keeps its place, and the engine's place is free for the next one.
    ray.kill(engines[1])
    again = Somewhere.options(**trainer.options(1, share)).remote()
    assert await again.gpus.remote() == await ranks[1].gpus.remote() == gpus[1]
