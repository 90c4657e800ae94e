"""How a sandboxed process confines itself before it runs unreviewed code. No step can be undone.

The module is imported inside the sandbox, so it imports little.
"""

from __future__ import annotations

import base64
import ctypes
import os
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass

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
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


@dataclass(frozen=True, slots=True)
class Confinement:
    """How a process must confine itself; the process outside decides."""

    limits: dict[str, int]
    """Resource limits in addition to ``LIMITS``."""
    uid: int = 0
    """The unused user and group id to take; 0 keeps the current user."""
    processes: int = 0
    """Maximal number of the user's processes and threads, which the kernel counts; 0 sets no limit."""
    filter: str = ""
    """The seccomp program in base64; "" for none."""


def confine(order: Confinement) -> None:
    """Confine this process. Raises ``OSError`` if a step fails; the caller must then run nothing."""
    for name, maximum in (LIMITS | order.limits).items():
        limit(getattr(resource, name), maximum)
    # The order matters (decision 0021). The user id changes first, while the process has the capabilities for it. The
    # filter comes last, because it refuses most system calls that these lines make.
    if order.uid:
        os.setgroups([])
        os.setresgid(order.uid, order.uid, order.uid)
        os.setresuid(order.uid, order.uid, order.uid)
    if order.processes and order.uid != SHARED_UID:  # under the shared id the kernel would count foreign processes
        limit(resource.RLIMIT_NPROC, order.processes)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _call("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
    # The kernel kills this process when its parent ends. A change of user would reset this, so it comes after.
    _prctl("PDEATHSIG", PR_SET_PDEATHSIG, signal.SIGKILL)
    if order.filter:
        # Without it, the kernel accepts filters only from privileged processes.
        _prctl("NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)
        program = base64.b64decode(order.filter)
        filter_program = _FilterProgram(len(program) // 8, program)
        _prctl("SECCOMP", option=PR_SET_SECCOMP, value=SECCOMP_MODE_FILTER, extra=ctypes.byref(filter_program))


def limit(resource_id: int, maximum: int) -> None:
    """Set a resource limit of this process and its later children."""
    with suppress(ValueError):  # the hard limit is lower already
        resource.setrlimit(resource_id, (maximum, maximum))


def hide_memory() -> None:
    """Keep other processes of the same user from reading this one's memory, until it executes another program."""
    _prctl("DUMPABLE", PR_SET_DUMPABLE, 0)


def _prctl(name: str, option: int, value: int, extra: object = 0) -> None:
    _call(f"prctl {name}", _libc.prctl(option, value, extra, 0, 0))


def _call(name: str, result: int) -> int:
    """Return a C call's result. Raises ``OSError`` with its name if the call failed."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
