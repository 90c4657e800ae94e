"""The nodes that a part of the run may use, the actors that fit on them, and reports of missing resources."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from stand_ins import spec

from asyncrl_cli.checks import machine
from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator import nodes as orchestrator_nodes
from asyncrl_cli.orchestrator.nodes import SHOWN_NODES, Node, check_resources, eligible, numbers_of, shortage
from asyncrl_cli.spec.sections import ClusterSpec, ExperimentSpec, NodeSelector


def node(number: int, cpus: float = 8.0, gpus: float = 0.0, labels: dict[str, str] | None = None) -> Node:
    total = {"CPU": cpus, "GPU": gpus}
    return Node(f"id{number}", f"10.0.0.{number}", f"host-{number}", labels or {}, total, total)


def spec_with(engines: int, gpus: int, cluster: ClusterSpec | None = None) -> ExperimentSpec:
    """A spec with this many GPUs per engine, and one rank with one CPU."""
    base = spec()
    rollout = base.rollout.model_copy(update={"engines": engines, "gpus_per_engine": gpus})
    return base.model_copy(update={"rollout": rollout, "cluster": cluster or ClusterSpec()})


# -- which nodes


LABELS = [{}, {"market": "spot"}, {"market": "on-demand"}, {"market": "spot", "role": "rollout"}]


@pytest.mark.parametrize(
    ("selector", "numbers"),
    [
        (NodeSelector(), [0, 1, 2, 3]),
        (NodeSelector(labels={"market": "spot"}), [1, 3]),
        (NodeSelector(labels={"market": "!spot"}), [0, 2]),
        (NodeSelector(labels={"market": "in(spot, on-demand)"}), [1, 2, 3]),
        (NodeSelector(labels={"market": "!in(spot,on-demand)"}), [0]),
        (NodeSelector(labels={"market": "spot", "role": "rollout"}), [3]),
    ],
)
def test_a_selector_chooses_by_label(selector: NodeSelector, numbers: list[int]) -> None:
    nodes = [node(number, labels=labels) for number, labels in enumerate(LABELS)]
    assert [one.node_id for one in eligible(nodes, selector)] == [f"id{number}" for number in numbers]


def test_addresses_are_in_the_order_of_their_numbers() -> None:
    addresses = ["10.0.0.9", "10.0.0.10", "10.0.1.1", "fe80::1", "fe80::b"]
    assert sorted(set(addresses), key=numbers_of) == addresses


# -- what fits


SIZES = st.integers(0, 4)


@given(
    st.lists(st.tuples(SIZES, SIZES, st.sampled_from(["engines", "ranks", "both"])), min_size=1, max_size=3),
    st.integers(0, 3),
    st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(any),
    st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(any),
)
@example([(4, 4, "both"), (4, 4, "both")], 2, (1, 3), (1, 2))
def test_a_run_that_fits_is_never_refused(
    sizes: list[tuple[int, int, str]], ranks: int, engine: tuple[int, int], rank: tuple[int, int]
) -> None:
    nodes = [node(index, cpus, gpus, {use: "yes"}) for index, (cpus, gpus, use) in enumerate(sizes)]
    most_engines = None
    for placement in product(range(ranks + 1), repeat=len(nodes)):
        if sum(placement) != ranks:
            continue
        engines = 0
        for rank_count, (cpus, gpus, use) in zip(placement, sizes, strict=True):
            left = [cpus - rank_count * rank[0], gpus - rank_count * rank[1]]
            if min(left) < 0 or (rank_count and use == "engines"):
                break
            fits = [amount // wanted for amount, wanted in zip(left, engine, strict=True) if wanted]
            engines += min(fits) if use != "ranks" else 0
        else:
            most_engines = engines if most_engines is None else max(most_engines, engines)
    resources = [dict(zip(("CPU", "GPU"), amounts, strict=True)) for amounts in (engine, rank)]
    cluster = ClusterSpec(
        address="auto",
        engines=NodeSelector(labels={"ranks": "!yes"}),
        trainer=NodeSelector(labels={"engines": "!yes"}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orchestrator_nodes, "engine_wants", lambda _: resources[0])
        patch.setattr(orchestrator_nodes, "bundle_wants", lambda _: resources[1])
        if most_engines is not None and (most_engines or ranks):
            assert check_resources(spec_with(1, 0, cluster), nodes, most_engines, ranks).startswith("room for ")


def refusal(spec: ExperimentSpec, nodes: list[Node]) -> RunError:
    with pytest.raises(RunError) as error:
        check_resources(spec, nodes, spec.rollout.min_engines, spec.trainer.ranks)
    assert error.value.hint
    return error.value


@pytest.mark.parametrize(("engines", "gpus", "free_gpus"), [("1 engine", 4, 2), ("3 engines", 2, 3)])
def test_resources_that_no_node_has_together_are_refused_with_the_reason(
    engines: str, gpus: int, free_gpus: int
) -> None:
    error = refusal(spec_with(int(engines[0]), gpus), [node(1, 8, free_gpus), node(2, 8, free_gpus)])
    assert error.location == "cluster"
    assert error.message == (
        f"the run needs {engines} of 1 CPU and {gpus} GPUs and 1 trainer rank of 1 CPU, each on one node, and there "
        f"are only 8 CPUs and {free_gpus} GPUs on host-1 (10.0.0.1); 8 CPUs and {free_gpus} GPUs on host-2 (10.0.0.2)"
    )


def test_an_autoscaling_cluster_is_not_refused_for_missing_resources() -> None:
    grows = ClusterSpec(address="auto", autoscaling=True, engines=NodeSelector(labels={"role": "rollout"}))
    assert "adds others" in check_resources(spec_with(3, 2, grows), [node(1, 1)], 3, 1)


def test_only_the_actors_that_a_command_starts_must_fit() -> None:
    assert check_resources(spec_with(1, 8), [node(1, 1)], 0, 1) == "room for 1 trainer rank of 1 CPU on 1 node"
    with pytest.raises(RunError, match="needs 1 engine of 1 CPU and 8 GPUs, each on one node"):
        check_resources(spec_with(1, 8), [node(1, 1)], 1, 0)


def test_labels_that_no_node_has_are_refused() -> None:
    cluster = ClusterSpec(address="auto", engines=NodeSelector(labels={"role": "rollout", "market": "!spot"}))
    error = refusal(spec_with(1, 0, cluster), [node(1), node(2, labels={"role": "trainer"})])
    assert (error.location, error.message) == (
        "cluster.engines.labels",
        "no node of the cluster has the labels role=rollout, market=!spot",
    )


# -- what is missing


def test_a_shortage_in_a_large_cluster_has_a_short_text() -> None:
    text = shortage({"CPU": 1}, 1, [node(number) for number in range(SHOWN_NODES + 5)])
    assert text.count("of 8 CPUs") == SHOWN_NODES
    assert text.endswith(" and 5 more")


def test_an_engine_and_a_rank_that_share_a_gpu_need_one() -> None:
    shared = spec(rollout={"engines": 2, "gpus_per_engine": 0.4}, trainer={"ranks": 2, "gpus_per_rank": 0.6})
    assert check_resources(shared, [node(1, 8, 2)], 2, 2) == (
        "room for 2 engine-and-rank pairs of 2 CPUs and 1 GPU on 1 node"
    )
    assert "needs 2 engine-and-rank pairs" in refusal(shared, [node(1, 8, 1)]).message
    # Without a rank, as with `serve`, an engine needs only its share.
    assert check_resources(shared, [node(1, 8, 1)], 2, 0) == "room for 2 engines of 1 CPU and 0.4 GPUs on 1 node"
    assert machine.wanted_gpus(shared) == 2
    assert machine.wanted_gpus(spec_with(1, 4)) == 4
