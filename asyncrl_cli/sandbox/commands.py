"""Sandboxes for commands, as the worker uses them: a process of bwrap, and a socket to the supervisor inside it. The
spec sets the kind and the limits (``SandboxSpec``).

async with open_sandbox(SandboxSpec(), gateway=model.base_url) as sandbox:
    await sandbox.write_file("fix.py", b"print(1 + 1)")
    result = await sandbox.run("python fix.py")     # result.output == "2\n", result.status == 0
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from asyncrl_cli.sandbox import bubblewrap, confine, container, filters, supervisor, wire, work_files
from asyncrl_cli.sandbox.bubblewrap import WORK_FOLDER, SandboxError
from asyncrl_cli.spec.inputs import SandboxSpec
from asyncrl_cli.system.reaper import MARK

__all__ = ["WORK_FOLDER", "BlockingSandbox", "CommandResult", "SandboxKind", "ShellSandbox", "Stopped", "open_sandbox"]

GATEWAY_PORT = 18181
"""Port of 127.0.0.1 that leads to the gateway from inside."""
NO_VARIABLES: Mapping[str, str] = {}
OPEN_FILES = 1024
START_S = 60.0
"""Seconds that a start may take on a busy machine."""
GRACE_S = 30.0
"""Seconds that a command's result may be late on a busy machine, after the command's time limit."""
FILE_S = 60.0
END_S = 10.0
CHUNK_BYTES = 2**16

SandboxKind = Literal["bubblewrap", "container", "none"]
Stopped = Literal["", "time", "memory", "disk", "processes"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    status: int | None
    """Exit status (128 + the signal's number, if a signal ended the command), or None if it was stopped."""
    output: str
    """The text printed on both streams, in order, without the middle of a long text."""
    stopped: Stopped = ""
    """The limit that stopped it, if any. ``disk``: no space left, or too many files."""
    errors: str = ""
    """The text on standard error, if it was to be kept apart from ``output``."""


@asynccontextmanager
async def open_sandbox(settings: SandboxSpec, *, gateway: str | None = None) -> AsyncIterator[ShellSandbox]:
    """Start a sandbox, and close it at the end. ``gateway``: the base URL that ``network: gateway`` lets it reach.

    Raises ``SandboxError`` if it does not start.
    """
    sandbox = ShellSandbox(settings, gateway if settings.network == "gateway" else None)
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()


class ShellSandbox:
    """A sandbox for commands. Files stay from one command to the next; processes do not."""

    def __init__(self, settings: SandboxSpec, gateway: str | None) -> None:
        """Start the process. Raises ``SandboxError``."""
        self.base_url = gateway
        """The gateway's base URL inside; None without a gateway."""
        self.scratch = WORK_FOLDER if settings.kind == "container" else ""
        """Folder for files that are not the task's. Empty: the work folder, which is empty at first."""
        is_sandboxed = settings.kind != "none"
        self._settings = settings
        self._relay = Relay(gateway) if gateway is not None and is_sandboxed else None
        self._turn = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._current: asyncio.Task[list[bytes]] | None = None
        """The exchange that uses the socket now."""
        self._closed = False
        self._order: dict[str, Any] = settings.model_dump() | {
            "port": GATEWAY_PORT if self._relay else 0,
            "folder": WORK_FOLDER if is_sandboxed else tempfile.mkdtemp(prefix="asyncrl-sandbox-"),
            "run": os.environ.get(MARK, ""),
        }
        # An image sets its own environment.
        self._order["environment"] = {} if settings.kind == "container" else _environment()
        if not is_sandboxed:
            self._order["environment"]["HOME"] = self._order["folder"]
        if gateway is not None:
            url = urlsplit(gateway)._replace(scheme="http", netloc=f"127.0.0.1:{GATEWAY_PORT}")
            self.base_url = urlunsplit(url) if is_sandboxed else gateway
            self._order["environment"]["OPENAI_BASE_URL"] = self.base_url
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        try:
            self._process = self._started(theirs.fileno())
        except OSError as error:
            self._control.close()
            raise SandboxError(f"the sandbox cannot be started: {error}") from error
        finally:
            theirs.close()

    def _started(self, control: int) -> bubblewrap.Process:
        """Start bwrap, or the supervisor itself if it runs outside."""
        if self._settings.kind != "bubblewrap":
            is_container = self._settings.kind == "container"
            module, environment = (container, container.engine_environment()) if is_container else (supervisor, {})
            command = bubblewrap.python(module.__name__, str(bubblewrap.PACKAGE_ROOT), [str(control)])
            return bubblewrap.Process(command, inherited_descriptors=[control], environment=environment)
        if shutil.which("bwrap") is None:
            raise SandboxError("bwrap is not installed")
        uid = bubblewrap.unused_uid()
        confinement = confine.Confinement(
            limits={"RLIMIT_DATA": self._settings.memory_mb * confine.MEGABYTE, "RLIMIT_NOFILE": OPEN_FILES},
            uid=uid,
            processes=self._settings.processes + 1,
            filter=base64.b64encode(filters.for_commands()).decode(),
        )
        self._order["confinement"] = asdict(confinement)
        visible = bubblewrap.visible_to_commands(self._settings)
        command = bubblewrap.python(supervisor.__name__, bubblewrap.PACKAGE_ROOT_INSIDE, [str(control)])
        files: dict[str, int] = {}
        try:
            for path, text in _accounts(uid or 1000).items():
                files[path] = bubblewrap.file_of(text.encode())
            bwrap = bubblewrap.for_commands(self._settings, visible, files)
            # In the event loop's thread: bwrap ends with the thread that starts it.
            return bubblewrap.Process(command, bwrap, inherited_descriptors=[control, *files.values()], environment={})
        finally:
            for file in files.values():
                os.close(file)

    async def start(self) -> None:
        """Wait until the supervisor has confined itself. Raises ``SandboxError``."""
        try:
            async with asyncio.timeout(START_S):
                await self._send([json.dumps(self._order).encode()])
                if self._relay is not None:
                    await self._relay.start(await self._listening())
                if await self._receive() != [supervisor.READY]:
                    raise SandboxError("it does not answer")
        except (OSError, wire.WireError) as error:
            reason = await self._end() or error
            raise SandboxError(f"the sandbox has not started: {reason}") from error

    async def _listening(self) -> socket.socket:
        """Receive the socket that accepts connections from inside."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._control, readable.set_result, None)
        readable.add_done_callback(lambda _: loop.remove_reader(self._control))
        await readable
        _, descriptors, _, _ = socket.recv_fds(self._control, len(supervisor.LISTENING), 1)
        if not descriptors:
            raise SandboxError("it has ended")
        return socket.socket(fileno=descriptors[0])

    async def run(
        self,
        command: str,
        *,
        time_s: float | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        errors_apart: bool = False,
    ) -> CommandResult:
        """Run a command in a new shell (bash if installed) in the work folder, and end processes that it left running.
        ``errors_apart``: keep the two streams apart.

        Commands run one at a time; others wait. A cancelled command is stopped. Raises ``SandboxError`` once the
        sandbox has ended.
        """
        time_s = self._settings.time_s if time_s is None else time_s
        words = ("run", command, str(time_s), json.dumps(dict(env)), "2" if errors_apart else "1")
        answer = await self._ask([word.encode(errors="replace") for word in words], time_s + GRACE_S)
        try:
            status, stopped, *outputs = answer
            output, errors = [*(text.decode(errors="replace") for text in outputs), ""][:2]
            limit = cast("Stopped", stopped.decode())
            return CommandResult(None if limit else int(status), output, limit, errors)
        except ValueError as error:
            raise SandboxError(f"an invalid answer from the sandbox: {error}") from error

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file and make its folders; ``path`` is relative to the work folder.

        Raises ``OSError`` if the path leaves the work folder or passes a link, or if no space is left.
        """
        if len(data) > work_files.MAX_BYTES:
            raise OSError(f"larger than {work_files.MAX_BYTES >> 20} MiB: {path}")
        await self._ask([b"write", os.fsencode(path), data], FILE_S)

    async def read_file(self, path: str) -> bytes:
        """Read a file; ``path`` is relative to the work folder.

        Raises ``OSError`` if the path leaves the work folder, passes a link, or is not a regular file.
        """
        (data,) = await self._ask([b"read", os.fsencode(path)], FILE_S)
        return data

    async def close(self) -> None:
        """End all processes and remove the files. May be called more than once."""
        if self._relay is not None:
            await self._relay.close()
        await self._end()

    async def _ask(self, order: Sequence[bytes], time_s: float) -> list[bytes]:
        """Send an order and return the supervisor's answer. Raises the supervisor's ``OSError``, and ``SandboxError``.

        The answer to a cancelled order is still read, or the next order would get it. A cancelled command is stopped.
        """
        exchange = asyncio.create_task(self._exchange(order, time_s))
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            if exchange is not self._current:  # still waiting for its turn
                exchange.cancel()
            elif order[0] == b"run":
                with suppress(OSError):
                    await self._send([b"stop"])
            raise

    async def _exchange(self, order: Sequence[bytes], time_s: float) -> list[bytes]:
        async with self._turn:
            self._current = asyncio.current_task()
            try:
                async with asyncio.timeout(time_s):
                    await self._send(order)
                    answer_type, *fields = await self._receive()
            except asyncio.CancelledError:
                self._shut()  # a part of the answer may be left in the socket, where the next order would read it
                raise
            except (OSError, ValueError) as error:  # includes TimeoutError and WireError
                self._shut()
                raise SandboxError(f"the sandbox has ended: {str(error) or 'no answer'}") from error
            finally:
                self._current = None
        if answer_type == b"error":
            raise OSError(int(fields[0]), fields[1].decode(errors="replace"))
        return fields

    async def _send(self, fields: Sequence[bytes]) -> None:
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._control, wire.packed(fields))

    async def _receive(self) -> list[bytes]:
        return wire.unpacked(await self._receive_bytes(wire.size_of(await self._receive_bytes(wire.HEAD))))

    async def _receive_bytes(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            if not (chunk := await loop.sock_recv(self._control, min(size - len(data), wire.CHUNK_BYTES))):
                raise SandboxError("it has ended")
            data += chunk
        return bytes(data)

    def _shut(self) -> None:
        """Close the socket in both directions: the supervisor ends, and no one waits for its answer."""
        with suppress(OSError):  # it has ended already
            self._control.shutdown(socket.SHUT_RDWR)

    async def _end(self) -> str:
        """End the process; return the last line that it printed before it was ready."""
        self._shut()
        async with self._turn:  # an exchange may still read from the socket, which must not be closed under it
            if self._closed:
                return ""
            self._closed = True
            self._control.close()
            return await asyncio.to_thread(self._wait)

    def _wait(self) -> str:
        self._process.end(END_S)
        line = self._process.last_line()
        self._process.close()
        return line


class BlockingSandbox:
    """A ``ShellSandbox`` for code in threads, such as tools and environments. Not for the event loop."""

    def __init__(self, sandbox: ShellSandbox, loop: asyncio.AbstractEventLoop) -> None:
        self.base_url = sandbox.base_url
        self._sandbox = sandbox
        self._loop = loop

    def run(self, command: str, *, time_s: float | None = None, env: Mapping[str, str] = NO_VARIABLES) -> CommandResult:
        """As ``ShellSandbox.run``."""
        return self._result(self._sandbox.run(command, time_s=time_s, env=env))

    def write_file(self, path: str, data: bytes) -> None:
        """As ``ShellSandbox.write_file``."""
        self._result(self._sandbox.write_file(path, data))

    def read_file(self, path: str) -> bytes:
        """As ``ShellSandbox.read_file``."""
        return self._result(self._sandbox.read_file(path))

    def _result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        coroutine.close()
        raise RuntimeError(f"call this in a thread: here it would block the event loop {running!r}")


class Relay:
    """Copies bytes between connections from inside and connections to the gateway, and to no other address.

    The listening socket was made in the sandbox's network and passed to the worker, which accepts the connections. So
    no process and no file inside leads out of the sandbox.
    """

    def __init__(self, gateway: str) -> None:
        """``gateway``: the gateway's base URL."""
        url = urlsplit(gateway)
        self._host, self._port = url.hostname, url.port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket) -> None:
        """Start to accept connections."""
        self._server = await asyncio.start_server(self._connected, sock=listening)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            writers.append(far_writer)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the client sees that its connection ends
        finally:
            self._connections.discard(task)
            for open_writer in writers:
                open_writer.close()

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for task in (open_connections := list(self._connections)):
            task.cancel()
        await asyncio.gather(*open_connections, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()


def _accounts(uid: int) -> dict[str, str]:
    """Files that name the sandbox's only user and host."""
    return {
        "/etc/passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{uid}:{uid}:agent:{WORK_FOLDER}:/bin/sh\n",
        "/etc/group": f"root:x:0:\nagent:x:{uid}:\n",
        "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }


def _environment() -> dict[str, str]:
    folders = (os.path.join(sys.prefix, "bin"), os.path.join(sys.base_prefix, "bin"))
    return {
        "PATH": ":".join((*dict.fromkeys(folders), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")),
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "agent",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
