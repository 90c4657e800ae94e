"""Sandboxes for commands, seen from the worker: a process of bwrap, and a socket to the supervisor inside (in gVisor,
with that kind). The kind and the limits are in the spec (``SandboxSpec``).

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

from asyncrl_cli.sandbox import bubblewrap, confine, filters, gvisor, processes, supervisor, wire, work_files
from asyncrl_cli.sandbox.bubblewrap import WORK_FOLDER, SandboxError
from asyncrl_cli.spec.inputs import SandboxSpec

__all__ = ["WORK_FOLDER", "BlockingSandbox", "CommandResult", "Kind", "ShellSandbox", "Stopped", "open_sandbox"]

GATEWAY_PORT = 18181
"""Port of 127.0.0.1 that leads to the gateway, inside."""
NO_VARIABLES: Mapping[str, str] = {}
OPEN_FILES = 1024
START_S = 60.0
"""Seconds that starting may take, on a busy machine."""
GRACE_S = 30.0
"""Seconds beyond its time that a command's result may take, on a busy machine."""
FILE_S = 60.0
END_S = 10.0
GVISOR_LOOK_S = 1.0
"""Seconds between two looks at gVisor's memory; most commands end before the first."""
GVISOR_MB = 256
"""Memory that gVisor may take in addition to the memory and the files of its processes."""
PIECE = 2**16

Kind = Literal["bubblewrap", "gvisor", "none"]
Stopped = Literal["", "time", "memory", "disk", "processes"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    status: int | None
    """Its exit status (128 + the signal's number, if a signal ended it), or None if it was stopped."""
    output: str
    """The text printed on both streams, in order; the middle of a long text is omitted."""
    stopped: Stopped = ""
    """The limit that it reached, if any. ``disk``: no space or files are left; ``processes``: there were as many as
    there may be."""


@asynccontextmanager
async def open_sandbox(settings: SandboxSpec, *, gateway: str | None = None) -> AsyncIterator[ShellSandbox]:
    """A sandbox, which is closed at the end. ``gateway``: the base URL that it may reach, with ``network: gateway``.

    Raises ``SandboxError`` when it cannot be started.
    """
    sandbox = ShellSandbox(settings, gateway if settings.network == "gateway" else None)
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()


class ShellSandbox:
    """A sandbox. Its files stay from one command to the next; its processes do not."""

    def __init__(self, settings: SandboxSpec, gateway: str | None) -> None:
        """Start its process. Raises ``SandboxError``."""
        self.base_url = gateway
        """The gateway's base URL, as seen inside; None without a gateway."""
        inside = settings.kind != "none"
        self._settings = settings
        self._relay = Relay(gateway) if gateway is not None and inside else None
        self._turn = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._current: asyncio.Task[list[bytes]] | None = None
        """The exchange that is under way."""
        self._closed = False
        self._order: dict[str, Any] = {
            "kind": settings.kind,
            "memory_mb": settings.memory_mb,
            "processes": settings.processes,
            "port": GATEWAY_PORT if self._relay else 0,
            "folder": WORK_FOLDER if inside else tempfile.mkdtemp(prefix="asyncrl-sandbox-"),
        }
        self._order["environment"] = _environment() | ({} if inside else {"HOME": self._order["folder"]})
        if gateway is not None:
            url = urlsplit(gateway)._replace(scheme="http", netloc=f"127.0.0.1:{GATEWAY_PORT}")
            self.base_url = urlunsplit(url) if inside else gateway
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
        """The process of bwrap, or of the supervisor itself."""
        kind = self._settings.kind
        if kind == "none":
            root = str(bubblewrap.PACKAGES)
            command = bubblewrap.python(supervisor.__name__, root, [str(control)])
            return bubblewrap.Process(command, passed=[control], environment={})
        for program in ("bwrap", "runsc") if kind == "gvisor" else ("bwrap",):
            if shutil.which(program) is None:
                raise SandboxError(f"{program} is not installed")
        taken = bubblewrap.unused_uid()
        uid, further = (gvisor.USER, gvisor.SYSTEM_CALLS) if kind == "gvisor" else (taken, frozenset[str]())
        confinement = confine.Confinement(
            limits={"RLIMIT_DATA": self._settings.memory_mb * confine.MEGABYTE, "RLIMIT_NOFILE": OPEN_FILES},
            uid=uid,
            processes=self._settings.processes + 1,
            filter=base64.b64encode(filters.for_commands(further)).decode(),
        )
        self._order["confinement"] = asdict(confinement)
        visible = bubblewrap.visible_to_commands(self._settings)
        command = bubblewrap.python(supervisor.__name__, bubblewrap.OWN, ["0" if kind == "gvisor" else str(control)])
        if kind == "gvisor":
            container = gvisor.container(
                command,
                capabilities=bubblewrap.CAPABILITIES,
                disk_mb=self._settings.disk_mb,
                folder=WORK_FOLDER,
                visible=visible,
            )
            words = [str(control), str(taken), "relay" if self._relay else "", json.dumps(container)]
            command = bubblewrap.python(gvisor.__name__, bubblewrap.OWN, words)
        files: dict[str, int] = {}
        try:
            for path, text in _accounts(uid or 1000).items():
                files[path] = bubblewrap.file_of(text.encode())
            bwrap = bubblewrap.for_commands(self._settings, visible, files)
            # In this thread, the loop's: bwrap ends with the thread that has started it.
            return bubblewrap.Process(command, bwrap, passed=[control, *files.values()], environment={})
        finally:
            for file in files.values():
                os.close(file)

    async def start(self) -> None:
        """Wait until it is confined. Raises ``SandboxError``."""
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
        """The socket to which connections from inside come."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._control, readable.set_result, None)
        readable.add_done_callback(lambda _: loop.remove_reader(self._control))
        await readable
        message = wire.packed([gvisor.LISTENING])
        first, descriptors, _, _ = socket.recv_fds(self._control, len(message), 1)
        listening = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        rest = await self._read(len(message) - len(first)) if first else b""
        if first + rest != message or not listening:
            for one in listening:
                one.close()
            raise SandboxError("it has ended")
        return listening[0]

    async def run(
        self, command: str, *, time_s: float | None = None, env: Mapping[str, str] = NO_VARIABLES
    ) -> CommandResult:
        """Run a line in a fresh shell (bash where there is one) in the work folder, and end what it has left running.

        One runs at a time: others wait. A cancelled one is stopped. Raises ``SandboxError`` once the sandbox is gone.
        """
        time_s = self._settings.time_s if time_s is None else time_s
        variables = json.dumps(dict(env), ensure_ascii=False)
        order = [word.encode(errors="replace") for word in ("run", command, str(time_s), variables)]
        answer = await self._ask(order, time_s + GRACE_S)
        try:
            status, stopped, output = answer
            # Whoever gets this answer has not cancelled: then `_stop_for_memory` has.
            limit = cast("Stopped", "memory" if stopped == supervisor.CANCELLED else stopped.decode())
            return CommandResult(None if limit else int(status), output.decode(errors="replace"), limit)
        except ValueError as error:
            raise SandboxError(f"an invalid answer from the sandbox: {error}") from error

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, with its folders; ``path`` is relative to the work folder.

        Raises ``OSError`` for a path that leaves it or leads through a link, and for want of space.
        """
        work_files.parts_of(path)
        if len(data) > work_files.MOST_BYTES:
            raise OSError(f"larger than {work_files.MOST_BYTES >> 20} MiB: {path}")
        await self._ask([b"write", os.fsencode(path), data], FILE_S)

    async def read_file(self, path: str) -> bytes:
        """The content of a file; ``path`` is relative to the work folder.

        Raises ``OSError`` for a path that leaves it or leads through a link, and for anything except a file.
        """
        work_files.parts_of(path)
        (data,) = await self._ask([b"read", os.fsencode(path)], FILE_S)
        return data

    async def close(self) -> None:
        """End its processes and remove its files. May be called again."""
        if self._relay is not None:
            await self._relay.close()
        await self._end()

    async def _ask(self, order: Sequence[bytes], time_s: float) -> list[bytes]:
        """The supervisor's answer. Raises ``OSError`` of the kind that it had, and ``SandboxError``.

        It still takes the answer of an order that is cancelled, or the next order would: a command is stopped.
        """
        exchange = asyncio.create_task(self._exchange(order, time_s))
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            if exchange is not self._current:  # it waits for its turn
                exchange.cancel()
            elif order[0] == b"run":
                with suppress(OSError):
                    await self._send([b"stop"])
            raise

    async def _exchange(self, order: Sequence[bytes], time_s: float) -> list[bytes]:
        async with self._turn:
            self._current = asyncio.current_task()
            watched = order[0] == b"run" and self._settings.kind == "gvisor"
            watch = asyncio.create_task(self._stop_for_memory()) if watched else None
            try:
                async with asyncio.timeout(time_s):
                    await self._send(order)
                    kind, *fields = await self._receive()
            except asyncio.CancelledError:
                self._shut()
                raise
            except (OSError, ValueError) as error:  # TimeoutError and WireError are among them
                self._shut()
                raise SandboxError(f"the sandbox has ended: {error or 'no answer'}") from error
            finally:
                self._current = None
                if watch is not None:
                    watch.cancel()
        if kind == b"error":
            raise OSError(int(fields[0]), fields[1].decode(errors="replace"))
        return fields

    async def _stop_for_memory(self) -> None:
        """Stop the command if gVisor takes too much memory, its own included.

        The supervisor adds up what processes inside have. Files, pipes and sockets without number, too, take memory of
        gVisor itself, which only its processes on this machine show.
        """
        most = (self._settings.memory_mb + 2 * self._settings.disk_mb + GVISOR_MB) * confine.MEGABYTE
        used = 0
        while used <= most:
            await asyncio.sleep(GVISOR_LOOK_S)
            used = await asyncio.to_thread(processes.memory_below, self._process.pid)
        with suppress(OSError):
            await self._send([b"stop"])

    async def _send(self, fields: Sequence[bytes]) -> None:
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._control, wire.packed(fields))

    async def _receive(self) -> list[bytes]:
        return wire.unpacked(await self._read(wire.size_of(await self._read(wire.HEAD))))

    async def _read(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            if not (piece := await loop.sock_recv(self._control, min(size - len(data), 2**20))):
                raise SandboxError("it has ended")
            data += piece
        return bytes(data)

    def _shut(self) -> None:
        """Have the supervisor end, and whatever waits for its answer."""
        with suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_RDWR)

    async def _end(self) -> str:
        """End it; the last line that it printed before it was ready."""
        self._shut()
        async with self._turn:  # not before whoever waits for an answer has left the socket
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
    """A ``ShellSandbox`` for code that runs in threads, as tools and environments do. Not for the event loop."""

    def __init__(self, sandbox: ShellSandbox, loop: asyncio.AbstractEventLoop) -> None:
        self.base_url = sandbox.base_url
        self._sandbox = sandbox
        self._loop = loop

    def run(self, command: str, *, time_s: float | None = None, env: Mapping[str, str] = NO_VARIABLES) -> CommandResult:
        """As ``ShellSandbox.run``."""
        return self._done(self._sandbox.run(command, time_s=time_s, env=env))

    def write_file(self, path: str, data: bytes) -> None:
        """As ``ShellSandbox.write_file``."""
        self._done(self._sandbox.write_file(path, data))

    def read_file(self, path: str) -> bytes:
        """As ``ShellSandbox.read_file``."""
        return self._done(self._sandbox.read_file(path))

    def _done(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        work.close()
        raise RuntimeError(f"call it in a thread: here it would block the event loop {running!r}")


class Relay:
    """Copies bytes between connections from inside and connections to the gateway, and to nothing else.

    The socket that listens was made in the sandbox's network and handed to the worker, which accepts its connections:
    in the sandbox no process, and no file, leads outside.
    """

    def __init__(self, gateway: str) -> None:
        """``gateway``: its base URL."""
        url = urlsplit(gateway)
        self._tls = url.scheme == "https"
        self._host, self._port = url.hostname or "127.0.0.1", url.port or (443 if self._tls else 80)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket) -> None:
        """Accept connections from now on."""
        self._server = await asyncio.start_server(self._connected, sock=listening)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None)
            writers.append(far_writer)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the connection ends; whoever waits for an answer sees that
        finally:
            self._connections.discard(task)
            for one in writers:
                one.close()

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for task in (left := list(self._connections)):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE):
        writer.write(piece)
        await writer.drain()
    with suppress(OSError, NotImplementedError):  # TLS has no half-closed connections
        writer.write_eof()


def _accounts(uid: int) -> dict[str, str]:
    """Files of the one user, and of the one host."""
    return {
        "/etc/passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{uid}:{uid}:agent:{WORK_FOLDER}:/bin/sh\n",
        "/etc/group": f"root:x:0:\nagent:x:{uid}:\n",
        "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }


def _environment() -> dict[str, str]:
    """The variables that every command gets."""
    folders = (os.path.join(sys.prefix, "bin"), os.path.join(sys.base_prefix, "bin"))
    return {
        "PATH": ":".join((*dict.fromkeys(folders), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")),
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "agent",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
