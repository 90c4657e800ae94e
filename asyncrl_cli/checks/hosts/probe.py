"""What is measured on one host: a Ray actor there opens a port at the host's own address, as the processes of a run do,
and connects to those of the other hosts.

The protocol: a client sends the secret of this check, the server answers with its node's id, then the client sends any
number of commands: ``p`` is answered with ``p``, ``d`` with ``SAMPLE_BYTES`` bytes.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from asyncrl_cli.checks.hosts import shared_folder
from asyncrl_cli.core.errors import ConfigError

CONNECT_S = 5.0
"""Seconds for a connection and its first answer."""
SAMPLE_BYTES = 4 * 2**20
"""Bytes sent from each host to each other one."""
SAMPLE_S = 5.0
"""Seconds that they may take; the speed of a slower pair is that of the bytes so far."""
STALLED_BYTES = 64 * 2**10
"""Fewer bytes than these in ``SAMPLE_S`` seconds are not a slow link, but one that loses large packets."""
PINGS = 5

Failure = Literal["refused", "silent", "no route", "another host", "stalled", "closed"]
"""Why one host cannot connect to another."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where another host's probe listens."""

    node_id: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that one host reports: the port of its probe, versions by package (also ``python`` and ``asyncrl``),
    the checksum of asyncrl's code, available memory in bytes, whether Ray asks for a token there, and why torch cannot
    use its GPUs, with a hint (None if it can)."""

    port: int
    versions: Mapping[str, str]
    code: str
    memory: int
    token: bool
    driver: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    """From one host to another: the shortest round trip in seconds, and bytes per second."""

    latency_s: float
    bytes_per_s: float


class HostProbe:
    """One host's part of the check."""

    def __init__(self, node_id: str, secret: str) -> None:
        self._node_id = node_id
        self._secret = secret.encode()
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> Facts:
        """Listen at the host's own address. Raises ``ConfigError`` when the host does not have it."""
        try:
            self._server = await asyncio.start_server(self._serve, address, 0)
        except OSError as error:
            message = f"Ray has the address {address} for this host, and cannot listen there: {error.strerror}"
            raise ConfigError(message, hint="start Ray with a --node-ip-address that the host has") from None
        port = self._server.sockets[0].getsockname()[1]
        return await asyncio.to_thread(_facts, port)

    async def clock(self) -> float:
        """Seconds since 1970, by this host's clock."""
        return time.time()

    async def reach(self, targets: list[Target]) -> dict[str, Failure]:
        """Connect to all other hosts at once; the failures, by node id."""

        async def connect(target: Target) -> Failure | None:
            try:
                async with self._connected(target):
                    return None
            except PairFailed as failed:
                return failed.failure

        failures = await asyncio.gather(*(connect(target) for target in targets))
        return {target.node_id: failure for target, failure in zip(targets, failures, strict=True) if failure}

    async def measure(self, target: Target) -> Speed | Failure:
        """How fast bytes come from another host."""
        try:
            async with self._connected(target) as (reader, writer):
                latency = min([await _ping(reader, writer) for _ in range(PINGS)])
                received, seconds = await _download(reader, writer)
        except PairFailed as failed:
            return failed.failure
        if received < STALLED_BYTES:
            return "stalled"
        return Speed(latency, received / seconds)

    async def share(self, mark: shared_folder.Mark) -> str:
        """The problem with the shared folder on this host, or an empty text."""
        return await asyncio.to_thread(shared_folder.answer, mark, self._node_id)

    @asynccontextmanager
    async def _connected(self, target: Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection to another host's probe. Raises ``PairFailed``, in the block, too."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(target.address, target.port)
                writer.write(self._secret + b"\n")
                found = (await reader.readline()).strip().decode(errors="replace")
            if found != target.node_id:  # two hosts with one address, or a proxy between them
                raise PairFailed("another host")
            yield reader, writer
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise PairFailed(failure_of(error)) from error
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            secret = await reader.readline()
            if hmac.compare_digest(secret.strip(), self._secret):
                writer.write(self._node_id.encode() + b"\n")
                while command := await reader.read(1):
                    writer.write(b"p" if command == b"p" else bytes(SAMPLE_BYTES))
                    await writer.drain()
        writer.close()


class PairFailed(Exception):
    """A host does not reach another one."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure: Failure = failure


def failure_of(error: BaseException) -> Failure:
    """The kind of failure that an error of a connection means."""
    if isinstance(error, TimeoutError):
        return "silent"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL):
        return "no route"
    return "closed"


async def _ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    """Seconds of one round trip."""
    started = time.perf_counter()
    writer.write(b"p")
    async with asyncio.timeout(CONNECT_S):
        await reader.readexactly(1)
    return time.perf_counter() - started


async def _download(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, float]:
    """Bytes received, and the seconds that they took."""
    received, started = 0, time.perf_counter()
    writer.write(b"d")
    with suppress(TimeoutError):
        async with asyncio.timeout(SAMPLE_S):
            while received < SAMPLE_BYTES and (part := await reader.read(2**20)):
                received += len(part)
    return received, time.perf_counter() - started


def _facts(port: int) -> Facts:
    import platform

    from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

    from asyncrl_cli import __version__
    from asyncrl_cli.checks.machine import available_memory, driver_problem
    from asyncrl_cli.runs.manifest import code_checksum, package_versions

    versions = {"asyncrl": __version__, "python": platform.python_version(), **package_versions()}
    token = get_authentication_mode() == AuthenticationMode.TOKEN
    driver = driver_problem() if "vllm" in versions else None
    return Facts(port, versions, code_checksum(), available_memory(), token, driver)
