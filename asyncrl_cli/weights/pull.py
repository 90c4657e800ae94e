"""Fetches a version from the hosts that have it (holders): assigns chunks to holders, and handles their failures.

Each holder has its own threads, which take any missing chunk that the holder has. So a fast holder sends more chunks,
and a dead holder delays none. Chunks are taken in random order: hosts that fetch at the same time get different chunks,
and can then fetch from each other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import NamedTuple

from asyncrl_cli.weights.manifest import Endpoint, Manifest, Pulled, PullFailed, Superseded
from asyncrl_cli.weights.replica import Buffer, Replica, digest_of
from asyncrl_cli.weights.transfer import Connection, HolderFault

STREAMS = 4
"""Smallest number of connections of a pull. Every holder has at least one."""
MOST_STREAMS = 16
STREAM_MEGABITS = 10_000
"""Megabits/s of a connection: its thread receives and checks 1.1 to 2 GB/s (docs/performance.md)."""
ASK_AGAIN_S = 0.5
"""Seconds after which an incomplete holder is asked again which chunks it has."""
RETRY_S = 0.25
MAX_RETRY_S = 5.0
"""First and longest delay in seconds after a holder's fault; the delay doubles with each further fault."""
SLOW_S = 3.0
"""A chunk may take this many seconds plus three times an idle holder's time for a chunk; then that holder takes it."""
ASK = -1
"""Used in place of a chunk's index: ask the holder which chunks it has."""


def streams_for(megabits: int, cores: int) -> int:
    """Number of connections that fill a link (megabits/s, 0: unknown) and leave half of the host's cores free."""
    wanted = -(-megabits // STREAM_MEGABITS) if megabits else MOST_STREAMS
    return max(STREAMS, min(wanted, cores // 2, MOST_STREAMS))


@dataclass(slots=True)
class _Holder:
    endpoint: Endpoint
    held: bytes = b""  # 1 for each chunk that it has, otherwise 0
    ask_at: float = 0.0
    retry_at: float = 0.0
    faults: int = 0  # number of faults since its last chunk
    fault: str = ""  # the last fault
    refused: bool = False  # it sent wrong bytes, and is not asked again
    chunk_s: float = 0.0  # duration of its last chunk

    def has(self, index: int) -> bool:
        return bool(self.held) and self.held[index] == 1

    def failed(self, fault: HolderFault) -> None:
        self.fault = str(fault)
        self.refused = self.refused or isinstance(fault, _WrongBytes)
        self.held, self.ask_at = b"", 0.0  # a restarted agent has other chunks
        now = time.monotonic()
        if now >= self.retry_at:  # otherwise another of its connections has reported the same event
            self.retry_at = now + min(RETRY_S * 2**self.faults, MAX_RETRY_S)
            self.faults = min(self.faults + 1, 16)


class _WrongBytes(HolderFault):
    """A chunk does not have the manifest's digest."""


class _Transfer(NamedTuple):
    connection: Connection
    since: float


class Pull:
    """One attempt to complete a version on this host."""

    def __init__(
        self,
        replica: Replica,
        manifest: Manifest,
        connect: Callable[[str], Connection],
        holders: Sequence[Endpoint],
        timeout_s: float,
        streams: int = STREAMS,
    ) -> None:
        """``connect`` makes a connection to a holder's URL. ``streams``: the wanted number of connections in total."""
        self.manifest = manifest
        self._replica = replica
        self._connect = connect
        self._holders = [_Holder(endpoint) for endpoint in holders]
        self._streams = streams
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._changed = Condition()
        self._missing: list[int] = []
        self._transfers: dict[int, _Transfer] = {}
        self._connections: list[Connection] = []
        self._fetched_bytes = 0
        self._superseded = False
        self._ended = False
        self._error: Exception | None = None  # a bug or an error of this host, not of a holder

    def supersede(self) -> None:
        """End the pull from another thread; ``run`` raises ``Superseded``."""
        with self._changed:
            self._superseded = True
            self._changed.notify_all()

    def run(self) -> Pulled:
        """Fetch the missing chunks. Raises ``Superseded`` and ``PullFailed``; chunks that arrived are kept."""
        with self._replica.receiving(self.manifest) as buffer:
            self._missing = [i for i in range(len(self.manifest.digests)) if i not in buffer.digests]
            random.shuffle(self._missing)
            each = -(-self._streams // max(1, len(self._holders)))
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
                    self._ended = True
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
        return not self._missing and not self._transfers

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
        states = (f"{one.endpoint}: {one.fault or f'it has {sum(one.held)} chunks'}" for one in self._holders)
        raise PullFailed(
            f"after {seconds:.1f} s, {len(self._missing)} of {len(self.manifest.digests)} chunks of weight version "
            f"{version} are still missing; tried: {'; '.join(states) or 'no host'}",
            location="weights",
            hint="check the network between these hosts, and the logs of their agents",
        )

    def _stream(self, holder: _Holder, buffer: Buffer) -> None:
        connection = self._connection(holder)
        try:
            while (job := self._next(holder, connection)) is not None:
                try:
                    if job == ASK:
                        held = connection.held(self.manifest.version, len(self.manifest.digests))
                        with self._changed:
                            holder.held = held
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

    def _next(self, holder: _Holder, connection: Connection) -> int | None:
        """The next chunk to fetch from the holder, ``ASK``, or None at the end. Waits if there is nothing to do."""
        with self._changed:
            while not (self._ended or holder.refused or self._complete()):
                now = time.monotonic()
                if now < holder.retry_at:
                    self._changed.wait(holder.retry_at - now)
                elif (index := self._take(holder)) is not None:
                    self._transfers[index] = _Transfer(connection, now)
                    return index
                elif now >= holder.ask_at and not (holder.held and all(holder.held)):
                    holder.ask_at = now + ASK_AGAIN_S
                    return ASK
                else:
                    # This holder is idle: take over chunks that it would have sent three times by now.
                    for index, transfer in self._transfers.items():
                        if holder.has(index) and now - transfer.since > SLOW_S + 3 * holder.chunk_s:
                            transfer.connection.abort()
                    self._changed.wait(ASK_AGAIN_S)
        return None

    def _take(self, holder: _Holder) -> int | None:
        for position in reversed(range(len(self._missing))):
            if holder.has(self._missing[position]):
                # Swap with the last one: the order is random anyway, and removal from the middle would copy the list.
                self._missing[position], self._missing[-1] = self._missing[-1], self._missing[position]
                return self._missing.pop()
        return None

    def _fetch(self, holder: _Holder, connection: Connection, index: int, buffer: Buffer) -> None:
        digest = self.manifest.digests[index]
        views = buffer.views(self._replica.chunks[index].ranges)
        connection.fetch(self.manifest.version, index=index, digest=digest, into=views)
        if digest_of(views) != digest:
            raise _WrongBytes(f"it sent wrong bytes for chunk {index}")
        self._replica.add(buffer, index, digest)
        with self._changed:
            transfer = self._transfers.pop(index)
            holder.chunk_s = time.monotonic() - transfer.since
            holder.faults = 0
            self._fetched_bytes += sum(len(view) for view in views)
            if self._complete():
                self._changed.notify_all()

    def _failed(self, holder: _Holder, job: int, fault: HolderFault) -> None:
        with self._changed:
            if not self._ended:
                holder.failed(fault)
            if job != ASK:
                del self._transfers[job]
                self._missing.append(job)
            self._changed.notify_all()
