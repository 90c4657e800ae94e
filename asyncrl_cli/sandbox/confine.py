"""A process in a sandbox confines itself with this before it runs unreviewed code. None of it can be undone.

This module is imported inside, so it imports little.
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
"""The user whom systems give to processes without a user; other processes may have it, too."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LIMITS = {
    "RLIMIT_CORE": 1,  # 0 would still feed a program that collects core dumps
    "RLIMIT_MSGQUEUE": 0,
}
"""Limits of every sandbox, by the names of the module ``resource``."""
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
"""The rights over files that each version of Landlock has added."""
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
    """The part of the file system that Landlock leaves visible, where no namespace hides the rest."""

    readable: list[str]
    packages: list[str]
    """Folders of Python's packages, which can be read, too."""
    folder: str
    """The one folder that can be written to."""
    removes: bool
    """Whether files in it can be removed."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """How a process is to confine itself, as the process outside decides."""

    limits: dict[str, int]
    """In addition to ``LIMITS``."""
    uid: int = 0
    """The unused user id to take; 0 keeps the present user."""
    processes: int = 0
    """Processes and threads of the user, which the kernel counts; 0 sets no limit."""
    filter: str = ""
    """The seccomp program in base64; "" for none."""


def confine(order: Confinement, view: View | None, take_user: Callable[[int], None] | None = None) -> None:
    """Confine this process. Raises ``OSError`` if any of it fails: then nothing may be run.

    ``take_user`` replaces ``become``.
    """
    for name, most in (LIMITS | order.limits).items():
        limit(getattr(resource, name), most)
    # The order matters (decision 0021). The user first: without capabilities it cannot be changed any more. Landlock
    # before the filter, which refuses Landlock's system calls and most others that these lines make.
    if order.uid:
        (take_user or become)(order.uid)
    if order.processes and order.uid != SHARED_UID:  # the kernel would count other processes of that id
        limit(resource.RLIMIT_NPROC, order.processes)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _call("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    # The kernel kills this process when its parent ends. After the change of user, which would undo it.
    _prctl("PDEATHSIG", PR_SET_PDEATHSIG, signal.SIGKILL)
    if order.filter:
        _prctl("NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)
        if view is not None:
            _restrict_files(view)
        program = base64.b64decode(order.filter)
        loaded = _FilterProgram(len(program) // 8, program)
        _prctl("SECCOMP", option=PR_SET_SECCOMP, value=SECCOMP_MODE_FILTER, further=ctypes.byref(loaded))


def become(uid: int) -> None:
    """Take a user's and group's id, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def limit(kind: int, most: int) -> None:
    """Set a limit of this process and its later children."""
    with suppress(ValueError):  # the user has less already
        resource.setrlimit(kind, (most, most))


def hide_memory() -> None:
    """Let no other process of the same user look into this one, until it runs another program."""
    _prctl("DUMPABLE", PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose their parent."""
    _prctl("CHILD_SUBREAPER", PR_SET_CHILD_SUBREAPER, 1)


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 if it has none."""
    version: int = _libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    return max(version, 0)


def held(view: View) -> View:
    """The same view, for a user who may not pass the folders above it, such as /root.

    Descriptors that are opened now lead past those folders. Modules can still be imported.
    """
    folders = {path: _held(path) for path in sys.path if os.path.exists(path)}
    sys.path[:] = folders.values()
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        if isinstance(paths := getattr(module, "__path__", None), list):
            roots = [max((root for root in folders if path.startswith(f"{root}/")), key=len) for path in paths]
            paths[:] = [folders[root] + path[len(root) :] for root, path in zip(roots, paths, strict=True)]
    return replace(
        view,
        readable=[_held(path) for path in view.readable],
        packages=[_held(path) for path in view.packages],
        folder=_held(view.folder),
    )


def _held(path: str) -> str:
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
    # No folders, because one listing has to give the size of all files.
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
    """The result of a call of the C library. Raises ``OSError`` with the call's name if it has failed."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
