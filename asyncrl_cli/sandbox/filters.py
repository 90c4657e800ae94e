"""System calls that a sandboxed process may make, as seccomp programs compiled by libseccomp.

A program lists the allowed calls and refuses all others, including calls that later kernels add.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import tempfile
from collections.abc import Iterable

ALLOWED_CALLS = frozenset(
    """
access alarm brk chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range creat dup dup2 dup3
epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd eventfd2 exit exit_group faccessat faccessat2
fadvise64 fchdir fdatasync flock fstat fstatfs fsync ftruncate futex getcwd getdents getdents64
getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid getppid getrandom getresgid getresuid getrlimit
getrusage getsid gettid gettimeofday getuid link linkat lseek lstat madvise mkdir mkdirat mmap mprotect mremap
msync munmap nanosleep newfstatat pause pipe pipe2 poll ppoll pread64 preadv pselect6 pwrite64 pwritev read readahead
readlink readlinkat readv recvfrom rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getparam sched_getscheduler sched_yield select sendfile set_robust_list set_tid_address
setitimer setrlimit shutdown sigaltstack stat statfs statx symlink symlinkat sync_file_range sysinfo time timerfd_create
timerfd_gettime timerfd_settime times umask uname unlink unlinkat write writev
""".split()  # noqa: SIM905
)
"""System calls allowed with any arguments in every sandbox."""
FOR_COMMANDS = frozenset(
    """
accept accept4 arch_prctl bind capget chmod chown connect execve execveat fallocate fchmod fchmodat fchmodat2 fchown
fchownat fcntl fgetxattr flistxattr fork futimesat get_robust_list getcpu getpeername getpriority getsockname getsockopt
getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch kill lchown lgetxattr listen listxattr llistxattr
membarrier open openat openat2 pidfd_open pidfd_send_signal prctl preadv2 pwritev2 recvmmsg recvmsg rt_sigqueueinfo
rt_tgsigqueueinfo sched_setaffinity sched_setparam sched_setscheduler sendmmsg sendmsg sendto setpgid setpriority
setsid setsockopt signalfd signalfd4 splice tee tgkill timer_create timer_delete timer_getoverrun
timer_gettime timer_settime tkill truncate utime utimensat utimes vfork wait4 waitid
""".split()  # noqa: SIM905
)
"""Further system calls allowed with any arguments in a sandbox for commands."""
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Duplicates, flags, locks and the size of a pipe. Not F_SETOWN: the kernel sends signals to a descriptor's owner."""
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Query a terminal's settings and size, and the bytes to read; set blocking and close-on-exec."""
FURTHER_IOCTL = (0x5402, 0x5403, 0x5404, 0x540F, 0x5410, 0x5414, 0x8910, 0x8912, 0x8913, 0x8927, 0x8933, 0x80086601)
"""A terminal's settings, process group and size; names and addresses of network interfaces; a file's flags."""
THREAD_NAME = (15, 16)
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, NETLINK_ROUTE = 1, 2, 10, 16, 0
SOCK_STREAM, SOCK_TYPE = 1, 0xF
CLONE_THREAD, CLONE_NAMESPACES = 0x00010000, 0x7E020000
UNNAMED = os.O_TMPFILE & ~os.O_DIRECTORY
PERSONALITIES = (0x0, 0xFFFFFFFF)
"""Linux's own, and the value that only queries the current one."""

SCMP_ACT_ALLOW, SCMP_ACT_ERRNO = 0x7FFF0000, 0x00050000
SCMP_CMP_EQ, SCMP_CMP_MASKED_EQ = 4, 7
Condition = tuple[int, int, int, int]
"""Number of the argument, comparison, and one or two operands."""
Rule = tuple[str, tuple[Condition, ...]]
"""A system call, allowed if all conditions hold."""


class _Argument(ctypes.Structure):
    """``struct scmp_arg_cmp``."""

    _fields_ = (("number", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


@functools.cache
def for_code() -> bytes:
    """The program for one process of judged code. Raises ``OSError`` without libseccomp.

    It allows threads. It refuses other programs and processes, sockets, signals, changes to other processes' limits and
    priorities, memory outside the address space, changes to the owner, mode and times of files, disk space that is
    taken without writing (fallocate), namespaces, keys, tracing and io_uring.
    """
    rules = [_rule(name) for name in ALLOWED_CALLS]
    rules += [_rule("fcntl", _equal(1, value)) for value in FCNTL]
    rules += [_rule("ioctl", _equal(1, value)) for value in IOCTL]
    rules += [_rule("prctl", _equal(0, value)) for value in THREAD_NAME]
    rules.append(_rule("clone", _masked(0, CLONE_THREAD, CLONE_THREAD)))
    for argument, name in ((1, "open"), (2, "openat")):
        # No files without a name (O_TMPFILE), which no solution needs.
        for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            rules.append(_rule(name, _masked(argument, os.O_ACCMODE | UNNAMED, mode)))
    rules.append(_rule("prlimit64", _equal(0, 0)))
    # Event loops wake themselves through a socket pair. No other sockets, and no address to send to.
    rules.append(_rule("socketpair", _equal(0, AF_UNIX), _masked(1, SOCK_TYPE, SOCK_STREAM)))
    rules.append(_rule("sendto", _equal(4, 0)))
    return _compiled(rules)


@functools.cache
def for_commands() -> bytes:
    """The program for a shell and its programs. Raises ``OSError`` without libseccomp.

    Commands may start processes, send signals (they see only their own namespace), use sockets (their network is
    private), and change the mode and times of files (their writable file systems are private, too). The program refuses
    namespaces, mounts, other users, tracing and other processes' memory, keys, BPF, io_uring, userfaultfd and kernel
    modules. It also refuses memory that belongs to no process (memfd, System V, message queues), because the
    supervisor could not count it.
    """
    rules = [_rule(name) for name in ALLOWED_CALLS | FOR_COMMANDS]
    rules += [_rule("ioctl", _equal(1, value)) for value in (*IOCTL, *FURTHER_IOCTL)]
    rules.append(_rule("clone", _masked(0, CLONE_NAMESPACES, 0)))
    rules.append(_rule("prlimit64", _equal(0, 0)))
    rules += [_rule("socket", _equal(0, family)) for family in (AF_UNIX, AF_INET, AF_INET6)]
    rules.append(_rule("socket", _equal(0, AF_NETLINK), _equal(2, NETLINK_ROUTE)))
    rules.append(_rule("socketpair", _equal(0, AF_UNIX)))
    rules += [_rule("personality", _equal(0, value)) for value in PERSONALITIES]
    for argument, name in ((1, "mknod"), (2, "mknodat")):
        rules.append(_rule(name, _masked(argument, stat.S_IFIFO | stat.S_IFREG | stat.S_IFDIR, stat.S_IFIFO)))
    return _compiled(rules)


def _rule(name: str, *conditions: Condition) -> Rule:
    return name, conditions


def _equal(argument: int, value: int) -> Condition:
    return argument, SCMP_CMP_EQ, value, 0


def _masked(argument: int, mask: int, value: int) -> Condition:
    return argument, SCMP_CMP_MASKED_EQ, mask, value


def _compiled(rules: Iterable[Rule]) -> bytes:
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    # ENOSYS, "no such system call": the C library then falls back to an older call, for example from clone3 to clone.
    context = ctypes.c_void_p(library.seccomp_init(SCMP_ACT_ERRNO | errno.ENOSYS))
    if not context:
        raise OSError("seccomp_init failed")
    try:
        for name, conditions in rules:
            call_number = library.seccomp_syscall_resolve_name(name.encode())
            if call_number < 0:  # this architecture or this version of libseccomp lacks the call
                continue
            compared = (_Argument * len(conditions))(*(_Argument(*condition) for condition in conditions))
            if status := library.seccomp_rule_add_array(
                context, SCMP_ACT_ALLOW, call_number, len(conditions), compared
            ):
                raise OSError(-status, f"seccomp_rule_add_array {name}: {os.strerror(-status)}")
        with tempfile.TemporaryFile() as file:
            if status := library.seccomp_export_bpf(context, file.fileno()):
                raise OSError(-status, f"seccomp_export_bpf: {os.strerror(-status)}")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
