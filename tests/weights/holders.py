"""Hosts that hold version 1, correct or faulty, each in a separate process.

A version's bytes are a function of its number, so each process can compute them.
"""

from __future__ import annotations

import http.server
import os
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection

from asyncrl_cli.weights.layout import CHUNK_BYTES, TensorSlot, chunks_of
from asyncrl_cli.weights.manifest import Manifest
from asyncrl_cli.weights.replica import Replica
from asyncrl_cli.weights.transfer import WeightServer

TOKEN = "the-token-of-the-run-under-test"
RANKS = 2
SLOTS = (
    TensorSlot("large", "float32", (8 * CHUNK_BYTES // 4 + 5,), 0, 4),
    TensorSlot("scale", "bfloat16", (3,), 8 * CHUNK_BYTES + 64, 2),
)
CHUNKS = chunks_of(SLOTS, RANKS)
STEP = 64 * 1024
"""Bytes that a slow holder sends at a time."""


@cache
def content(version: int) -> bytes:
    """A version's bytes, from offset 0."""
    size = SLOTS[-1].offset + SLOTS[-1].nbytes
    block = bytes((version * 37 + i) % 256 for i in range(2**16 + version))
    return (block * (size // len(block) + 1))[:size]


def chunk_bytes(version: int, index: int) -> bytes:
    return b"".join(content(version)[start:stop] for start, stop in CHUNKS[index].ranges)


def hold(replica: Replica, version: int, ranks: Iterable[int] = range(RANKS)) -> dict[int, str]:
    """Write these ranks' shards of the version, like the ranks; returns the digests."""
    descriptor = os.open(replica.begin(version), os.O_RDWR)
    os.pwrite(descriptor, content(version), 0)
    os.close(descriptor)
    with ThreadPoolExecutor(2) as threads:
        return replica.digest(version, set(ranks), threads)


@cache
def manifest(version: int) -> Manifest:
    replica = Replica(SLOTS, RANKS)
    digests = hold(replica, version)
    replica.close()
    return Manifest.from_digests(version, SLOTS, RANKS, [digests])


class BadHolder(http.server.BaseHTTPRequestHandler):
    """Claims to have all chunks, but does not deliver them correctly."""

    protocol_version = "HTTP/1.1"
    kind = ""
    reports: Connection

    def do_GET(self) -> None:
        _, _, _, *chunk = self.path.split("/")
        if not chunk:
            self.answer(b"\x01" * len(CHUNKS))
            return
        body = chunk_bytes(1, int(chunk[1]))
        kinds: dict[str, Callable[[bytes], None]] = {
            "lying": lambda body: self.answer(bytes([body[0] ^ 1]) + body[1:]),
            "other-version": lambda _: self.answer(chunk_bytes(2, int(chunk[1]))),
            "short": lambda body: self.answer(body[:-1]),
            "long": lambda body: self.answer(body + b"x"),
            "cut": lambda body: self.answer(body, send=len(body) // 2),
            "error": lambda _: self.answer(b"", status=500),
            "refusing": lambda _: self.answer(b"", status=401),
            "nothing-after-all": lambda _: self.answer(b"", status=404),
            "no-http": lambda _: self.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
            "endless-head": lambda _: self.write(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000),
            "silent": lambda _: self.wait(),
            "stalling": lambda body: self.answer(body, send=len(body) // 2, then=self.wait),
            "slow": lambda body: self.answer(body, step_s=0.05),
        }
        kinds[self.kind](body)

    def answer(
        self,
        body: bytes,
        status: int = 200,
        send: int | None = None,
        step_s: float = 0.0,
        then: Callable[[], None] | None = None,
    ) -> None:
        self.close_connection = send is not None
        self.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        for start in range(0, len(body) if send is None else send, STEP):
            self.write(body[start : min(start + STEP, send or len(body))])
            time.sleep(step_s)
        if then is not None:
            then()

    def write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def wait(self) -> None:
        self.reports.send("waiting")
        time.sleep(3600)

    def log_message(self, *_: object) -> None:
        pass


def serve(kind: str, reports: Connection) -> None:
    """Send the URL, and serve until this process is killed. A holder that stops in the middle sends "waiting", too."""
    if kind in ("good", "rank-0", "rank-1"):
        replica = Replica(SLOTS, RANKS)
        hold(replica, 1, {"rank-0": [0], "rank-1": [1]}.get(kind, range(RANKS)))
        reports.send(WeightServer(replica, TOKEN, "127.0.0.1").url)
        signal.pause()
    BadHolder.kind, BadHolder.reports = kind, reports
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), BadHolder)
    server.handle_error = lambda *_: None  # clients close connections, as expected
    reports.send(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()
