"""What a process in a sandbox does to itself before it runs unreviewed code.

Limits, an unused user id when it is root, Landlock (where no namespaces hide the file system), and seccomp.
None of it can be undone.
"""

from __future__ import annotations

import base64
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

MEGABYTE = 2**20
OPEN_FILES = 64
"""Descriptors that the code may have; its pipes hold up to 2 MiB beside its memory."""
SHARED_UID = 65534
"""The user whom systems give to processes without one of their own; others may have it, too."""
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
"""What each version of Landlock has added to what it controls of files."""
CONNECT_AND_BIND = 3
ABSTRACT_SOCKETS_AND_SIGNALS = 3
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    """``struct landlock_ruleset_attr``."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scope", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    """``struct landlock_path_beneath_attr``."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 where there is none."""
    version: int = _libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    return max(version, 0)


def confine(setup: dict[str, Any]) -> list[str]:
    """Confine this process as ``setup`` says; returns the folders of packages, as they can be read from now on.

    Raises ``OSError`` when any of it fails: then nothing may be run.
    """
    limits, uid = setup["limits"], setup["uid"]
    packages: list[str] = setup["packages"]
    readable, folder = setup["readable"], setup["folder"]
    os.chdir(folder)
    if uid and setup["landlock"]:
        # That user may not pass folders such as /root. Descriptors that are opened now lead past them.
        readable = [*map(_held, readable)]
        packages = [*map(_held, packages)]
        _hold_modules()
        os.environ["HOME"] = os.environ["TMPDIR"] = folder = _held(folder)
    for kind, most in (
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * MEGABYTE),
        (resource.RLIMIT_CPU, int(limits["time_s"]) + 1),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 1),  # 0 would still feed a program that collects core dumps
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        limit(kind, most)
    # The order matters (decision 0021). The user first: without capabilities it cannot be changed any more. Landlock
    # before the filter, which refuses Landlock's system calls and most of what these lines do.
    if uid:
        become(uid)
        if uid != SHARED_UID:  # the kernel counts a user's threads, and others may have the shared id
            limit(resource.RLIMIT_NPROC, limits["processes"])
    drop_capabilities()
    # After the change of user, which clears it.
    end_with_parent()
    if setup["filter"] is not None:
        refuse_privileges()
        if setup["landlock"]:
            _restrict_files([*readable, *packages], folder, REMOVE_FILE if setup["removes"] else 0)
        install_filter(base64.b64decode(setup["filter"]))
    return packages


def limit_memory(megabytes: int) -> None:
    """Bound the memory of this process. It has no children, and no memory that it does not map."""
    limit(resource.RLIMIT_AS, megabytes * MEGABYTE)


def become(uid: int) -> None:
    """Take a user's and group's id, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Drop all capabilities, for good."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    call("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))


def _held(path: str) -> str:
    """A path of a file that does not lead through the folders above it."""
    return f"/proc/self/fd/{os.open(path, os.O_PATH)}"


def _hold_modules() -> None:
    """Let modules be imported although folders above them may not be passed, also those of packages that are already
    imported."""
    held = {path: _held(path) for path in sys.path if os.path.exists(path)}
    sys.path[:] = held.values()
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        if isinstance(paths := getattr(module, "__path__", None), list):
            roots = [max((root for root in held if path.startswith(f"{root}/")), key=len) for path in paths]
            paths[:] = [held[root] + path[len(root) :] for root, path in zip(roots, paths, strict=True)]


def _restrict_files(readable: Sequence[str], folder: str, remove: int) -> None:
    version = landlock_version()
    if not version:
        raise OSError("this kernel has no Landlock")
    handled = sum(FILE_RIGHTS[:version])
    ruleset = _Ruleset(
        handled, CONNECT_AND_BIND if version >= 4 else 0, ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = call("landlock_create_ruleset", _libc.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), size, 0))
    write = (READ_FILE | WRITE_FILE | TRUNCATE) & handled
    for path in readable:
        _allow(rules, path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE)
    for path in DEVICES:
        _allow(rules, path, write)
    # No folders, so that one listing gives the size of all files.
    _allow(rules, folder, write | READ_DIR | remove | MAKE_REG | MAKE_SYM)
    call("landlock_restrict_self", _libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    rule = _PathBeneath(rights, parent)
    call(
        "landlock_add_rule",
        _libc.syscall(LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(rule), 0),
    )
    os.close(parent)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; a change of user undoes it."""
    call("prctl PDEATHSIG", _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def refuse_privileges() -> None:
    """Gain no rights from a program that this process, or a later child, runs; a filter needs it."""
    call("prctl NO_NEW_PRIVS", _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def hide_memory() -> None:
    """Let no other process of the same user look into this one, until it runs another program."""
    call("prctl DUMPABLE", _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended."""
    call("prctl CHILD_SUBREAPER", _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def install_filter(program: bytes) -> None:
    """Restrict this process's system calls, and those of its later children."""

    class Program(ctypes.Structure):
        """``struct sock_fprog``."""

        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    loaded = Program(len(program) // 8, program)
    call("prctl SECCOMP", _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(loaded), 0, 0))


def limit(kind: int, most: int) -> None:
    """Set a limit of this process and its later children."""
    with suppress(ValueError):  # the user has less already
        resource.setrlimit(kind, (most, most))


def call(name: str, result: int) -> int:
    """The result of a call of the C library. Raises ``OSError`` with the call's name if it has failed."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
