"""Room for actors: Ray keeps one waiting, for ever and without a word, until its resources are free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.system.remote import START_TIMEOUT_S, wait_for

FIRST_NOTICE_S, NOTICE_S = 15.0, 60.0
"""Seconds until it is said that an actor waits for room, and between two notices."""

Resources = Mapping[str, float]
Look = Callable[[], tuple[Resources, Resources]]
"""What is free in the cluster, and what there is in all."""


def engine_wants(spec: ExperimentSpec) -> dict[str, float]:
    """Ray's resources of one engine."""
    return {"CPU": spec.rollout.threads_per_engine, "GPU": spec.rollout.gpus_per_engine}


def rank_wants(spec: ExperimentSpec) -> dict[str, float]:
    """Ray's resources of one trainer rank."""
    return {"CPU": spec.trainer.threads_per_rank, "GPU": spec.trainer.gpus_per_rank}


def check_resources(spec: ExperimentSpec, total: Resources) -> str:
    """The nodes of a joined cluster have what all engines and ranks want together. Raises ``RunError``."""
    engine, rank = engine_wants(spec), rank_wants(spec)
    sums = {kind: spec.rollout.engines * engine[kind] + spec.trainer.ranks * rank[kind] for kind in engine}
    wanted = {kind: amount for kind, amount in sums.items() if amount}
    there = _amounts({kind: total.get(kind, 0) for kind in wanted})
    if any(amount > total.get(kind, 0) for kind, amount in wanted.items()):
        raise RunError(
            f"the run wants {_amounts(wanted)}, and the cluster has {there}",
            location="cluster.address",
            hint="add nodes to the cluster first, or lower rollout.engines, trainer.ranks or their threads and GPUs",
        )
    return f"{_amounts(wanted)} wanted, {there} in the cluster"


async def placed(
    answer: Awaitable[Any], who: str, wants: Resources, warn: Callable[[str], None], look: Look | None = None
) -> None:
    """Wait for an actor's first answer, and say what is missing meanwhile.

    Raises ``RunError`` after ``START_TIMEOUT_S`` seconds, and as ``wait_for`` does.
    """
    call = asyncio.ensure_future(wait_for(answer, who))
    started, pause_s = time.monotonic(), FIRST_NOTICE_S
    try:
        while not (await asyncio.wait({call}, timeout=pause_s))[0]:
            free, total = await asyncio.to_thread(look or _look)
            waits = shortage(wants, free, total)
            if time.monotonic() - started > START_TIMEOUT_S:
                raise RunError(
                    f"Ray found no room for {who} within {START_TIMEOUT_S:.0f} s: {waits}",
                    location="cluster",
                    hint="stop what else runs in the cluster, add nodes, or lower rollout.engines or trainer.ranks",
                )
            warn(f"{who} waits until Ray has room for it: {waits}")
            pause_s = NOTICE_S
        call.result()
    finally:
        call.cancel()


def shortage(wants: Resources, free: Resources, total: Resources) -> str:
    """What an actor wants, and how much of that is free."""
    kinds = [kind for kind, amount in wants.items() if amount]
    there = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in kinds)
    return f"it wants {_amounts({kind: wants[kind] for kind in kinds})}; free are {there}"


def _amounts(resources: Resources) -> str:
    return " and ".join(
        f"{f'{amount:g}' if amount else 'no'} {kind}{'s' if amount != 1 else ''}" for kind, amount in resources.items()
    )


def _look() -> tuple[Resources, Resources]:
    import ray

    return ray.available_resources(), ray.cluster_resources()
