"""Fetches a version from the hosts that have it: which holder is asked for which chunk, and what follows a failure.

Each holder has its own threads, which take any missing chunk that the holder has: a fast holder takes more of them, and
a dead one takes nothing. Chunks are taken in random order, so that hosts which fetch at the same time get different
ones, and have them to give to each other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from threading import Condition, Thread
from typing import NamedTuple

from asyncrl_cli.weights.manifest import Endpoint, Manifest, Overtaken, Pulled, PullFailed
from asyncrl_cli.weights.movers import HolderFault, Link, Mover
from asyncrl_cli.weights.replica import Buffer, Replica, digest_of

STREAMS = 4
"""Connections of one pull, at least; every holder has at least one."""
ASK_AGAIN_S = 0.5
"""Seconds after which a holder that does not have everything is asked again."""
RETRY_S = 0.25
MAX_RETRY_S = 5.0
"""Seconds before a holder is asked again after a fault: doubled with each further one, up to the maximum."""
SLOW_S = 3.0
"""Seconds that a chunk may take, besides three times what an idle holder needs for one, until that one is asked."""
ASK = -1
"""In place of a chunk's index: ask the holder which chunks it has."""


class _Holder:
    """What a pull knows of one holder."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.held = b""
        self.ask_at = 0.0
        self.retry_at = 0.0
        self.faults = 0  # since its last chunk
        self.fault = ""  # the last one
        self.refused = False  # it has sent wrong bytes, and is not asked any more
        self.chunk_s = 0.0  # what its last chunk took

    def has(self, index: int) -> bool:
        return bool(self.held) and self.held[index] == 1

    def failed(self, fault: HolderFault) -> None:
        self.fault = str(fault)
        self.refused = self.refused or isinstance(fault, _WrongBytes)
        self.held, self.ask_at = b"", 0.0  # it may be another process by now
        now = time.monotonic()
        if now >= self.retry_at:  # else it is the same event, seen by another of its connections
            self.retry_at = now + min(RETRY_S * 2**self.faults, MAX_RETRY_S)
            self.faults = min(self.faults + 1, 16)

    def state(self) -> str:
        return self.fault or f"it has {sum(self.held)} chunks"


class _WrongBytes(HolderFault):
    """A chunk does not have the digest of the manifest."""


class _Transfer(NamedTuple):
    """A chunk on its way."""

    link: Link
    since: float


class Pull:
    """One attempt to complete a version on this host."""

    def __init__(
        self, replica: Replica, manifest: Manifest, mover: Mover, holders: Sequence[Endpoint], timeout_s: float
    ) -> None:
        self.manifest = manifest
        self._replica = replica
        self._mover = mover
        self._holders = [_Holder(endpoint) for endpoint in holders]
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._changed = Condition()
        self._missing: list[int] = []
        self._transfers: dict[int, _Transfer] = {}
        self._links: list[Link] = []
        self._fetched_bytes = 0
        self._overtaken = False
        self._ended = False
        self._error: Exception | None = None  # of this code, not of a holder

    def overtake(self) -> None:
        """End it; ``run`` raises ``Overtaken``. Called by another thread."""
        with self._changed:
            self._overtaken = True
            self._changed.notify_all()

    def run(self) -> Pulled:
        """Fetch what is missing. Raises ``Overtaken`` and ``PullFailed``; the chunks that have come are kept."""
        with self._replica.receiving(self.manifest) as buffer:
            self._missing = [i for i in range(len(self.manifest.digests)) if i not in buffer.digests]
            random.shuffle(self._missing)
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
                    self._changed.wait_for(self._over, max(0.0, self._deadline - time.monotonic()))
            finally:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                    for link in self._links:
                        link.abort()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
        return self._result()

    def _over(self) -> bool:
        hopeless = all(holder.refused for holder in self._holders)
        return self._overtaken or self._complete() or hopeless or self._error is not None

    def _complete(self) -> bool:
        return not self._missing and not self._transfers

    def _result(self) -> Pulled:
        if self._error is not None:
            raise self._error
        version, seconds = self.manifest.version, time.monotonic() - self._started
        path = self._replica.path(self.manifest)
        if path is not None:
            faults = {holder.endpoint.node_id: holder.fault for holder in self._holders if holder.fault}
            return Pulled(path, self._fetched_bytes, seconds, faults)
        if self._overtaken or self._complete():  # complete, but its memory was taken for a newer version
            raise Overtaken(f"weight version {version} is not fetched any more: a newer one is", location="weights")
        holders = "; ".join(f"{holder.endpoint}: {holder.state()}" for holder in self._holders) or "none"
        raise PullFailed(
            f"after {seconds:.1f} s, {len(self._missing)} of {len(self.manifest.digests)} chunks of weight version "
            f"{version} are missing; asked were: {holders}",
            location="weights",
            hint="check the network between these hosts, and the logs of their agents",
        )

    def _stream(self, holder: _Holder, buffer: Buffer) -> None:
        """Fetch from one holder until there is nothing more to fetch."""
        link = self._connect(holder)
        try:
            while (job := self._next(holder, link)) is not None:
                try:
                    if job == ASK:
                        self._ask(holder, link)
                    else:
                        self._fetch(holder, link, job, buffer)
                except HolderFault as fault:
                    self._failed(holder, job, fault)
                    link.close()
                    link = self._connect(holder)
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            link.close()

    def _connect(self, holder: _Holder) -> Link:
        link = self._mover.connect(holder.endpoint)
        with self._changed:
            self._links.append(link)
        return link

    def _next(self, holder: _Holder, link: Link) -> int | None:
        """The next chunk to fetch from the holder, ``ASK``, or None at the end. Waits while there is nothing to do."""
        with self._changed:
            while not (self._ended or holder.refused or self._complete()):
                now = time.monotonic()
                if now < holder.retry_at:
                    self._changed.wait(holder.retry_at - now)
                elif (index := self._take(holder)) is not None:
                    self._transfers[index] = _Transfer(link, now)
                    return index
                elif now >= holder.ask_at and not (holder.held and all(holder.held)):
                    holder.ask_at = now + ASK_AGAIN_S
                    return ASK
                else:
                    self._end_slow_transfers(holder, now)
                    self._changed.wait(ASK_AGAIN_S)
        return None

    def _take(self, holder: _Holder) -> int | None:
        for position in reversed(range(len(self._missing))):
            if holder.has(self._missing[position]):
                # The order does not matter, and to close the gap would cost as much as the list is long.
                self._missing[position], self._missing[-1] = self._missing[-1], self._missing[position]
                return self._missing.pop()
        return None

    def _end_slow_transfers(self, idle: _Holder, now: float) -> None:
        """End the transfers of other holders that the idle one would have done by now, three times over."""
        for index, transfer in self._transfers.items():
            if idle.has(index) and now - transfer.since > SLOW_S + 3 * idle.chunk_s:
                transfer.link.abort()

    def _ask(self, holder: _Holder, link: Link) -> None:
        held = link.held(self.manifest.version, len(self.manifest.digests))
        with self._changed:
            holder.held = held
            self._changed.notify_all()

    def _fetch(self, holder: _Holder, link: Link, index: int, buffer: Buffer) -> None:
        digest = self.manifest.digests[index]
        views = buffer.views(self._replica.chunks[index].ranges)
        link.fetch(self.manifest.version, index, digest, views)
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
