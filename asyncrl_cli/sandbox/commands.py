"""A sandbox, seen from the worker: one process of bwrap, and a socket to the supervisor inside (in gVisor, if so)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

from asyncrl_cli.sandbox import (
    arguments,
    confine,
    gvisor,
    output,
    port,
    processes,
    shell_filter,
    supervisor,
    wire,
    work_files,
)
from asyncrl_cli.sandbox.blocking import BlockingSandbox
from asyncrl_cli.sandbox.bubblewrap import PACKAGES, SandboxError, file_of, last_line, python, unused_uid
from asyncrl_cli.sandbox.relay import Relay, inner_url
from asyncrl_cli.sandbox.settings import (
    GATEWAY_PORT,
    NO_VARIABLES,
    WORK_FOLDER,
    CommandResult,
    Kind,
    ShellSandbox,
    Stopped,
)
from asyncrl_cli.spec.inputs import SandboxSpec

__all__ = ["WORK_FOLDER", "BlockingSandbox", "CommandResult", "Kind", "Sandbox", "ShellSandbox", "open_sandbox"]

MODULES = (supervisor, gvisor, port, processes, work_files, output, wire, confine)
"""What the supervisor and the start of gVisor import of this package; they import nothing else of it."""
START_S = 60.0
"""Seconds that starting may take, on a busy machine."""
GRACE_S = 30.0
"""Seconds beyond its time that a command's result may take, on a busy machine."""
FILE_S = 60.0
END_S = 10.0
GVISOR_LOOK_S = 1.0
"""Seconds between two looks at gVisor's memory; most commands end before the first."""
GVISOR_MB = 256
"""What gVisor may take beside the memory and the files of its processes."""


@asynccontextmanager
async def open_sandbox(settings: SandboxSpec, *, gateway: str | None = None) -> AsyncIterator[ShellSandbox]:
    """A sandbox, which is closed at the end. ``gateway``: the base URL that it may reach, with ``network: gateway``.

    Raises ``SandboxError`` when it cannot be started.
    """
    sandbox = await Sandbox.start(settings, gateway if settings.network == "gateway" else None)
    try:
        yield sandbox
    finally:
        await sandbox.close()


class Sandbox:
    """A ``ShellSandbox``."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, settings: SandboxSpec) -> None:
        self.base_url: str | None = None
        self._process = process
        self._control = control
        self._settings = settings
        self._turn = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._current: asyncio.Task[list[bytes]] | None = None
        """The exchange whose turn it is."""
        self._relay: Relay | None = None
        self._closed = False

    @classmethod
    async def start(cls, settings: SandboxSpec, gateway: str | None) -> Sandbox:
        """Start it and wait until it is confined. Raises ``SandboxError``."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        inside, in_gvisor = settings.kind != "none", settings.kind == "gvisor"
        folder = WORK_FOLDER if inside else tempfile.mkdtemp(prefix="asyncrl-sandbox-")
        relayed = inside and gateway is not None
        try:
            taken = unused_uid() if inside else None
            uid = gvisor.USER if in_gvisor else taken
            further = gvisor.SYSTEM_CALLS if in_gvisor else frozenset[str]()
            program = shell_filter.program(further) if inside else b""
            process = _started(settings, theirs, taken, relayed)
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox cannot be started: {error}") from error
        finally:
            theirs.close()
        sandbox = cls(process, ours, settings)
        variables = arguments.environment() | ({} if inside else {"HOME": folder})
        if gateway is not None:
            sandbox.base_url = variables["OPENAI_BASE_URL"] = inner_url(gateway) if inside else gateway
        order: list[bytes | str | int] = [settings.kind, folder, uid or 0, settings.memory_mb, settings.processes]
        order += [GATEWAY_PORT if relayed else 0, program, *(word for pair in variables.items() for word in pair)]
        try:
            async with asyncio.timeout(START_S):
                await sandbox._send([word if isinstance(word, bytes) else os.fsencode(str(word)) for word in order])
                if gateway is not None and relayed:
                    sandbox._relay = Relay(gateway)
                    await sandbox._relay.start(await sandbox._listening())
                if await sandbox._receive() != [supervisor.READY]:
                    raise SandboxError("it does not answer")
        except BaseException as error:
            if sandbox._relay is not None:
                await sandbox._relay.close()
            printed = await sandbox._end()
            if isinstance(error, (OSError, wire.WireError)):
                raise SandboxError(f"the sandbox has not started: {printed or error}") from error
            raise
        return sandbox

    async def _listening(self) -> socket.socket:
        """The socket to which connections from inside come."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._control, readable.set_result, None)
        readable.add_done_callback(lambda _: loop.remove_reader(self._control))
        await readable
        message = wire.packed([port.LISTENING])
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
        """As in ``ShellSandbox``."""
        time_s = self._settings.time_s if time_s is None else time_s
        variables = [word.encode(errors="replace") for pair in env.items() for word in pair]
        order = [b"run", command.encode(errors="replace"), str(time_s).encode(), *variables]
        answer = await self._ask(order, time_s + GRACE_S)
        try:
            status, stopped, total, first, last = answer
            # Whoever gets this answer has not cancelled: then `_stop_for_memory` has.
            limit = cast("Stopped", "memory" if stopped == supervisor.CANCELLED else stopped.decode())
            return CommandResult(None if limit else int(status), output.text_of(first, last, int(total)), limit)
        except ValueError as error:
            raise SandboxError(f"an invalid answer from the sandbox: {error}") from error

    async def write_file(self, path: str, data: bytes) -> None:
        """As in ``ShellSandbox``."""
        work_files.parts_of(path)
        if len(data) > work_files.MOST_BYTES:
            raise OSError(f"larger than {work_files.MOST_BYTES >> 20} MiB: {path}")
        await self._ask([b"write", os.fsencode(path), data], FILE_S)

    async def read_file(self, path: str) -> bytes:
        """As in ``ShellSandbox``."""
        work_files.parts_of(path)
        (data,) = await self._ask([b"read", os.fsencode(path)], FILE_S)
        return data

    async def close(self) -> None:
        """As in ``ShellSandbox``."""
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
            watch = asyncio.create_task(self._stop_for_memory()) if order[0] == b"run" else None
            try:
                async with asyncio.timeout(time_s):
                    await self._send(order)
                    kind, *fields = await self._receive()
            except asyncio.CancelledError:
                self._shut()
                raise
            except (OSError, wire.WireError) as error:  # TimeoutError is one
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
        if self._settings.kind != "gvisor":
            return
        most = (self._settings.memory_mb + 2 * self._settings.disk_mb + GVISOR_MB) * confine.MEGABYTE
        used = 0
        while used <= most:
            await asyncio.sleep(GVISOR_LOOK_S)
            used = await asyncio.to_thread(_memory_below, self._process.pid)
        with suppress(OSError):
            await self._send([b"stop"])

    async def _send(self, fields: Sequence[bytes]) -> None:
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._control, wire.packed(fields))

    async def _receive(self) -> list[bytes]:
        lengths = wire.field_lengths(await self._read(4 * wire.field_count(await self._read(4))))
        return wire.split(await self._read(sum(lengths)), lengths)

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
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            # The first process inside has taken another id, so that bwrap's end is not its end.
            with suppress(OSError):
                children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
                for pid in children.split():
                    os.kill(int(pid), signal.SIGKILL)
            self._process.kill()
            self._process.wait(END_S)
        line = last_line(self._process)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return line


def _memory_below(pid: int) -> int:
    """Bytes of memory of a process's descendants."""
    return sum(map(processes.proportional, processes.below(pid)))


def _started(settings: SandboxSpec, control: socket.socket, uid: int | None, relayed: bool) -> subprocess.Popen[bytes]:
    """The process of bwrap, or of the supervisor itself."""
    files: dict[str, int] = {}
    try:
        if settings.kind == "none":
            command = python(supervisor.__name__, str(PACKAGES), [str(control.fileno())])
        else:
            if shutil.which("bwrap") is None:
                raise SandboxError("bwrap is not installed")
            bound = arguments.visible(settings, MODULES)
            if settings.kind == "gvisor":
                if shutil.which("runsc") is None:
                    raise SandboxError("runsc is not installed")
                inner = python(supervisor.__name__, arguments.OWN, ["0"])
                container = gvisor.container(inner, arguments.CAPABILITIES, settings.disk_mb, WORK_FOLDER, bound)
                words = [str(control.fileno()), str(uid or 0), "relay" if relayed else "", json.dumps(container)]
                command = python(gvisor.__name__, arguments.OWN, words)
            else:
                command = python(supervisor.__name__, arguments.OWN, [str(control.fileno())])
            user = gvisor.USER if settings.kind == "gvisor" else uid or 1000
            for path, text in arguments.accounts(user).items():
                files[path] = file_of(text.encode())
            command = [*arguments.bubblewrap(settings, files, bound), "--", *command]
        # In this thread, the loop's: bwrap ends with the thread that has started it.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[control.fileno(), *files.values()],
            env={},
            cwd="/",
            start_new_session=True,
        )
    finally:
        for file in files.values():
            os.close(file)
