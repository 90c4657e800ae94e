"""Places actors with Ray's placement groups, which keep resources through actors' restarts (decision 0039).

An engine's group has one bundle with all its GPUs, so the engine runs on one node. All trainer ranks are in one group,
with one bundle each, packed on as few nodes as possible. Engines that share GPUs with ranks are in the ranks' bundles:
with two groups, Ray could place two ranks on one GPU, which NCCL refuses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.orchestrator.nodes import Resources, eligible, live_nodes, numbers_of, report_again, shortage
from asyncrl_cli.records.training import RankLocation
from asyncrl_cli.spec.sections import NodeSelector
from asyncrl_cli.system.remote import START_TIMEOUT_S

FIRST_NOTICE_S, NOTICE_S = 15.0, 60.0
"""Seconds until the first warning that a part waits for resources, and between two warnings."""
LOOK_S = 5.0
"""Seconds between two checks whether Ray has found room."""
T = TypeVar("T")


def rank_order(locations: Sequence[RankLocation]) -> list[int]:
    """Indices of the locations in rank order: by node, and on a node by GPU. NCCL's rings and ZeRO's groups within a
    node need neighbouring ranks on the same node."""

    def key(index: int) -> tuple[Any, ...]:
        location = locations[index]
        return numbers_of(location.address), location.node_id, [numbers_of(gpu) for gpu in location.gpus], index

    return sorted(range(len(locations)), key=key)


class PlacementGroup:
    """The resources of one engine, or of all trainer ranks.

    Ray keeps them until ``remove`` or the run's end. If a node dies, Ray moves its bundles to other nodes.
    """

    def __init__(self, who: str, bundle: Resources, *, selector: NodeSelector, count: int = 1) -> None:
        """``who``: the part's name in messages. ``bundle``: the resources of each of the ``count`` actors."""
        self.who = who
        self._bundle = {resource: amount for resource, amount in bundle.items() if amount}
        self.count = count
        self._selector = selector
        self._group: Any = None

    def ask(self) -> None:
        """Request the resources from Ray without waiting, unless they are requested already."""
        from ray.util.placement_group import placement_group

        if self._group is None:
            selectors = [dict(self._selector.labels)] * self.count if self._selector.labels else None
            self._group = placement_group([self._bundle] * self.count, "PACK", bundle_label_selector=selectors)

    async def ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds until Ray holds the requested resources; True if it does."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._group.ready()
        except TimeoutError:
            return False
        return True

    async def wait_for_room(self, warn: Callable[[str], None], limit_s: float | None = START_TIMEOUT_S) -> None:
        """Wait until Ray holds the resources; ``warn`` gets texts about the missing resources. Raises ``RunError``
        after ``limit_s`` seconds; None: no limit."""
        started = time.monotonic()
        next_notice = started + FIRST_NOTICE_S
        self.ask()
        while not await self.ready(LOOK_S):
            if (checked_at := time.monotonic()) < next_notice:
                continue
            nodes = eligible(await asyncio.to_thread(live_nodes), self._selector)
            missing_room = shortage(self._bundle, self.count, nodes)
            if limit_s is not None and checked_at - started > limit_s:
                raise RunError(
                    f"Ray found no room for {self.who} within {limit_s:.0f} s: {missing_room}",
                    location="cluster",
                    hint="stop other programs in the cluster, add nodes, or lower rollout.engines or trainer.ranks",
                )
            warn(f"{self.who} waits until Ray has room for it: {missing_room}")
            await asyncio.to_thread(report_again, nodes)
            next_notice = checked_at + NOTICE_S

    async def first_answer(self, answer: Awaitable[T], warn: Callable[[str], None]) -> T:
        """Wait for the first answer of actors in the group. Warns and raises like ``wait_for_room`` if their node dies
        first: Ray notices this only after some seconds, and until then the group counts as created."""
        call = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait({call}, timeout=LOOK_S))[0]:
                await self.wait_for_room(warn)
            return call.result()
        finally:
            call.cancel()

    def options(self, index: int = 0, share: Resources | None = None) -> dict[str, Any]:
        """Ray's options for the actor in a bundle. It uses the bundle's resources, or a ``share`` of them."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        resources = self._bundle if share is None else share
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": strategy,
        }

    def remove(self) -> None:
        """Release the resources. Ray kills the actors in the group."""
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)
