"""bwrap's arguments for a sandbox with a shell: the programs of this machine, this Python with its packages, an empty
work folder, and nothing else. gVisor, where it is wanted, is started inside."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from types import ModuleType

from asyncrl_cli.sandbox import gvisor
from asyncrl_cli.sandbox.bubblewrap import bindings, devices, memory_folder, namespaces, unused_uid
from asyncrl_cli.sandbox.settings import WORK_FOLDER
from asyncrl_cli.spec.inputs import SandboxSpec

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
DATA = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/mime.types")
OWN = "/run/sandbox"
"""Where this package's modules are, inside."""
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN")
"""What the supervisor needs to take its id and to own the work folder; it abandons them."""
SOCKET_FOLDER_MB = 1


def accounts(uid: int) -> dict[str, str]:
    """Files of the one user, and of the one host."""
    return {
        "/etc/passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{uid}:{uid}:agent:{WORK_FOLDER}:/bin/sh\n",
        "/etc/group": f"root:x:0:\nagent:x:{uid}:\n",
        "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }


def environment() -> dict[str, str]:
    """A command's variables, beside those it is given."""
    folders = (os.path.join(sys.prefix, "bin"), os.path.join(sys.base_prefix, "bin"))
    return {
        "PATH": ":".join((*dict.fromkeys(folders), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")),
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "agent",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }


def visible(settings: SandboxSpec, modules: tuple[ModuleType, ...]) -> dict[str, str]:
    """Files and folders of this machine that can be read inside: where they are inside, and here."""
    python = (sys.prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    bound = {path: path for path in (*PROGRAMS, *DATA, *python) if os.path.exists(path)}
    bound |= {os.path.abspath(path): os.path.realpath(path) for path in settings.readable}
    bound |= {f"{OWN}/{module.__name__.replace('.', '/')}.py": str(module.__file__) for module in modules}
    if settings.kind == "gvisor":
        bound[gvisor.PROGRAM] = os.path.realpath(shutil.which("runsc") or "runsc")
    return bound


def bubblewrap(settings: SandboxSpec, files: Mapping[str, int], bound: Mapping[str, str]) -> list[str]:
    """bwrap and its arguments, without the command. ``files``: descriptors with the content of small files; ``bound``:
    what is ``visible``."""
    folders = memory_folder("/tmp", settings.disk_mb)
    if settings.kind == "gvisor":
        folders += memory_folder(gvisor.SOCKET_FOLDER, SOCKET_FOLDER_MB, "0755")
    return [
        # gVisor's processes cannot end bwrap's own first one, with which all of them end.
        *namespaces(as_first_process=settings.kind == "bubblewrap"),
        *(word for name in CAPABILITIES if unused_uid() is not None for word in ("--cap-add", name)),
        *devices(),
        *("--proc", "/proc"),
        *("--perms", "0755", "--dir", "/run"),
        *folders,
        *memory_folder(WORK_FOLDER, settings.disk_mb),
        *("--perms", "0755", "--dir", "/etc"),
        *(word for path, file in files.items() for word in ("--perms", "0444", "--file", str(file), path)),
        *bindings(bound),
        *("--remount-ro", "/", "--chdir", WORK_FOLDER),
    ]
