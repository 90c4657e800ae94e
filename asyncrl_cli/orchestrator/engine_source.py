"""Requests further engines from Ray, and asks Ray for the state of the nodes that engines run on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from asyncrl_cli.orchestrator.engines import EngineProcess
from asyncrl_cli.orchestrator.nodes import live_nodes
from asyncrl_cli.rollout.engine_handle import EngineHandle

Waits = Callable[[str], None]
LOOK_S = 1.0
"""Seconds between two checks of the state of a node."""
NODE_DEATH_S = 20.0
"""Seconds to wait after a lost connection for Ray to report the node as lost, which takes about 15."""


async def why_lost(ask: Callable[[], str], unreachable: bool) -> str:
    """The reason from ``ask`` why a lost actor should not be restarted; empty if it should be.

    ``unreachable``: it is not known yet whether its process is alive, so ``ask``, which may block, is called until it
    gives a reason, for at most ``NODE_DEATH_S`` seconds.
    """
    deadline = time.monotonic() + (NODE_DEATH_S if unreachable else 0.0)
    while not (why := await asyncio.to_thread(ask)) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)
    return why


class RayEngines:
    """Engines of Ray's cluster, for an engine pool. ``draining`` and ``why_gone`` may block: call them in a thread."""

    def __init__(self, make: Callable[[str], EngineProcess]) -> None:
        """``make(name)``: an engine that has yet to be started."""
        self._make = make

    async def hire(self, name: str, waits: Waits) -> EngineHandle:
        """Start a further engine. Waits for room without a limit, and calls ``waits`` with what is missing.

        If it is cancelled or raises ``UserError``, nothing of the engine remains.
        """
        process = self._make(name)
        try:
            await process.group.held(waits, limit_s=None)  # so that an autoscaler sees the request
            await process.start_once()
        except BaseException:
            process.release()
            raise
        return process

    def draining(self) -> dict[str, str]:
        """The nodes that are being drained, by id, each with its deadline as text. Such a notice comes from `ray
        drain-node`, from an autoscaler that scales down, and from a node whose `ray start --block` got SIGTERM."""
        from ray._private.state import state  # there is no public way to ask

        return {node: _until(deadline_ms / 1000) for node, deadline_ms in state.get_draining_nodes().items()}

    def why_gone(self, node: str) -> str:
        """Why an actor on this node is lost together with the node; empty while the node is alive. A node that is being
        drained counts as gone."""
        if node not in {one.node_id for one in live_nodes()}:
            return "its node is gone"
        until = self.draining().get(node)
        return "" if until is None else f"its node is being drained{until}"


def _until(deadline: float) -> str:
    """``deadline`` in unix seconds; 0 for none."""
    return f", until {time.strftime('%H:%M:%S', time.localtime(deadline))}" if deadline else " without a deadline"
