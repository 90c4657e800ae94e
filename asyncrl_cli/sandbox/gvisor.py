"""gVisor in a sandbox of bubblewrap: what starts it there, and the folders that it needs.

bwrap makes the same view of this machine as without gVisor. In it, ``main`` takes an unused id, makes the socket that
leads to the worker, and becomes ``runsc run``, whose container has this view as its root and the supervisor as its
first process. gVisor's own files are in bwrap's memory: none of them is left on this machine, however it ends.

This module is imported inside, so it imports little.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from asyncrl_cli.sandbox import confine, port

PROGRAM = "/run/runsc"
"""Where runsc is, inside."""
SOCKET_FOLDER = "/run/gateway"
SOCKET = f"{SOCKET_FOLDER}/socket"
"""The worker listens there: all that can be reached from gVisor."""
USER = 1000
"""The user of the commands. gVisor's users are its own, not those of this machine."""
SYSTEM_CALLS = frozenset({"setreuid", "setregid"})
"""What `become_user` leaves to each command, beside those that a sandbox without gVisor allows."""
BUNDLE = "/tmp/bundle"
"""Inside gVisor, /tmp is another folder: commands do not see this one."""
SHARED_MEMORY = "/dev/shm"


def container(
    command: Sequence[str], capabilities: Sequence[str], disk_mb: int, folder: str, visible: Iterable[str]
) -> dict[str, object]:
    """The configuration of the container (OCI). Its root is bwrap's.

    ``folder`` is the work folder, ``visible`` what bwrap shows: gVisor's own /tmp would cover what is below bwrap's.
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


def arguments() -> list[str]:
    """runsc and its arguments."""
    options = ["--rootless", "--ignore-cgroups", "--network=none", "--host-uds=open", "--overlay2=none"]
    return [PROGRAM, f"--root={BUNDLE}", *options, "run", f"--bundle={BUNDLE}", "sandbox"]


def become_user() -> None:
    """Inside gVisor: act as the commands' user, and be another, so that no command may signal or trace this process.

    gVisor protects the first process from neither. A command takes the user as all three of its ids (``started``).
    """
    os.setgroups([])
    os.setresgid(0, USER, 0)
    os.setresuid(0, USER, 0)


def started(command: Sequence[bytes], environment: Mapping[bytes, bytes], output: int) -> int:
    """Start a command as the commands' user; its process id."""
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
    process.returncode = 0  # the supervisor waits for it, not this object
    return process.pid


def share_memory_in_tmp() -> None:
    """Inside gVisor: let shared memory be part of /tmp, whose size is limited."""
    os.rmdir(SHARED_MEMORY)
    os.symlink("/tmp", SHARED_MEMORY)


def main() -> None:
    """Become runsc.

    Arguments: the socket to the worker, which the supervisor gets as its standard input; the user id to take, or 0;
    "relay" if there is a gateway; the configuration of the container.
    """
    control, uid, relay, configuration = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if relay:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(SOCKET)
        os.chmod(SOCKET, stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH)
        listening.listen(port.BACKLOG)
        with socket.socket(fileno=os.dup(control)) as to_worker:
            port.hand_over(to_worker, listening)
    if uid:
        confine.become(uid)
    os.mkdir(BUNDLE, stat.S_IRWXU)
    with open(f"{BUNDLE}/config.json", "w", encoding="utf-8") as file:
        file.write(configuration)
    os.dup2(control, 0)
    os.execv(PROGRAM, arguments())
