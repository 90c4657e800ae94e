"""How a sandboxed process confines itself before it runs unreviewed code. No step can be undone.

The module is imported inside the sandbox, so it imports little.
"""

from __future__ import annotations

import base64
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

MEGABYTE = 2**20
SHARED_UID = 65534
"""The kernel's id for users without a mapping. Other processes may run under it, too."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LIMITS = {
    "RLIMIT_CORE": 1,  # with 0, the kernel would still pipe core dumps to a program that collects them
    "RLIMIT_MSGQUEUE": 0,
}
"""Resource limits of every sandbox, by their names in the module ``resource``."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PR_SET_CHILD_SUBREAPER = 36
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, MAKE_SYM = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 12
TRUNCATE = 1 << 14
FILE_RIGHTS = (1 << 13) - 1, 1 << 13, TRUNCATE, 0, 1 << 15
"""File access rights that each version of Landlock added."""
CONNECT_AND_BIND = 3
ABSTRACT_SOCKETS_AND_SIGNALS = 3

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    """``struct landlock_ruleset_attr``."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scope", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    """``struct landlock_path_beneath_attr``."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _FilterProgram(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


@dataclass(frozen=True, slots=True)
class View:
    """Files that a process may use under Landlock, where no mount namespace hides the others."""

    readable: list[str]
    packages: list[str]
    """Folders of Python's packages; readable, too."""
    folder: str
    """The only writable folder."""
    removes: bool
    """Files in it may be removed: allowed only where the process outside can still measure removed files."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """How a process must confine itself; the process outside decides."""

    limits: dict[str, int]
    """Resource limits in addition to ``LIMITS``."""
    uid: int = 0
    """The unused user id to take; 0 keeps the current user."""
    processes: int = 0
    """Maximal number of the user's processes and threads, which the kernel counts; 0 sets no limit."""
    filter: str = ""
    """The seccomp program in base64; "" for none."""


def confine(order: Confinement, view: View | None, take_user: Callable[[int], None] | None = None) -> None:
    """Confine this process. Raises ``OSError`` if a step fails; the caller must then run nothing.

    ``take_user`` replaces ``become``.
    """
    for name, most in (LIMITS | order.limits).items():
        limit(getattr(resource, name), most)
    # The order matters (decision 0021). The user id changes first, while the process has the capabilities for it. The
    # filter comes last, because it refuses Landlock's system calls and most others that these lines make.
    if order.uid:
        (take_user or become)(order.uid)
    if order.processes and order.uid != SHARED_UID:  # under the shared id the kernel would count foreign processes
        limit(resource.RLIMIT_NPROC, order.processes)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _call("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    # The kernel kills this process when its parent ends. A change of user would reset this, so it comes after.
    _prctl("PDEATHSIG", PR_SET_PDEATHSIG, signal.SIGKILL)
    if order.filter:
        # Without it, the kernel accepts Landlock rules and filters only from privileged processes.
        _prctl("NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)
        if view is not None:
            _restrict_files(view)
        program = base64.b64decode(order.filter)
        loaded = _FilterProgram(len(program) // 8, program)
        _prctl("SECCOMP", option=PR_SET_SECCOMP, value=SECCOMP_MODE_FILTER, further=ctypes.byref(loaded))


def become(uid: int) -> None:
    """Take a user id, and the group id of the same number. The process cannot change back."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def limit(kind: int, most: int) -> None:
    """Set a resource limit of this process and its later children."""
    with suppress(ValueError):  # the hard limit is lower already
        resource.setrlimit(kind, (most, most))


def hide_memory() -> None:
    """Keep other processes of the same user from reading this one's memory, until it executes another program."""
    _prctl("DUMPABLE", PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs."""
    _prctl("CHILD_SUBREAPER", PR_SET_CHILD_SUBREAPER, 1)


def landlock_version() -> int:
    """The version of Landlock in this kernel; 0 if it has none."""
    version: int = _libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    return max(version, 0)


def by_descriptors(view: View) -> View:
    """The same view through open descriptors, for a user who may not enter the folders above it, such as /root.

    Must be called before the user changes. Modules can still be imported: their paths are replaced, too.
    """
    folders = {path: _by_descriptor(path) for path in sys.path if os.path.exists(path)}
    sys.path[:] = folders.values()
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        if isinstance(paths := getattr(module, "__path__", None), list):
            roots = [max((root for root in folders if path.startswith(f"{root}/")), key=len) for path in paths]
            paths[:] = [folders[root] + path[len(root) :] for root, path in zip(roots, paths, strict=True)]
    return replace(
        view,
        readable=[_by_descriptor(path) for path in view.readable],
        packages=[_by_descriptor(path) for path in view.packages],
        folder=_by_descriptor(view.folder),
    )


def _by_descriptor(path: str) -> str:
    return f"/proc/self/fd/{os.open(path, os.O_PATH)}"


def _restrict_files(view: View) -> None:
    version = landlock_version()
    if not version:
        raise OSError("this kernel has no Landlock")
    handled = sum(FILE_RIGHTS[:version])
    ruleset = _Ruleset(
        handled, CONNECT_AND_BIND if version >= 4 else 0, ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _call("landlock_create_ruleset", _libc.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), size, 0))
    write = (READ_FILE | WRITE_FILE | TRUNCATE) & handled
    for path in (*view.readable, *view.packages):
        _allow(rules, path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE)
    for path in DEVICES:
        _allow(rules, path, write)
    # No right to make folders: the process outside measures all files with one listing of this folder.
    remove = REMOVE_FILE if view.removes else 0
    _allow(rules, view.folder, write | READ_DIR | remove | MAKE_REG | MAKE_SYM)
    _call("landlock_restrict_self", _libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    rule = ctypes.byref(_PathBeneath(rights, parent))
    _call("landlock_add_rule", _libc.syscall(LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, rule, 0))
    os.close(parent)


def _prctl(name: str, option: int, value: int, further: object = 0) -> None:
    _call(f"prctl {name}", _libc.prctl(option, value, further, 0, 0))


def _call(name: str, result: int) -> int:
    """Return a C call's result. Raises ``OSError`` with its name if the call failed."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
