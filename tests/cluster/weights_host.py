"""A host's replica of synthetic weights, in a separate process without Ray.

    python -m tests.cluster.weights_host serve ADDRESS MIB MANIFEST
    python -m tests.cluster.weights_host pull ADDRESS MIB MANIFEST TIMEOUT-S ATTEMPTS URL…

``serve`` writes version 1 and puts its manifest into the file; ``pull`` gets it from the URLs, reads the bytes back as
an engine does, and also serves them. Both print a JSON object per line, and run until they are killed.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl_cli.weights.layout import TensorSlot, size_of
from asyncrl_cli.weights.manifest import Endpoint, Manifest, PullFailed
from asyncrl_cli.weights.pull import Pull
from asyncrl_cli.weights.replica import Replica
from asyncrl_cli.weights.transfer import Connection, WeightServer

TOKEN, VERSION, RANKS = "token", 1, 2


def main() -> None:
    mode, address, mib, manifest_file, *rest = sys.argv[1:]
    slots = (TensorSlot("weights", "uint8", (int(mib) * 2**20,), 0, 1),)
    replica = Replica(slots, RANKS)
    url = WeightServer(replica, TOKEN, address).url
    connect = partial(Connection, token=TOKEN)
    if mode == "serve":
        path = replica.begin(VERSION)
        with open(path, "r+b") as memory:
            memory.write(_content(slots))
        digests = replica.digest(VERSION, range(RANKS), ThreadPoolExecutor(2))
        manifest = Manifest.from_digests(VERSION, slots, RANKS, [digests])
        Path(manifest_file).write_bytes(pickle.dumps(manifest))
        _print(url=url)
    else:
        manifest = pickle.loads(Path(manifest_file).read_bytes())
        timeout_s, attempts, *urls = rest
        holders = [Endpoint(url, url) for url in urls]
        for _ in range(int(attempts)):
            _print(begun=True)
            try:
                pulled = Pull(replica, manifest, connect, holders, float(timeout_s)).run()
            except PullFailed as error:
                _print(failed=str(error), held=replica.versions().get(VERSION, 0))
                continue
            with open(pulled.path, "rb") as memory:
                equal = memory.read(size_of(slots)) == _content(slots)
            _print(
                url=url, fetched=pulled.fetched_bytes, seconds=pulled.seconds, equal=equal, faults=dict(pulled.faults)
            )
            break
    while True:
        time.sleep(60)


def _content(slots: tuple[TensorSlot, ...]) -> bytes:
    block = bytes(range(251)) * 4099  # its period is not a power of two, so a chunk at a wrong offset has other bytes
    size = size_of(slots)
    return (block * (size // len(block) + 1))[:size]


def _print(**what: Any) -> None:
    print(json.dumps({"pid": os.getpid(), **what}), flush=True)


if __name__ == "__main__":
    main()
