"""How fast one process fetches a version of the weights from another on this host, against a copy of the same bytes.

    python benchmarks/weight_movers.py [--mb 1 340] [--repeats N]

Both processes keep their memory from version to version, as in a run. Over the network the slower of this and the
network counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

from asyncrl_cli.weights.http_mover import HttpMover
from asyncrl_cli.weights.layout import ByteRange, TensorSlot
from asyncrl_cli.weights.manifest import Endpoint, Manifest
from asyncrl_cli.weights.pull import Pull
from asyncrl_cli.weights.replica import Buffer, Replica

TOKEN = "benchmark"
TENSORS = 64
RANKS = 2


class PullTimes(NamedTuple):
    """Medians in seconds for ``nbytes`` bytes: fetched and checked, copied in memory, and digested."""

    nbytes: int
    pull_s: float
    memcpy_s: float
    digest_s: float


def measure_pull(nbytes: int, repeats: int = 5) -> PullTimes:
    """Fetch ``repeats`` versions of ``nbytes`` bytes from another process, and copy as many bytes after each."""
    each = nbytes // TENSORS // 64 * 64
    slots = tuple(TensorSlot(f"w{i}", "uint8", (each,), i * each, 1) for i in range(TENSORS))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(there, slots), daemon=True)
    server.start()
    there.close()
    replica = Replica(slots, RANKS)
    mover = HttpMover(TOKEN)
    source, target = (Buffer(TENSORS * each).views([ByteRange(0, TENSORS * each)])[0] for _ in range(2))
    pulls, copies, digests = [], [], []
    for version in range(repeats + 2):  # the first two have new memory
        here.send(version)
        url, manifest, digest_s = here.recv()
        pulls.append(Pull(replica, manifest, mover, [Endpoint("", url)], 600).run().seconds)
        copies.append(_seconds(lambda: target.__setitem__(slice(None), source)))
        digests.append(digest_s)
    here.close()
    server.join(10)
    replica.close()
    return PullTimes(TENSORS * each, *(median(seconds[2:]) for seconds in (pulls, copies, digests)))


def _serve(connection: Connection, slots: tuple[TensorSlot, ...]) -> None:
    """A trainer's host: for each number received it has another version, with other bytes."""
    replica = Replica(slots, RANKS)
    mover = HttpMover(TOKEN)
    url = mover.serve(replica, "127.0.0.1")
    current: Manifest | None = None
    with ThreadPoolExecutor() as threads:
        while True:
            try:
                version: int = connection.recv()
            except EOFError:
                return
            block = bytes((version + i) % 256 for i in range(2**16))
            with open(replica.begin(version, current), "r+b", buffering=0) as memory:
                for _ in range(0, slots[-1].offset + slots[-1].nbytes, len(block)):
                    memory.write(block)
            started = time.perf_counter()
            parts = replica.digest(version, range(RANKS), threads)
            seconds = time.perf_counter() - started
            current = Manifest.of(version, slots, RANKS, [parts])
            connection.send((url, current, seconds))


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 340], help="sizes in MB")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print("|     MB | pull ms | MB/s | digest ms | memcpy ms | pull / memcpy |")
    print("|-------:|--------:|-----:|----------:|----------:|--------------:|")
    for megabytes in arguments.mb:
        nbytes, pull_s, memcpy_s, digest_s = measure_pull(megabytes * 10**6, arguments.repeats)
        print(
            f"| {nbytes / 1e6:6.0f} | {pull_s * 1e3:7.1f} | {nbytes / pull_s / 1e6:4.0f} | {digest_s * 1e3:9.1f} "
            f"| {memcpy_s * 1e3:9.1f} | {pull_s / memcpy_s:13.1f} |"
        )


if __name__ == "__main__":
    main()
