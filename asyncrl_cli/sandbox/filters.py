"""The system calls that code in a sandbox may make, as a seccomp program that libseccomp compiles.

What is not named is refused, new system calls of later kernels included. Of one process of code (``program``):
programs and processes (threads are allowed), sockets, signals, limits and priorities of other processes, memory that is
not mapped, owners, modes and times of files, disk space that is taken without writing (fallocate), namespaces, keys,
tracing, io_uring. What a shell and its programs need in addition (``shell_filter``) is in another file.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import tempfile
from collections.abc import Iterable

ALLOWED = frozenset(
    """
access brk chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range creat dup dup2 dup3
epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd eventfd2 exit exit_group faccessat faccessat2
fadvise64 fchdir fdatasync flock fstat fstatfs fsync ftruncate futex getcwd getdents getdents64
getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid getppid getrandom getresgid getresuid getrlimit
getrusage getsid gettid gettimeofday getuid link linkat lseek lstat madvise mkdir mkdirat mmap mprotect mremap
msync munmap nanosleep newfstatat pause pipe pipe2 poll ppoll pread64 preadv pselect6 pwrite64 pwritev read readahead
readlink readlinkat readv recvfrom rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getparam sched_getscheduler sched_yield select sendfile set_robust_list set_tid_address
setitimer shutdown sigaltstack stat statfs statx symlink symlinkat sync_file_range sysinfo time timerfd_create
timerfd_gettime timerfd_settime times umask uname unlink unlinkat write writev alarm
""".split()  # noqa: SIM905
)
"""System calls with any arguments."""
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Copies, flags, locks and the size of a pipe; not the owner of a descriptor, which is sent signals."""
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Whether it is a terminal and how large, bytes to read, whether it blocks, close-on-exec."""
PRCTL = (15, 16)
"""The name of a thread."""

SCMP_ACT_ALLOW, SCMP_ACT_ERRNO = 0x7FFF0000, 0x00050000
SCMP_CMP_EQ, SCMP_CMP_MASKED_EQ = 4, 7
Condition = tuple[int, int, int, int]
"""Of an argument: its number, the comparison, and its one or two operands."""
Rule = tuple[str, tuple[Condition, ...]]
"""A system call that is allowed where all conditions hold."""
UNNAMED = os.O_TMPFILE & ~os.O_DIRECTORY
AF_UNIX, SOCK_STREAM, SOCK_TYPE = 1, 1, 0xF
CLONE_THREAD = 0x00010000


class _Argument(ctypes.Structure):
    """``struct scmp_arg_cmp``."""

    _fields_ = (("number", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def equal(number: int, value: int) -> Condition:
    """An argument that has this value."""
    return number, SCMP_CMP_EQ, value, 0


def masked(number: int, mask: int, value: int) -> Condition:
    """An argument whose bits of a mask have this value."""
    return number, SCMP_CMP_MASKED_EQ, mask, value


def rules() -> list[Rule]:
    """What one process of code may do."""
    rules: list[Rule] = [(name, ()) for name in ALLOWED]
    for name, argument, values in (("fcntl", 1, FCNTL), ("ioctl", 1, IOCTL), ("prctl", 0, PRCTL)):
        rules += [(name, (equal(argument, value),)) for value in values]
    rules.append(("clone", (masked(0, CLONE_THREAD, CLONE_THREAD),)))
    for argument, name in ((1, "open"), (2, "openat")):
        # Before its version 3, Landlock lets a file that is only read be emptied with O_TRUNC. A file without a
        # name (O_TMPFILE) would be missing where the files are counted by name.
        for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            rules.append((name, (masked(argument, os.O_ACCMODE | UNNAMED | (0 if mode else os.O_TRUNC), mode),)))
    rules += [("prlimit64", (equal(0, 0),)), ("setrlimit", ())]
    # What event loops wake themselves up with. No other socket, and no address to send to.
    rules.append(("socketpair", (equal(0, AF_UNIX), masked(1, SOCK_TYPE, SOCK_STREAM))))
    rules.append(("sendto", (equal(4, 0),)))
    return rules


@functools.cache
def program() -> bytes:
    """The program of ``rules``, for this machine's architecture. Raises ``OSError`` where there is no libseccomp."""
    return compiled(rules())


def compiled(rules: Iterable[Rule]) -> bytes:
    """A program that allows this and refuses all else, for this machine's architecture. Raises ``OSError`` without
    libseccomp."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    # Refused calls "do not exist": then the C library falls back to older ones, as from clone3 to clone.
    context = ctypes.c_void_p(library.seccomp_init(SCMP_ACT_ERRNO | errno.ENOSYS))
    if not context:
        raise OSError("seccomp_init failed")
    try:
        for name, conditions in rules:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number < 0:  # this architecture, or this version of the library, does not have it
                continue
            compared = (_Argument * len(conditions))(*(_Argument(*condition) for condition in conditions))
            if status := library.seccomp_rule_add_array(context, SCMP_ACT_ALLOW, number, len(conditions), compared):
                raise OSError(-status, f"seccomp_rule_add_array {name}: {os.strerror(-status)}")
        with tempfile.TemporaryFile() as file:
            if status := library.seccomp_export_bpf(context, file.fileno()):
                raise OSError(-status, f"seccomp_export_bpf: {os.strerror(-status)}")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
