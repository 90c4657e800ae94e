"""The Ray actor that owns a host's replica of the weights: trainer ranks write into it, other hosts' agents fetch from
it, engines load from it. It does not import torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from asyncrl_cli.system.logs import redirect_output
from asyncrl_cli.weights.layout import TensorSlot
from asyncrl_cli.weights.manifest import Endpoint, Manifest, Pulled, Superseded
from asyncrl_cli.weights.pull import Pull
from asyncrl_cli.weights.replica import Replica
from asyncrl_cli.weights.transfer import Connection, WeightServer


class HostAgent:
    """The agent of a host with an engine or a trainer rank. Call ``start`` first."""

    def __init__(self, name: str, log_folder: str) -> None:
        redirect_output(log_folder, name)
        self._threads = ThreadPoolExecutor(os.cpu_count(), "weights-digest")
        self._pull: Pull | None = None
        self._pulling: asyncio.Task[Pulled] | None = None
        self._replica: Replica
        self._connect: partial[Connection]

    async def start(self, slots: tuple[TensorSlot, ...], ranks: int, token: str, interface_ip: str) -> Endpoint:
        """Map the memory, and serve it on this address of the host. Raises ``RunError``."""
        import ray

        self._replica = await asyncio.to_thread(Replica, slots, ranks)  # a large model's chunks take seconds
        self._connect = partial(Connection, token=token)
        node_id = ray.get_runtime_context().get_node_id()
        return Endpoint(node_id, WeightServer(self._replica, token, interface_ip).url)

    async def begin(self, version: int, keep: Manifest | None, ranks: Sequence[int]) -> str:
        return await asyncio.to_thread(self._replica.begin, version, keep, ranks)

    async def digest(self, version: int, ranks: Sequence[int]) -> dict[int, str]:
        return await asyncio.to_thread(self._replica.digest, version, ranks, self._threads)

    async def pull(self, manifest: Manifest, holders: Sequence[Endpoint], timeout_s: float) -> Pulled:
        """Fetch the version from any of the holders, unless this host has it.

        If it is being fetched already, wait for it. A newer version cancels the running fetch. Raises ``Superseded``,
        ``PullFailed``, and ``RunError`` if no memory is free.
        """
        path = await asyncio.to_thread(self._replica.path, manifest)
        if path is not None:
            return Pulled(path)
        if self._pull is not None and self._pulling is not None and not self._pulling.done():
            if self._pull.manifest == manifest:
                return await asyncio.shield(self._pulling)
            if self._pull.manifest.version > manifest.version:
                raise Superseded(
                    f"pull of weight version {manifest.version} cancelled: version {self._pull.manifest.version} came",
                    location="weights",
                )
            self._pull.supersede()
        self._pull = Pull(self._replica, manifest=manifest, connect=self._connect, holders=holders, timeout_s=timeout_s)
        # Shielded: if the caller gives up, the fetch continues, and the next call joins it.
        self._pulling = asyncio.create_task(self._run(self._pull, self._pulling))
        return await asyncio.shield(self._pulling)

    async def _run(self, pull: Pull, previous_pull: asyncio.Task[Pulled] | None) -> Pulled:
        if previous_pull is not None:
            await asyncio.wait([previous_pull])  # a superseded pull needs a moment to stop writing into the memory
        return await asyncio.to_thread(pull.run)

    async def report(self) -> dict[int, int]:
        """Number of chunks that the host has, by version."""
        return self._replica.versions()
