"""The system calls that a shell and its programs may make in a sandbox of bubblewrap.

Beside those of one process of code: programs, processes, signals (the others of its namespace of processes are all that
there are), sockets (of its own network), and modes and times of files (of its own file system). Still refused:
namespaces, mounts, other users, tracing and other processes' memory, keys, BPF, io_uring, userfaultfd, kernel modules,
and memory that no process shows as its own (memfd, System V, message queues), which could not be counted.
"""

from __future__ import annotations

import functools
import stat

from asyncrl_cli.sandbox.filters import (
    AF_UNIX,
    ALLOWED,
    IOCTL,
    Rule,
    compiled,
    equal,
    masked,
)

FURTHER = frozenset(
    """
accept accept4 arch_prctl bind capget chmod chown connect execve execveat fallocate fchmod fchmodat fchmodat2 fchown
fchownat fcntl fgetxattr flistxattr fork futimesat get_robust_list getcpu getpeername getpriority getsockname getsockopt
getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch kill lchown lgetxattr listen listxattr llistxattr
membarrier open openat openat2 pidfd_open pidfd_send_signal prctl preadv2 pwritev2 recvmmsg recvmsg rt_sigqueueinfo
rt_tgsigqueueinfo sched_setaffinity sched_setparam sched_setscheduler sendmmsg sendmsg sendto setpgid setpriority
setrlimit setsid setsockopt signalfd signalfd4 splice tee tgkill timer_create timer_delete timer_getoverrun
timer_gettime timer_settime tkill truncate utime utimensat utimes vfork wait4 waitid
""".split()  # noqa: SIM905
)
"""System calls with any arguments, beside ``ALLOWED``."""
FURTHER_IOCTL = (0x5402, 0x5403, 0x5404, 0x540F, 0x5410, 0x5414, 0x8910, 0x8912, 0x8913, 0x8927, 0x8933, 0x80086601)
"""Settings of a terminal, its processes and size; names and addresses of network interfaces; flags of a file."""
AF_INET, AF_INET6, AF_NETLINK, NETLINK_ROUTE = 2, 10, 16, 0
NEW_NAMESPACES = 0x7E020000
PERSONALITIES = (0x0, 0xFFFFFFFF)
"""Linux's own, and the question for the present one."""


@functools.cache
def program(further: frozenset[str] = frozenset()) -> bytes:
    """The program, for this machine's architecture, with ``further`` system calls.

    Raises ``OSError`` where there is no libseccomp.
    """
    rules: list[Rule] = [(name, ()) for name in ALLOWED | FURTHER | further]
    rules += [("ioctl", (equal(1, value),)) for value in (*IOCTL, *FURTHER_IOCTL)]
    rules.append(("clone", (masked(0, NEW_NAMESPACES, 0),)))
    rules.append(("prlimit64", (equal(0, 0),)))
    rules += [("socket", (equal(0, family),)) for family in (AF_UNIX, AF_INET, AF_INET6)]
    rules.append(("socket", (equal(0, AF_NETLINK), equal(2, NETLINK_ROUTE))))
    rules.append(("socketpair", (equal(0, AF_UNIX),)))
    rules += [("personality", (equal(0, value),)) for value in PERSONALITIES]
    for argument, name in ((1, "mknod"), (2, "mknodat")):
        rules.append((name, (masked(argument, stat.S_IFIFO | stat.S_IFREG | stat.S_IFDIR, stat.S_IFIFO),)))
    return compiled(rules)
