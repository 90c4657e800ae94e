"""The nodes of a Ray cluster: which nodes a part of the run may use, and whether its actors fit on them.

``live_nodes`` and ``why_gone`` ask Ray, and may block; the other functions are pure.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.spec.sections import ExperimentSpec, NodeSelector
from asyncrl_cli.spec.sharing import shares_gpus

Resources = Mapping[str, float]
SHOWN_NODES = 8
"""Largest number of nodes that a message lists."""
ROUNDING = 1e-6
"""Tolerance in comparisons: Ray counts resources in ten-thousandths, so its floats have smaller rounding errors."""
LOOK_S = 1.0
"""Seconds between two checks of a node's state."""
NODE_DEATH_S = 20.0
"""Seconds to wait after a lost connection for Ray to report the node as lost, which takes it about 15 seconds."""


@dataclass(frozen=True, slots=True)
class Node:
    """One live node. ``total``: its resources. ``free``: the resources that no actor or placement group holds."""

    node_id: str
    address: str
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    total: Resources = field(default_factory=dict)
    free: Resources = field(default_factory=dict)

    def __str__(self) -> str:
        return self.address if self.name in ("", self.address) else f"{self.name} ({self.address})"


def live_nodes() -> tuple[Node, ...]:
    """The cluster's nodes, by address. Asks Ray, which takes some milliseconds."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray has no public call that tells nodes apart

    free = available_resources_per_node()
    nodes = [
        Node(
            node["NodeID"],
            address=node["NodeManagerAddress"],
            name=node["NodeManagerHostname"],
            labels=node.get("Labels", {}),
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return tuple(sorted(nodes, key=lambda node: (numbers_of(node.address), node.node_id)))


def report_again(nodes: Sequence[Node]) -> None:
    """Have the nodes report their free resources again; does not wait for it.

    After a reservation that failed, Ray 2.60 counts a node's resources as used until the node's report changes. This
    happens when a host comes back under its old address. A task that holds a part of the node's own resource is enough.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(lambda: None)
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        task.options(resources={f"node:{node.address}": 0.001}, scheduling_strategy=strategy).remote()


def why_gone(node_id: str) -> str:
    """Why an actor is lost with its node; empty while the node lives."""
    return "" if node_id in {node.node_id for node in live_nodes()} else "its node is gone"


async def why_lost(ask: Callable[[], str], unreachable: bool) -> str:
    """The answer of ``ask``, which may block: why a lost actor should not be restarted, or an empty text if it should.

    ``unreachable``: Ray may not know yet that the node is lost, so ``ask`` is repeated for up to ``NODE_DEATH_S``.
    """
    deadline = time.monotonic() + (NODE_DEATH_S if unreachable else 0.0)
    while not (reason := await asyncio.to_thread(ask)) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)
    return reason


def numbers_of(address: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts addresses by their numbers: 10.0.0.9 before 10.0.0.10."""
    components = filter(None, re.split(r"[.:]", address))
    return tuple((0, int(component), "") if component.isdecimal() else (1, 0, component) for component in components)


def eligible(nodes: Sequence[Node], selector: NodeSelector) -> tuple[Node, ...]:
    """The nodes that a part of the run may use."""
    labels = selector.labels.items()
    return tuple(
        node for node in nodes if all(_matches(node.labels.get(key), expression) for key, expression in labels)
    )


def _matches(value: str | None, expression: str) -> bool:
    """True if a label's value matches an expression by Ray's rules. None (no label) equals no value."""
    positive = expression.removeprefix("!")
    values = re.split(r", ?", positive[3:-1]) if positive.startswith("in(") else [positive]
    return (value in values) != expression.startswith("!")


def engine_wants(spec: ExperimentSpec) -> dict[str, float]:
    """Ray's resources of one engine."""
    return {"CPU": spec.rollout.threads_per_engine, "GPU": spec.rollout.gpus_per_engine}


def rank_wants(spec: ExperimentSpec) -> dict[str, float]:
    """Ray's resources of one trainer rank."""
    return {"CPU": spec.trainer.threads_per_rank, "GPU": spec.trainer.gpus_per_rank}


def bundle_wants(spec: ExperimentSpec) -> dict[str, float]:
    """Ray's resources of one bundle of the trainer's group: a rank's, or a whole GPU with a rank and an engine."""
    if not shares_gpus(spec):
        return rank_wants(spec)
    return {"CPU": spec.trainer.threads_per_rank + spec.rollout.threads_per_engine, "GPU": 1}


@dataclass(frozen=True, slots=True)
class _Demand:
    """``count`` bundles of resources, each on one of the ``nodes``. ``key``: the key of `cluster` that chose these."""

    key: str
    actor: str
    count: int
    bundle: Resources
    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return f"{counted(self.count, self.actor)} of {amounts(self.bundle)}"


def check_resources(spec: ExperimentSpec, nodes: Sequence[Node], engines: int, ranks: int) -> str:
    """Check that the nodes have room for these engines and trainer ranks, each on one node.

    Returns a text about the room; raises ``RunError`` with the missing resources. A run that fits is never refused. A
    run whose engines and ranks fit separately and in total, but not together, is accepted: then Ray finds no room, and
    ``PlacementGroup.wait_for_room`` says so.
    """
    cluster = spec.cluster
    if cluster.autoscaling:
        return f"{len(nodes)} nodes; the cluster adds others when Ray asks for them"
    pairs = shares_gpus(spec) and ranks > 0  # then the engines are in the ranks' bundles
    rank_name = "engine-and-rank pair" if pairs else "trainer rank"
    demands = [
        _Demand("engines", "engine", 0 if pairs else engines, engine_wants(spec), eligible(nodes, cluster.engines)),
        _Demand("trainer", rank_name, ranks, bundle_wants(spec), eligible(nodes, cluster.trainer)),
    ]
    demands = [demand for demand in demands if demand.count]
    for demand in demands:
        if not demand.nodes:
            labels = ", ".join(f"{name}={value}" for name, value in getattr(cluster, demand.key).labels.items())
            raise RunError(
                f"no node of the cluster has the labels {labels}",
                location=f"cluster.{demand.key}.labels",
                hint="`ray start --labels` gives a node its labels; `ray list nodes` shows them",
            )
    usable = [node for node in nodes if any(node in demand.nodes for demand in demands)]
    fit = all(sum(times_on(node, demand.bundle) for node in demand.nodes) >= demand.count for demand in demands)
    totals: dict[str, float] = {}
    for demand in demands:
        for resource, amount in demand.bundle.items():
            totals[resource] = totals.get(resource, 0.0) + demand.count * amount
    fit &= all(
        sum(node.total.get(resource, 0.0) for node in usable) + ROUNDING >= total for resource, total in totals.items()
    )
    needs = " and ".join(map(str, demands))
    if not fit:
        kinds = [resource for resource, total in totals.items() if total]
        room = [
            f"{amounts({resource: node.total.get(resource, 0) for resource in kinds})} on {node}" for node in usable
        ]
        raise RunError(
            f"the run needs {needs}, each on one node, and there are only {_listed(room)}",
            location="cluster",
            hint="add nodes to the cluster first, or lower rollout.engines, trainer.ranks or their threads and GPUs",
        )
    return f"room for {needs} on {counted(len(nodes), 'node')}"


def times_on(node: Node, bundle: Resources) -> int:
    """Number of actors with these resources that fit on the node when it is empty."""
    resources = ((node.total.get(resource, 0.0), amount) for resource, amount in bundle.items() if amount)
    return min((int((total + ROUNDING) // amount) for total, amount in resources), default=0)


def shortage(bundle: Resources, count: int, nodes: Sequence[Node]) -> str:
    """A text about the resources that ``count`` bundles need, and the free resources of the usable ``nodes``."""
    required = [resource for resource, amount in bundle.items() if amount]
    needs = f"{f'{count} × ' if count > 1 else ''}{amounts(bundle)}"
    if not nodes:
        return f"it needs {needs}; the cluster has no node that it may use"
    room = []
    for node in nodes:
        free = (f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}s" for name in required)
        room.append(f"{', '.join(free)} on {node}")
    return f"it needs {needs}, {'each' if count > 1 else 'all'} on one node; free: {_listed(room)}"


def _listed(texts: Sequence[str]) -> str:
    """At most ``SHOWN_NODES`` of the texts, and the number of the others."""
    omitted = len(texts) - SHOWN_NODES
    return "; ".join(texts[:SHOWN_NODES]) + (f" and {omitted} more" if omitted > 0 else "")


def amounts(resources: Resources) -> str:
    """A text such as ``1 CPU and 2 GPUs``. Resources with amount 0 are omitted unless all are 0."""
    nonzero = {resource: amount for resource, amount in resources.items() if amount} or resources
    return " and ".join(
        f"{f'{amount:g}' if amount else 'no'} {resource}{'s' if amount != 1 else ''}"
        for resource, amount in nonzero.items()
    )
