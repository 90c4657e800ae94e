"""The first process in a sandbox: it runs one command at a time, watches it, and reads and writes files.

It starts as root where bwrap or gVisor does, takes an unused id, confines itself, and only then answers. It lives as
long as the socket to the worker does: when the worker ends, however it ends, this process ends, and with the first
process of a namespace the kernel ends all others.

Invariant: between two commands no other process lives in the sandbox.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time

from asyncrl_cli.sandbox import confine, gvisor, port, processes, work_files
from asyncrl_cli.sandbox.output import Output
from asyncrl_cli.sandbox.wire import packed, received

WATCH_S = 0.05
"""Seconds between two looks at what a command uses; most commands end before the first."""
SHELLS = ("/bin/bash", "/bin/sh")
OPEN_FILES = 1024
READY, CANCELLED = b"ready", b"cancelled"
CANNOT_RUN = 126
"""A shell's status of what cannot be run."""
NOTHING_NEW = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
"""Signals whose handling Python changes when it starts; commands get the default."""


class Supervisor:
    """Answers the worker's messages."""

    def __init__(self, control: socket.socket) -> None:
        kind, folder, uid, memory_mb, most, number, program, *variables = received(lambda size: _read(control, size))
        self._control = control
        self._folder = os.fsdecode(folder)
        self._memory = int(memory_mb) * confine.MEGABYTE
        self._most = int(most)
        self._alone = kind != b"none"
        self._in_gvisor = kind == b"gvisor"
        self._environment = _pairs(variables)
        self._shell = next(path for path in SHELLS if os.path.exists(path))
        self._disks = (self._folder, "/tmp") if self._alone else ()
        self._woken = _wake_when_children_end()
        os.chdir(self._folder)
        listening = port.listen(int(number)) if int(number) else None
        if listening is not None and not self._in_gvisor:
            port.hand_over(control, listening)
        if self._in_gvisor:
            gvisor.share_memory_in_tmp()
        if self._alone:
            self._confine(int(uid), program)
        else:
            confine.adopt_orphans()
        if listening is not None and self._in_gvisor:
            port.copy_to(gvisor.SOCKET, listening)
        control.sendall(packed([READY]))

    def _confine(self, uid: int, program: bytes) -> None:
        for kind, most in (
            (resource.RLIMIT_DATA, self._memory),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 1),  # 0 would still feed a program that collects core dumps
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            confine.limit(kind, most)
        # The order matters, as in `confine` (decision 0021): the user while there are capabilities, the filter last.
        if uid:
            os.chown(self._folder, uid, uid)
            if self._in_gvisor:
                gvisor.become_user()
            else:
                confine.become(uid)
        if uid != confine.SHARED_UID:  # the kernel counts a user's processes
            confine.limit(resource.RLIMIT_NPROC, self._most + 1)
        confine.drop_capabilities()
        confine.hide_memory()
        confine.refuse_privileges()
        confine.install_filter(program)

    def serve(self) -> None:
        """Answer until the worker has closed the socket. Raises ``EOFError``."""
        while True:
            action, *fields = received(lambda size: _read(self._control, size))
            try:
                answer = self._answer(action, fields)
            except OSError as error:
                text = error.strerror or str(error)
                answer = [b"error", b"%d" % (error.errno or 0), text.encode(errors="replace")]
            if answer:
                self._control.sendall(packed(answer))

    def _answer(self, action: bytes, fields: list[bytes]) -> list[bytes]:
        if action == b"run":
            return self._run(fields[0], float(fields[1]), self._environment | _pairs(fields[2:]))
        if action == b"write":
            work_files.write(self._folder, os.fsdecode(fields[0]), fields[1])
            return [b"done"]
        if action == b"read":
            return [b"done", work_files.read(self._folder, os.fsdecode(fields[0]))]
        return []  # a stop that came when its command had ended

    def _run(self, command: bytes, time_s: float, environment: dict[bytes, bytes]) -> list[bytes]:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        output = Output()
        status, stopped = CANNOT_RUN, b""
        full_before = processes.full(self._disks)  # before the start: a quick command would fill it first
        try:
            pid = self._started([os.fsencode(self._shell), b"-c", command], environment, writing)
        except (OSError, ValueError) as error:  # too long, or with a NUL
            output.add(f"{os.path.basename(self._shell)}: {error}\n".encode())
            os.close(writing)
            os.close(reading)
        else:
            os.close(writing)
            try:
                ended, stopped = self._watch(pid, reading, output, time.monotonic() + time_s, full_before)
                last = processes.end_all(self._alone, pid)
                status = ended if ended is not None else last
                while piece := _some(reading):
                    output.add(piece)
            finally:
                os.close(reading)
        code = b"" if stopped else b"%d" % status
        return [b"done", code, stopped, b"%d" % output.total, output.first, output.last]

    def _started(self, command: list[bytes], environment: dict[bytes, bytes], output: int) -> int:
        if self._in_gvisor:
            return gvisor.started(command, environment, output)
        null = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
        both = [(os.POSIX_SPAWN_DUP2, output, descriptor) for descriptor in (1, 2)]
        return os.posix_spawn(
            self._shell,
            command,
            environment,
            file_actions=[null, *both],
            setsid=True,
            setsigmask=(),
            setsigdef=NOTHING_NEW,
        )

    def _watch(
        self, pid: int, reading: int, output: Output, deadline: float, full_before: bool
    ) -> tuple[int | None, bytes]:
        """Wait for the end of a command: its status, and the limit that it reached."""
        poll = select.poll()
        for descriptor in (self._woken, reading, self._control.fileno()):
            poll.register(descriptor, select.POLLIN)
        look = time.monotonic() + WATCH_S
        while True:
            left = max(0.0, min(look, deadline) - time.monotonic())
            ready = {descriptor for descriptor, _ in poll.poll(1000 * left)}
            if reading in ready:
                if piece := _some(reading):
                    output.add(piece)
                else:
                    poll.unregister(reading)
            if self._control.fileno() in ready:
                received(lambda size: _read(self._control, size))
                return None, CANCELLED
            if self._woken in ready:
                _some(self._woken)
                if (status := processes.reap(pid)) is not None:
                    return status, b""
            if (now := time.monotonic()) >= deadline:
                return None, b"time"
            if now >= look:
                if limit := processes.exceeded(self._alone, self._in_gvisor, self._memory, self._most):
                    return None, limit
                if not full_before and processes.full(self._disks):
                    return None, b"disk"
                look = time.monotonic() + WATCH_S

    def clear(self) -> None:
        """End everything; remove the work folder if it is one of this machine."""
        processes.end_all(self._alone, 0)
        if not self._alone:
            import shutil

            shutil.rmtree(self._folder, ignore_errors=True)


def _wake_when_children_end() -> int:
    """A descriptor that can be read when a child has ended."""
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _read(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (piece := control.recv(min(size - len(data), 2**20))):
            raise EOFError
        data += piece
    return bytes(data)


def _some(descriptor: int) -> bytes:
    """What there is to read, if any."""
    try:
        return os.read(descriptor, 2**16)
    except BlockingIOError:
        return b""


def _pairs(fields: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(fields[::2], fields[1::2], strict=True))


def main() -> None:
    """Serve the socket that the first argument names."""
    # Signals from inside reach the first process of a namespace only if it handles them: so it must not handle this.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    supervisor = Supervisor(control)
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 2)
    try:
        supervisor.serve()
    except (EOFError, OSError):
        pass
    finally:
        supervisor.clear()
        os._exit(0)
