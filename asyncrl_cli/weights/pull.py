"""Fetches a version from the hosts that have it (holders): assigns chunks to holders, and handles their failures.

Each holder has its own threads, which take any missing chunk that the holder has. So a fast holder sends more chunks,
and a dead holder delays none. Chunks are taken in random order: hosts that fetch at the same time get different chunks,
and can then fetch from each other.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from asyncrl_cli.weights.manifest import Endpoint, Manifest, Pulled, PullFailed, Superseded
from asyncrl_cli.weights.replica import Buffer, Replica, digest_of
from asyncrl_cli.weights.transfer import Connection, HolderFault

STREAMS = max(4, min((os.cpu_count() or 1) // 2, 16))
"""Connections of a pull, if it has fewer holders. Each has a thread, which receives and checks 1.1 to 2 GB/s
(docs/performance.md); half of the host's cores stay free."""
ASK_AGAIN_S = 0.5
"""Seconds after which an incomplete holder is asked again which chunks it has."""
RETRY_S = 1.0
"""Seconds until a holder is asked again after a fault."""
ASK = -1
"""Used in place of a chunk's index: ask the holder which chunks it has."""


@dataclass(slots=True)
class _Holder:
    endpoint: Endpoint
    chunks: bytes = b""  # 1 for each chunk that it has, otherwise 0
    ask_at: float = 0.0
    retry_at: float = 0.0
    fault: str = ""  # the last fault
    refused: bool = False  # it sent wrong bytes, and is not asked again

    def has(self, index: int) -> bool:
        return bool(self.chunks) and self.chunks[index] == 1

    def failed(self, fault: HolderFault) -> None:
        self.fault = str(fault)
        self.refused = self.refused or isinstance(fault, _WrongBytes)
        self.chunks, self.ask_at = b"", 0.0  # a restarted agent has other chunks
        self.retry_at = time.monotonic() + RETRY_S


class _WrongBytes(HolderFault):
    """A chunk does not have the manifest's digest."""


class Pull:
    """One attempt to complete a version on this host."""

    def __init__(
        self,
        replica: Replica,
        manifest: Manifest,
        connect: Callable[[str], Connection],
        holders: Sequence[Endpoint],
        timeout_s: float,
    ) -> None:
        """``connect`` makes a connection to a holder's URL."""
        self.manifest = manifest
        self._replica = replica
        self._connect = connect
        self._holders = [_Holder(endpoint) for endpoint in holders]
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._changed = Condition()
        self._queue: list[int] = []
        self._transfers: set[int] = set()
        self._connections: list[Connection] = []
        self._fetched_bytes = 0
        self._superseded = False
        self._is_closed = False
        self._error: Exception | None = None  # a bug or an error of this host, not of a holder

    def supersede(self) -> None:
        """End the pull from another thread; ``run`` raises ``Superseded``."""
        with self._changed:
            self._superseded = True
            self._changed.notify_all()

    def run(self) -> Pulled:
        """Fetch the missing chunks. Raises ``Superseded`` and ``PullFailed``; chunks that arrived are kept."""
        with self._replica.receiving(self.manifest) as buffer:
            self._queue = [i for i in range(len(self.manifest.digests)) if i not in buffer.digests]
            random.shuffle(self._queue)
            each = -(-STREAMS // max(1, len(self._holders)))
            threads = [
                Thread(target=self._stream, args=(holder, buffer), name="weights-pull", daemon=True)
                for holder in self._holders
                for _ in range(each)
            ]
            try:
                for thread in threads:
                    thread.start()
                with self._changed:
                    self._changed.wait_for(self._is_over, max(0.0, self._deadline - time.monotonic()))
            finally:
                with self._changed:
                    self._is_closed = True
                    self._changed.notify_all()
                    for connection in self._connections:
                        connection.abort()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
        return self._result()

    def _is_over(self) -> bool:
        hopeless = all(holder.refused for holder in self._holders)
        return self._superseded or self._complete() or hopeless or self._error is not None

    def _complete(self) -> bool:
        return not self._queue and not self._transfers

    def _result(self) -> Pulled:
        if self._error is not None:
            raise self._error
        version, seconds = self.manifest.version, time.monotonic() - self._started
        path = self._replica.path(self.manifest)
        if path is not None:
            faults = {holder.endpoint.node_id: holder.fault for holder in self._holders if holder.fault}
            return Pulled(path, fetched_bytes=self._fetched_bytes, seconds=seconds, faults=faults)
        if self._superseded or self._complete():  # complete, but then a newer version took its memory
            raise Superseded(
                f"pull of weight version {version} cancelled: a newer one superseded it", location="weights"
            )
        states = [f"{each.endpoint}: {each.fault or f'it has {sum(each.chunks)} chunks'}" for each in self._holders]
        raise PullFailed(
            f"after {seconds:.1f} s, {len(self._queue)} of {len(self.manifest.digests)} chunks of weight version "
            f"{version} are still missing; tried: {'; '.join(states) or 'no host'}",
            location="weights",
            hint="check the network between these hosts, and the logs of their agents",
        )

    def _stream(self, holder: _Holder, buffer: Buffer) -> None:
        connection = self._connection(holder)
        try:
            while (job := self._next_job(holder)) is not None:
                try:
                    if job == ASK:
                        chunks = connection.available_chunks(self.manifest.version, len(self.manifest.digests))
                        with self._changed:
                            holder.chunks = chunks
                            self._changed.notify_all()
                    else:
                        self._fetch(holder, connection=connection, index=job, buffer=buffer)
                except HolderFault as fault:
                    self._failed(holder, job, fault)
                    connection.close()
                    connection = self._connection(holder)
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            connection.close()

    def _connection(self, holder: _Holder) -> Connection:
        connection = self._connect(holder.endpoint.url)
        with self._changed:
            self._connections.append(connection)
        return connection

    def _next_job(self, holder: _Holder) -> int | None:
        """The next chunk to fetch from the holder, ``ASK``, or None at the end. Waits if there is nothing to do."""
        with self._changed:
            while not (self._is_closed or holder.refused or self._complete()):
                time_s = time.monotonic()
                if time_s < holder.retry_at:
                    self._changed.wait(holder.retry_at - time_s)
                elif (index := self._take(holder)) is not None:
                    self._transfers.add(index)
                    return index
                elif time_s >= holder.ask_at and not (holder.chunks and all(holder.chunks)):
                    holder.ask_at = time_s + ASK_AGAIN_S
                    return ASK
                else:
                    self._changed.wait(ASK_AGAIN_S)
        return None

    def _take(self, holder: _Holder) -> int | None:
        for position in reversed(range(len(self._queue))):
            if holder.has(self._queue[position]):
                # Swap with the last one: the order is random anyway, and removal from the middle would copy the list.
                self._queue[position], self._queue[-1] = self._queue[-1], self._queue[position]
                return self._queue.pop()
        return None

    def _fetch(self, holder: _Holder, connection: Connection, index: int, buffer: Buffer) -> None:
        digest = self.manifest.digests[index]
        views = buffer.views(self._replica.chunks[index].ranges)
        connection.fetch(self.manifest.version, index=index, digest=digest, into=views)
        if digest_of(views) != digest:
            raise _WrongBytes(f"it sent wrong bytes for chunk {index}")
        self._replica.add(buffer, index, digest)
        with self._changed:
            self._transfers.remove(index)
            self._fetched_bytes += sum(len(view) for view in views)
            if self._complete():
                self._changed.notify_all()

    def _failed(self, holder: _Holder, job: int, fault: HolderFault) -> None:
        with self._changed:
            if not self._is_closed:
                holder.failed(fault)
            if job != ASK:
                self._transfers.remove(job)
                self._queue.append(job)
            self._changed.notify_all()
