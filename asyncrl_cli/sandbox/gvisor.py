"""gVisor inside a sandbox of bubblewrap (decision 0021): how it starts, and the port that leads to the gateway.

bwrap makes the same view of the machine as without gVisor. In it, ``main`` takes an unused user id, makes the socket
that leads to the worker, and becomes ``runsc run``. The container has this view as its root and the supervisor as its
first process. gVisor's own files are in bwrap's memory, so nothing is left on the machine, however gVisor ends.

The worker receives a listening socket and accepts its connections. Without gVisor that socket is the gateway's port.
gVisor cannot pass sockets out. There the worker receives a Unix socket made outside gVisor, and threads of the
supervisor copy bytes between it and the port.

The module is imported inside the sandbox, so it imports little.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from asyncrl_cli.sandbox import confine
from asyncrl_cli.sandbox.wire import packed

PROGRAM = "/run/runsc"
"""Path of runsc inside."""
SOCKET_FOLDER = "/run/gateway"
SOCKET = f"{SOCKET_FOLDER}/socket"
"""The worker listens here. Nothing else outside gVisor can be reached from it."""
USER = 1000
"""User id of the commands. gVisor has its own users, separate from the machine's."""
SYSTEM_CALLS = frozenset({"setreuid", "setregid"})
"""System calls that a command also needs, to become this user."""
BUNDLE = "/tmp/bundle"
"""Commands do not see this folder: gVisor has its own /tmp."""
SHARED_MEMORY = "/dev/shm"
BACKLOG = 128
LISTENING = b"listening"
MOST_CONNECTIONS = 100
"""Connections served at a time; others wait. Each takes two threads."""
PIECE = 2**16
STACK = 2**18


def container(
    command: Sequence[str], capabilities: Sequence[str], disk_mb: int, folder: str, visible: Iterable[str]
) -> dict[str, object]:
    """The container's OCI configuration; its root is bwrap's.

    ``folder`` is the work folder; ``visible`` are the paths that bwrap shows. gVisor's own /tmp would hide those below
    bwrap's /tmp, so they are mounted again.
    """
    size = f"size={disk_mb}m"
    below_tmp = [path for path in sorted(visible) if path.startswith("/tmp/")]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(command),
            "env": [],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {kind: list(capabilities) for kind in ("bounding", "effective", "permitted")},
        },
        "root": {"path": "/", "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/sys", "type": "tmpfs", "options": ["ro", "size=4k"]},
            *({"destination": path, "type": "tmpfs", "options": ["mode=1777", size]} for path in ("/tmp", folder)),
            *({"destination": path, "type": "bind", "source": path, "options": ["ro"]} for path in below_tmp),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]},
    }


def become_user(uid: int) -> None:
    """Inside gVisor: take ``uid`` as effective user id only, so no command may signal or trace this process.

    gVisor does not protect its first process. Commands take the user as real, effective and saved id (``started``).
    """
    os.setgroups([])
    os.setresgid(0, uid, 0)
    os.setresuid(0, uid, 0)


def started(command: Sequence[str], environment: Mapping[str, str], output: int) -> int:
    """Start a command as the commands' user, and return its process id."""
    import subprocess

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        user=USER,
        group=USER,
        start_new_session=True,
    )
    process.returncode = 0  # the supervisor reaps it; without a status this object would try to
    return process.pid


def share_memory_in_tmp() -> None:
    """Inside gVisor: move shared memory into /tmp, which has a limited size."""
    os.rmdir(SHARED_MEMORY)
    os.symlink("/tmp", SHARED_MEMORY)


def listen(port: int) -> socket.socket:
    """Return a socket that listens at a port of 127.0.0.1."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(BACKLOG)
    return listening


def hand_over(control: socket.socket, listening: socket.socket) -> None:
    """Pass a listening socket to the worker, and close it here."""
    socket.send_fds(control, [packed([LISTENING])], [listening.fileno()])
    listening.close()


def copy_to_worker(listening: socket.socket) -> None:
    """Start threads that copy bytes between connections and the worker's socket."""
    threading.stack_size(STACK)
    threading.Thread(target=_accept, args=(listening,), daemon=True).start()


def _accept(listening: socket.socket) -> None:
    free = threading.BoundedSemaphore(MOST_CONNECTIONS)
    while True:
        free.acquire()
        near, _ = listening.accept()
        threading.Thread(target=_connected, args=(near, free), daemon=True).start()


def _connected(near: socket.socket, free: threading.BoundedSemaphore) -> None:
    try:
        with near, socket.socket(socket.AF_UNIX) as far, suppress(OSError):
            far.connect(SOCKET)
            back = threading.Thread(target=_copy, args=(far, near), daemon=True)
            back.start()
            _copy(near, far)
            back.join()
    finally:
        free.release()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(PIECE):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one has ended, so end both
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Become runsc.

    Arguments: the socket to the worker, which becomes the supervisor's standard input; the user id to take, or 0;
    "relay" if there is a gateway; the container's configuration.
    """
    control, uid, relay, configuration = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if relay:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(SOCKET)
        os.chmod(SOCKET, 0o666)
        listening.listen(BACKLOG)
        with socket.socket(fileno=os.dup(control)) as to_worker:
            hand_over(to_worker, listening)
    if uid:
        confine.become(uid)
    os.mkdir(BUNDLE, 0o700)
    with open(f"{BUNDLE}/config.json", "w", encoding="utf-8") as file:
        file.write(configuration)
    os.dup2(control, 0)
    options = ["--rootless", "--ignore-cgroups", "--network=none", "--host-uds=open", "--overlay2=none"]
    os.execv(PROGRAM, [PROGRAM, f"--root={BUNDLE}", *options, "run", f"--bundle={BUNDLE}", "sandbox"])
