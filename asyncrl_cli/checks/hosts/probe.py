"""One host's part of the check: a Ray actor opens a port at the host's address, as the processes of a run do, and
connects to the other hosts. A client sends the secret of this check, and the server answers with its node's id.

The hosts also show that they see the same folder: each host finds the driver's file, and the driver finds a file from
each host. Equal paths prove nothing, because every host may have its own disk there. The files are in a new folder with
a random name, so they cannot come from an earlier check.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from asyncrl_cli.checks.machine import driver_problem
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.system.memory import available_memory

CONNECT_S = 5.0
"""Time limit, in seconds, for a connection and its answer."""
VISIBLE_S = 10.0
"""Time limit, in seconds, for one host's file to appear on another. Network file systems cache a folder's contents for
some seconds."""
POLL_S = 0.1


class HostProblem(NamedTuple):
    """A problem of a host, and its remedy."""

    text: str
    hint: str


SILENT = HostProblem(
    f"gave no answer within {CONNECT_S:.0f} s",
    "a firewall drops the packets: open all TCP ports between the hosts; or other hosts cannot reach this address: "
    "start Ray with the right --node-ip-address",
)
REFUSED = HostProblem(
    "refused the connection",
    "a firewall rejects it, or another host has this address: open all TCP ports between the hosts",
)
NO_ROUTE = HostProblem(
    "cannot be reached: no route",
    "the address belongs to another network: start Ray with the --node-ip-address of the network that hosts share",
)
CLOSED = HostProblem("closed the connection", "see Ray's logs on that host; its probe may have been killed")
ANOTHER_HOST = HostProblem(
    "did not answer: another process answered at its address",
    "two hosts have one address: start Ray with a --node-ip-address that is not a bridge's, such as docker0",
)


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
class HostReport:
    """A host's report about itself."""

    port: int  # of its probe
    versions: Mapping[str, str]  # by package, ``python`` and ``asyncrl`` included
    code: str  # checksum of asyncrl's code
    memory: int  # available bytes
    token: bool  # True if Ray asks for a token
    driver: HostProblem | None = None  # why torch cannot use its GPUs


class Surroundings(NamedTuple):
    """A host's report about the other hosts (by name), and about the shared folder ("" if it is shared)."""

    unreachable: Mapping[str, HostProblem]
    folder_problem: str


class HostProbe:
    """The Ray actor on each host."""

    def __init__(self, host: Host, secret: str) -> None:
        self._host = host
        self._secret = secret.encode()
        self._server: asyncio.Server | None = None

    async def open(self) -> HostReport:
        """Listen at the host's own address. Raises ``ConfigError`` when the host does not have it."""
        address = self._host.address
        try:
            self._server = await asyncio.start_server(self._serve, address, 0)
        except OSError as error:
            message = f"Ray has the address {address} for this host, and cannot listen there: {error.strerror}"
            raise ConfigError(message, hint="start Ray with a --node-ip-address that the host has") from None
        return await asyncio.to_thread(_report, self._server.sockets[0].getsockname()[1])

    async def examine(self, other_hosts: list[Host], mark: Path) -> Surroundings:
        """Connect to all other hosts in parallel, and use the shared folder."""
        problems = await asyncio.gather(*map(self.connection_problem, other_hosts))
        unreachable = {host.name: problem for host, problem in zip(other_hosts, problems, strict=True) if problem}
        return Surroundings(unreachable, await asyncio.to_thread(answer, mark, self._host.node_id))

    async def connection_problem(self, target: Host) -> HostProblem | None:
        """Connect to another host. Returns the problem if this fails."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(target.address, target.port)
                writer.write(self._secret + b"\n")
                node_id = (await reader.readline()).strip().decode(errors="replace")
        except TimeoutError:
            return SILENT
        except ConnectionRefusedError:
            return REFUSED
        except (OSError, ValueError) as error:
            no_route = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL)
            return NO_ROUTE if getattr(error, "errno", None) in no_route else CLOSED
        finally:
            if writer is not None:
                writer.transport.abort()
        if not node_id:
            return CLOSED
        return None if node_id == target.node_id else ANOTHER_HOST  # a proxy, or two hosts with one address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError):
            secret = await reader.readline()
            if hmac.compare_digest(secret.strip(), self._secret):
                writer.write(self._host.node_id.encode() + b"\n")
                await writer.drain()
        writer.close()


def _report(port: int) -> HostReport:
    import platform

    from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

    from asyncrl_cli import __version__
    from asyncrl_cli.runs.manifest import code_checksum, package_versions

    versions = {"asyncrl": __version__, "python": platform.python_version(), **package_versions()}
    unusable_gpus = driver_problem() if "vllm" in versions else None
    return HostReport(
        port=port,
        versions=versions,
        code=code_checksum(),
        memory=available_memory(),
        token=get_authentication_mode() == AuthenticationMode.TOKEN,
        driver=None if unusable_gpus is None else HostProblem(*unusable_gpus),
    )


@contextmanager
def marked_folder(folder: Path) -> Iterator[Path]:
    """Make a new folder with the driver's file inside ``folder``, and remove everything created at the end.

    Creates ``folder`` if it is missing. Raises ``ConfigError`` if it cannot be written.
    """
    folder = folder.absolute()
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    mark = folder / f".asyncrl-shared-{secrets.token_hex(16)}"
    try:
        try:
            mark.mkdir(parents=True)
            _write(mark / "driver")
        except OSError as error:
            hint = "name a folder that every host can write, on a shared file system"
            raise ConfigError(f"{folder}: {error.strerror}", location="runs_dir", hint=hint) from None
        yield mark
    finally:
        shutil.rmtree(mark, ignore_errors=True)
        for path in created:
            with suppress(OSError):  # another process has put something there
                path.rmdir()


def answer(mark: Path, name: str, limit_s: float = VISIBLE_S) -> str:
    """On another host: find the driver's file, and write a file ``name``. Returns the problem, or empty text."""
    folder = mark.parent
    if not appears(mark / "driver", limit_s):
        return f"does not see the driver's files in {folder}" if folder.is_dir() else f"has no folder {folder}"
    try:
        _write(mark / name)
    except OSError as error:
        return f"cannot write into {folder}: {error.strerror}"
    return ""


def appears(path: Path, limit_s: float = VISIBLE_S) -> bool:
    """Wait for a file. Returns False if it does not appear within ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not path.is_file():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _write(path: Path) -> None:
    with path.open("w") as file:
        file.write("asyncrl")
        file.flush()
        os.fsync(file.fileno())
