"""How fast a process fetches a weight version from another process on this host, compared with a memory copy.

    python benchmarks/weight_movers.py [--mb 1 340] [--repeats N] [--streams 4]

Both processes reuse their memory from version to version, as in a run. Between hosts, the network may be slower.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import NamedTuple

from common import header, row, seconds_of

from asyncrl_cli.weights.layout import ByteRange, TensorSlot
from asyncrl_cli.weights.manifest import Endpoint, Manifest
from asyncrl_cli.weights.pull import STREAMS, Pull
from asyncrl_cli.weights.replica import Buffer, Replica
from asyncrl_cli.weights.transfer import Connection, WeightServer

TOKEN = "benchmark"
TENSORS = 64
RANKS = 2


class PullTimes(NamedTuple):
    """Medians in seconds for ``nbytes`` bytes: fetched and checked, copied in memory, and digested."""

    nbytes: int
    pull_s: float
    memcpy_s: float
    digest_s: float


def measure_pull(nbytes: int, repeats: int = 5, streams: int = STREAMS) -> PullTimes:
    """Fetch ``repeats`` versions of ``nbytes`` bytes from another process, and copy as many bytes after each."""
    each = nbytes // TENSORS // 64 * 64
    slots = tuple(TensorSlot(f"w{i}", "uint8", (each,), i * each, 1) for i in range(TENSORS))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(there, slots), daemon=True)
    server.start()
    there.close()
    replica = Replica(slots, RANKS)
    connect = partial(Connection, token=TOKEN)
    source, target = (Buffer(TENSORS * each).views([ByteRange(0, TENSORS * each)])[0] for _ in range(2))
    pulls, copies, digests = [], [], []
    for version in range(repeats + 2):  # the first two versions use new memory
        here.send(version)
        url, manifest, digest_s = here.recv()
        pulls.append(Pull(replica, manifest, connect, [Endpoint("", url)], 600, streams).run().seconds)
        copies.append(seconds_of(lambda: target.__setitem__(slice(None), source)))
        digests.append(digest_s)
    here.close()
    server.join(10)
    replica.close()
    return PullTimes(TENSORS * each, *(median(seconds[2:]) for seconds in (pulls, copies, digests)))


def _serve(connection: Pipe, slots: tuple[TensorSlot, ...]) -> None:
    """Act as the trainer's host: for each received number, create another version with other bytes."""
    replica = Replica(slots, RANKS)
    url = WeightServer(replica, TOKEN, "127.0.0.1").url
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
            current = Manifest.from_digests(version, slots, RANKS, [parts])
            connection.send((url, current, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 340], help="sizes in MB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[STREAMS], help="connections of a pull")
    arguments = parser.parse_args()
    print(header("MB", "streams", "pull ms", "MB/s", "digest ms", "memcpy ms", "pull / memcpy"))
    for megabytes, streams in product(arguments.mb, arguments.streams):
        nbytes, pull_s, memcpy_s, digest_s = measure_pull(megabytes * 10**6, arguments.repeats, streams)
        milliseconds = (f"{seconds * 1e3:.1f}" for seconds in (digest_s, memcpy_s))
        rate, ratio = f"{nbytes / pull_s / 1e6:.0f}", f"{pull_s / memcpy_s:.1f}"
        print(row(f"{nbytes / 1e6:.0f}", str(streams), f"{pull_s * 1e3:.1f}", rate, *milliseconds, ratio))


if __name__ == "__main__":
    main()
