"""One host's part of the check: a Ray actor opens a port at the host's address, as the processes of a run do, and
connects to the other hosts.

The protocol: a client sends the secret of this check, and the server answers with its node's id. To each further byte
from the client, the server answers with ``SAMPLE_BYTES`` bytes.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from asyncrl_cli.checks.hosts import shared_folder
from asyncrl_cli.checks.machine import driver_problem
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.system.memory import available_memory

CONNECT_S = 5.0
"""Time limit, in seconds, for a connection and its first answer."""
SAMPLE_BYTES = 4 * 2**20
SAMPLE_S = 5.0
"""Time limit for the sample in seconds. The speed of a slower pair follows from the bytes received until then."""
STALLED_BYTES = 64 * 2**10
"""A link that delivers fewer bytes in ``SAMPLE_S`` seconds is not slow: it loses large packets."""


class Failure(StrEnum):
    """Why one host cannot connect to another."""

    REFUSED = "refused"
    SILENT = "silent"
    NO_ROUTE = "no route"
    ANOTHER_HOST = "another host"
    STALLED = "stalled"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Host:
    """A node of the cluster."""

    node_id: str  # Ray's
    name: str  # unique and readable
    address: str
    # Fraction of a weight version that the host may hold: 1 if it may have an engine, otherwise the shards of as many
    # ranks as it has room for.
    share: float = 1.0
    port: int = 0  # of its probe


@dataclass(frozen=True, slots=True)
class Facts:
    """A host's report about itself."""

    port: int  # of its probe
    versions: Mapping[str, str]  # by package, ``python`` and ``asyncrl`` included
    code: str  # checksum of asyncrl's code
    memory: int  # available bytes
    token: bool  # True if Ray asks for a token
    clock: float  # seconds since 1970, at the end of the answer
    driver: tuple[str, str] | None = None  # why torch cannot use its GPUs, and a hint


@dataclass(frozen=True, slots=True)
class Answer:
    """A host's report about the other hosts."""

    failures: Mapping[str, Failure]  # by name
    speed: float | None  # bytes per second from its neighbour
    unshared: str  # the problem with the shared folder; empty if there is none


class HostProbe:
    """The Ray actor on each host."""

    def __init__(self, host: Host, secret: str) -> None:
        self._host = host
        self._secret = secret.encode()
        self._server: asyncio.Server | None = None

    async def open(self) -> Facts:
        """Listen at the host's own address. Raises ``ConfigError`` when the host does not have it."""
        address = self._host.address
        try:
            self._server = await asyncio.start_server(self._serve, address, 0)
        except OSError as error:
            message = f"Ray has the address {address} for this host, and cannot listen there: {error.strerror}"
            raise ConfigError(message, hint="start Ray with a --node-ip-address that the host has") from None
        return await asyncio.to_thread(_facts, self._server.sockets[0].getsockname()[1])

    async def examine(self, others: list[Host], neighbour: Host | None, mark: Path) -> Answer:
        """Connect to all other hosts in parallel, measure the speed from the neighbour, and use the shared folder."""
        found = await asyncio.gather(*map(self.reach, others))
        failures = {host.name: failure for host, failure in zip(others, found, strict=True) if failure}
        speed = None
        if neighbour is not None and neighbour.name not in failures:
            measured = await self.measure(neighbour)
            if isinstance(measured, Failure):
                failures[neighbour.name] = measured
            else:
                speed = measured
        return Answer(failures, speed, await asyncio.to_thread(shared_folder.answer, mark, self._host.node_id))

    async def reach(self, target: Host) -> Failure | None:
        """Connect to another host. Returns the reason if it fails."""
        try:
            async with self._connected(target):
                return None
        except PairFailed as failed:
            return failed.failure

    async def measure(self, target: Host) -> float | Failure:
        """Measure the bytes per second from another host."""
        received = 0
        try:
            async with self._connected(target) as (reader, writer):
                started = time.perf_counter()
                writer.write(b"d")
                with suppress(TimeoutError):
                    async with asyncio.timeout(SAMPLE_S):
                        while received < SAMPLE_BYTES and (part := await reader.read(2**20)):
                            received += len(part)
                seconds = time.perf_counter() - started
        except PairFailed as failed:
            return failed.failure
        return received / seconds if received >= STALLED_BYTES else Failure.STALLED

    @asynccontextmanager
    async def _connected(self, target: Host) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection to another host's probe. Raises ``PairFailed``, also for errors inside the block."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(target.address, target.port)
                writer.write(self._secret + b"\n")
                found = (await reader.readline()).strip().decode(errors="replace")
            if found != target.node_id:  # two hosts with one address, or a proxy between them
                raise PairFailed(Failure.ANOTHER_HOST)
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
                writer.write(self._host.node_id.encode() + b"\n")
                while await reader.read(1):
                    writer.write(bytes(SAMPLE_BYTES))
                    await writer.drain()
        writer.close()


class PairFailed(Exception):
    """A host does not reach another one."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def failure_of(error: BaseException) -> Failure:
    """Return the kind of failure for a connection's error."""
    if isinstance(error, TimeoutError):
        return Failure.SILENT
    if isinstance(error, ConnectionRefusedError):
        return Failure.REFUSED
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL):
        return Failure.NO_ROUTE
    return Failure.CLOSED


def _facts(port: int) -> Facts:
    import platform

    from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

    from asyncrl_cli import __version__
    from asyncrl_cli.runs.manifest import code_checksum, package_versions

    versions = {"asyncrl": __version__, "python": platform.python_version(), **package_versions()}
    return Facts(
        port=port,
        versions=versions,
        code=code_checksum(),
        memory=available_memory(),
        token=get_authentication_mode() == AuthenticationMode.TOKEN,
        driver=driver_problem() if "vllm" in versions else None,
        clock=time.time(),
    )
