"""The first process in a sandbox. It runs one command at a time, watches it, and reads and writes files.

If bwrap starts it as root, it takes an unused user id. It confines itself before it answers. It ends when the
socket to the worker closes, which the kernel does however the worker ends; and the kernel ends all processes of a
namespace with the first one (decision 0021).

Invariant: between two commands no other process lives in the sandbox.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl_cli.sandbox import confine, processes, work_files
from asyncrl_cli.sandbox.wire import packed, received

WATCH_S = 0.05
"""Seconds between two checks of a command's memory, processes and files; most commands end before the first."""
SHELLS = ("/bin/bash", "/bin/sh")
READY, CANCELLED = b"ready", b"cancelled"
LISTENING = b"l"
"""The byte with which the listening socket is passed to the worker; a single one cannot arrive in parts."""
BACKLOG = 128
CANNOT_RUN = 126
"""A shell's exit status for a command that it cannot run."""
CHANGED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
"""Python changes the handlers of these signals when it starts; commands get the defaults."""
OUTPUT_BYTES = 2**15
"""Bytes kept from the beginning of an output, and as many from its end."""


class Output:
    """Collects a command's output in memory of a fixed size."""

    def __init__(self, limit: int = OUTPUT_BYTES) -> None:
        self._limit = limit
        self._head, self._tail = b"", b""
        self._total = 0

    def add(self, chunk: bytes) -> None:
        """Append bytes."""
        self._total += len(chunk)
        head_room = self._limit - len(self._head)
        self._head += chunk[:head_room]
        if chunk := chunk[head_room:]:
            self._tail = (self._tail + chunk)[-self._limit :]

    def text(self) -> bytes:
        """The output in UTF-8. If bytes were omitted, a line in the middle says how many.

        Bytes that are not UTF-8, and parts of characters that were cut there, become U+FFFD.
        """
        omitted = self._total - len(self._head) - len(self._tail)
        middle = b"\n[%d bytes omitted]\n" % omitted if omitted else b""
        return (self._head + middle + self._tail).decode(errors="replace").encode()


class Supervisor:
    """Answers the worker's messages."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        order: dict[str, Any] = json.loads(self._message()[0])
        self._folder: str = order["folder"]
        self._memory = order["memory_mb"] * confine.MEGABYTE
        self._max_processes: int = order["processes"]
        self._in_namespace = order["kind"] != "none"
        self._environment: dict[str, str] = order["environment"]
        self._disks: tuple[str, ...] = ()
        self._shell = "/bin/sh"
        self._child_ended = _wake_when_children_end()
        self._open(order)
        control.sendall(packed([READY]))

    def _open(self, order: dict[str, Any]) -> None:
        """Confine this process."""
        self._shell = next(path for path in SHELLS if os.path.exists(path))
        self._disks = (self._folder, "/tmp") if self._in_namespace else ()
        os.chdir(self._folder)
        if order["port"]:
            hand_over(self._control, order["port"])
        if self._in_namespace:
            confinement = confine.Confinement(**order["confinement"])
            if confinement.uid:
                os.chown(self._folder, confinement.uid, confinement.uid)
            confine.confine(confinement)
            confine.hide_memory()
        else:
            from asyncrl_cli.system.process_tree import adopt_orphans

            adopt_orphans()

    def serve(self) -> None:
        """Answer until the worker closes the socket. Raises ``EOFError``."""
        while True:
            action, *fields = self._message()
            try:
                answer = self._answer(action, fields)
            except OSError as error:
                text = error.strerror or str(error)
                answer = [b"error", b"%d" % (error.errno or 0), text.encode(errors="replace")]
            if answer:
                self._control.sendall(packed(answer))

    def clear(self) -> None:
        """End all processes. Without a namespace the work folder is on the machine's disk, and is removed."""
        self._end_all(0)
        if not self._in_namespace:
            import shutil

            shutil.rmtree(self._folder, ignore_errors=True)

    def _message(self) -> list[bytes]:
        return received(self._control.recv)

    def _answer(self, action: bytes, fields: list[bytes]) -> list[bytes]:
        if action == b"run":
            command, time_s, variables, stream_count = fields
            environment = self._environment | json.loads(variables)
            return self._run(os.fsdecode(command), float(time_s), environment, int(stream_count))
        if action == b"write":
            work_files.write(self._folder, os.fsdecode(fields[0]), fields[1])
            return [b"done"]
        if action == b"read":
            return [b"done", work_files.read(self._folder, os.fsdecode(fields[0]))]
        return []  # a stop that arrived after its command had ended

    def _run(self, command: str, time_s: float, environment: dict[str, str], stream_count: int) -> list[bytes]:
        """Run a command. ``stream_count``: 2 for an output and an error output, 1 for both in one."""
        readers, writers = zip(*(os.pipe() for _ in range(stream_count)), strict=True)
        outputs = {reader: Output() for reader in readers}
        for reader in readers:
            os.set_blocking(reader, False)
        status, stopped = CANNOT_RUN, b""
        full_before = processes.full(self._disks)  # before the start: a quick command could fill it first
        try:
            pid = self._started(command, environment, writers)
        except (OSError, ValueError) as error:  # the command is too long, or contains a NUL
            outputs[readers[-1]].add(f"{os.path.basename(self._shell)}: {error}\n".encode())
            for writer in writers:
                os.close(writer)
        else:
            for writer in writers:
                os.close(writer)
            deadline = time.monotonic() + time_s
            status, stopped = self._watch(pid, outputs, deadline=deadline, full_before=full_before)
            # Before the rest of the output is read: a background process could keep writing.
            self._end_all(pid)
            stopped = stopped or self._exceeded_at_end()
            for reader, output in outputs.items():
                while chunk := _read_available(reader):
                    output.add(chunk)
        finally:
            for reader in outputs:
                os.close(reader)
        return [b"done", b"%d" % status, stopped, *(output.text() for output in outputs.values())]

    def _started(self, command: str, environment: dict[str, str], outputs: Sequence[int]) -> int:
        return spawned([self._shell, "-c", command], environment, outputs)

    def _exceeded(self) -> bytes:
        """Return the limit that the current command has reached, or b"". Without a namespace there is none but time."""
        return processes.exceeded(self._memory, self._max_processes) if self._in_namespace else b""

    def _exceeded_at_end(self) -> bytes:
        """Return the limit that a command has reached before it ended itself, if the kernel has recorded it."""
        return b""

    def _end_all(self, pid: int) -> None:
        """End and reap the sandbox's other processes; ``pid``: the command's."""
        if self._in_namespace:
            processes.end_all()
        else:
            from asyncrl_cli.system.process_tree import kill_descendants

            kill_descendants()

    def _watch(
        self, pid: int, outputs: Mapping[int, Output], *, deadline: float, full_before: bool
    ) -> tuple[int, bytes]:
        """Wait until a command ends or reaches a limit; return its exit status, 0 in the latter case, and the limit.
        ``outputs`` by the descriptors to read them from."""
        poll = select.poll()
        for descriptor in (self._child_ended, *outputs, self._control.fileno()):
            poll.register(descriptor, select.POLLIN)
        next_check = time.monotonic() + WATCH_S
        while True:
            remaining_s = max(0.0, min(next_check, deadline) - time.monotonic())
            ready = {descriptor for descriptor, _ in poll.poll(1000 * remaining_s)}
            for reader in ready & outputs.keys():
                if chunk := _read_available(reader):
                    outputs[reader].add(chunk)
                else:
                    poll.unregister(reader)
            if self._control.fileno() in ready:
                self._message()
                return 0, CANCELLED
            if self._child_ended in ready:
                _read_available(self._child_ended)
                if (status := processes.reap(pid)) is not None:
                    return status, b""
            if (now_s := time.monotonic()) >= deadline:
                return 0, b"time"
            if now_s >= next_check:
                if limit := self._exceeded():
                    return 0, limit
                if not full_before and processes.full(self._disks):
                    return 0, b"disk"
                next_check = time.monotonic() + WATCH_S


def spawned(command: list[str], environment: dict[str, str], outputs: Sequence[int], source: int | None = None) -> int:
    """Start a command in a new session; ``source``: descriptor of its standard input, ``outputs``: of its output and
    its error output, or of both in one. Returns its PID."""
    standard_input = (
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0) if source is None else (os.POSIX_SPAWN_DUP2, source, 0)
    )
    return os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=[standard_input, (os.POSIX_SPAWN_DUP2, outputs[0], 1), (os.POSIX_SPAWN_DUP2, outputs[-1], 2)],
        setsid=True,
        setsigmask=(),
        setsigdef=CHANGED_BY_PYTHON,
    )


def hand_over(control: socket.socket, port: int) -> None:
    """Listen at a port of 127.0.0.1, and pass the socket to the worker, which accepts the connections."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(BACKLOG)
        socket.send_fds(control, [LISTENING], [listening.fileno()])


def _wake_when_children_end() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _read_available(descriptor: int) -> bytes:
    """Read without waiting; b"" if there is nothing."""
    try:
        return os.read(descriptor, 2**16)
    except BlockingIOError:
        return b""


def main(supervisor_class: type[Supervisor] = Supervisor) -> None:
    """Serve the socket whose descriptor is the first argument."""
    # The kernel delivers signals from inside to a namespace's first process only if it has a handler. Python installs
    # one for SIGINT, and a command could interrupt this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    supervisor = supervisor_class(control)
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 2)
    try:
        supervisor.serve()
    except (EOFError, OSError):
        pass
    finally:
        supervisor.clear()
        os._exit(0)
