"""The nodes of a Ray cluster: which nodes a part of the run may use, and whether its actors fit on them.

``live_nodes``, ``draining_nodes`` and ``why_gone`` ask Ray, and may block; the other functions are pure.
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


def draining_nodes() -> dict[str, str]:
    """The deadlines as text of nodes that are being drained, by id. A drain notice comes from `ray drain-node`, an
    autoscaler that scales down, or a node where `ray start --block` got SIGTERM."""
    from ray._private.state import state  # Ray has no public call for this

    return {
        node: f", until {time.strftime('%H:%M:%S', time.localtime(ms / 1000))}" if ms else " without a deadline"
        for node, ms in state.get_draining_nodes().items()
    }


def why_gone(node: str) -> str:
    """Why an actor is lost with its node; empty while the node lives. A node that is being drained counts as gone."""
    if node not in {one.node_id for one in live_nodes()}:
        return "its node is gone"
    until = draining_nodes().get(node)
    return "" if until is None else f"its node is being drained{until}"


async def why_lost(ask: Callable[[], str], unreachable: bool) -> str:
    """The answer of ``ask``, which may block: why a lost actor should not be restarted, or an empty text if it should.

    ``unreachable``: Ray may not know yet that the node is lost, so ``ask`` is repeated for up to ``NODE_DEATH_S``.
    """
    deadline = time.monotonic() + (NODE_DEATH_S if unreachable else 0.0)
    while not (why := await asyncio.to_thread(ask)) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)
    return why


def numbers_of(address: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts addresses by their numbers: 10.0.0.9 before 10.0.0.10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"[.:]", address) if part
    )


def eligible(nodes: Sequence[Node], selector: NodeSelector) -> tuple[Node, ...]:
    """The nodes that a part of the run may use."""
    names = set(selector.nodes)
    return tuple(
        node
        for node in nodes
        if not names or names & {node.address, node.name}
        if all(_has(node.labels.get(key), wanted) for key, wanted in selector.labels.items())
    )


def _has(value: str | None, wanted: str) -> bool:
    """True if a label's value matches the ``wanted`` expression by Ray's rules. None (no label) equals no value."""
    negated = wanted.startswith("!")
    wanted = wanted.removeprefix("!")
    values = re.split(r", ?", wanted[3:-1]) if wanted.startswith("in(") else [wanted]
    return (value in values) != negated


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


def check_resources(spec: ExperimentSpec, nodes: Sequence[Node], engines: int, ranks: int) -> str:
    """Check that the nodes have room for these engines and trainer ranks, each on one node.

    Returns a text about the room; raises ``RunError`` with the missing resources.
    """
    if spec.cluster.autoscaling:
        return f"{len(nodes)} nodes; the cluster adds others when Ray asks for them"
    together = shares_gpus(spec) and ranks > 0
    if together:
        engines = 0  # they are in the bundles of the ranks
    rank = "engine-and-rank pair" if together else "trainer rank"
    parts = {"engines": (engines, engine_wants(spec), "engine"), "trainer": (ranks, bundle_wants(spec), rank)}
    usable: dict[str, tuple[Node, ...]] = {}
    for part, (count, wants, what) in parts.items():
        selector: NodeSelector = getattr(spec.cluster, part)
        usable[part] = eligible(nodes, selector) if count else ()
        if not count:
            continue
        known = {name for node in nodes for name in (node.address, node.name)}
        if missing := [name for name in selector.nodes if name not in known]:
            raise RunError(
                f"no node of the cluster has the address or name {', '.join(missing)}",
                location=f"cluster.{part}.nodes",
                hint=f"the cluster has {listed([str(node) for node in nodes])}",
            )
        if not usable[part]:
            labels = ", ".join(f"{key}={value}" for key, value in selector.labels.items())
            raise RunError(
                f"no node of the cluster has the labels {labels}",
                location=f"cluster.{part}.labels",
                hint="`ray start --labels` gives a node its labels; `ray list nodes` shows them",
            )
        if not any(times_on(node, wants) for node in usable[part]):
            raise RunError(
                f"no node has room for one {what}: it needs {amounts(wants)} on one node, and there are "
                f"{_totals(usable[part], wants)}",
                location=f"cluster.{part}",
                hint="add a node that has them, or lower the threads and GPUs of one engine or rank",
            )
    needed = " and ".join(
        f"{counted(count, what)} of {amounts(wants)}" for count, wants, what in parts.values() if count
    )
    found = most_engines(
        usable["engines"], rank_nodes=usable["trainer"], engine=engine_wants(spec), rank=bundle_wants(spec), ranks=ranks
    )
    if found is None or found < engines:
        room = (
            f"fewer than {ranks} trainer ranks"
            if found is None
            else f"{found} of the engines{' next to the ranks' if ranks else ''}"
        )
        kinds = {kind: 1.0 for _, wants, _ in parts.values() for kind, amount in wants.items() if amount}
        every = [node for node in nodes if node in usable["engines"] or node in usable["trainer"]]
        raise RunError(
            f"the run needs {needed}, and there is room for {room}: {_totals(every, kinds)}",
            location="cluster",
            hint="add nodes to the cluster first, or lower rollout.engines, trainer.ranks or their threads and GPUs",
        )
    return f"room for {needed} on {counted(len(nodes), 'node')}"


def most_engines(
    engine_nodes: Sequence[Node], rank_nodes: Sequence[Node], engine: Resources, rank: Resources, ranks: int
) -> int | None:
    """The largest number of engines that fit on the nodes together with all ranks; None if the ranks alone do not fit.

    Exact, by dynamic programming: ``best[r]`` is the largest number of engines next to r ranks on the nodes so far.
    """
    best: list[int | None] = [0] + [None] * ranks
    hosts_engines, hosts_ranks = ({node.node_id for node in some} for some in (engine_nodes, rank_nodes))
    for node in {node.node_id: node for node in (*engine_nodes, *rank_nodes)}.values():
        most_here = min(ranks, _times(node.total, rank)) if node.node_id in hosts_ranks else 0
        engines_here = [
            _times({kind: amount - here * rank.get(kind, 0) for kind, amount in node.total.items()}, engine)
            if node.node_id in hosts_engines
            else 0
            for here in range(most_here + 1)
        ]
        best = [
            max(
                (
                    before + engines_here[here]
                    for here in range(min(most_here, placed) + 1)
                    if (before := best[placed - here]) is not None
                ),
                default=None,
            )
            for placed in range(ranks + 1)
        ]
    return best[ranks]


def _times(there: Resources, wants: Resources) -> int:
    return min((int((there.get(kind, 0) + ROUNDING) // amount) for kind, amount in wants.items() if amount), default=0)


def times_on(node: Node, wants: Resources) -> int:
    """Number of actors with these resources that fit on the node when it is empty."""
    return _times(node.total, wants)


def shortage(wants: Resources, count: int, nodes: Sequence[Node]) -> str:
    """A text about the resources that ``count`` bundles need, and the free resources of the usable ``nodes``."""
    kinds = [kind for kind, amount in wants.items() if amount]
    needs = f"{f'{count} × ' if count > 1 else ''}{amounts(wants)}"
    if not nodes:
        return f"it needs {needs}; the cluster has no node that it may use"
    there = [
        ", ".join(f"{node.free.get(kind, 0):g} of {node.total.get(kind, 0):g} {kind}s" for kind in kinds)
        for node in nodes
    ]
    if len(nodes) == 1:
        return f"it needs {needs}; free: {there[0]}"
    by_node = [f"{free} on {node}" for node, free in zip(nodes, there, strict=True)]
    return f"it needs {needs}, {'each' if count > 1 else 'all'} on one node; free: {listed(by_node, '; ')}"


def _totals(nodes: Sequence[Node], wants: Resources) -> str:
    return listed(
        [
            f"{amounts({kind: node.total.get(kind, 0) for kind, amount in wants.items() if amount})} on {node}"
            for node in nodes
        ],
        "; ",
    )


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """At most ``SHOWN_NODES`` of the texts, and the number of the others."""
    more = len(texts) - SHOWN_NODES
    return separator.join(texts[:SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")


def amounts(resources: Resources) -> str:
    """A text such as ``1 CPU and 2 GPUs``. Resources with amount 0 are omitted unless all are 0."""
    shown = {kind: amount for kind, amount in resources.items() if amount} or resources
    return " and ".join(
        f"{f'{amount:g}' if amount else 'no'} {kind}{'s' if amount != 1 else ''}" for kind, amount in shown.items()
    )
