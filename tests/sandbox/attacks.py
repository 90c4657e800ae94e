"""Attacks of hostile code, which run in a sandbox as a solution. Each function returns what it could access, or "".

A successful attack changes nothing: files are opened but not written to, and signals have number 0.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import mmap
import os
import resource
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
OUTSIDE = "/"  # set by the test: a folder of the machine with the files `secret` and `writable`
OWNER = 1  # set by the test: a process of the same user


def refused(action: Callable[[], object]) -> str:
    try:
        return f"got {action()!r}"
    except (OSError, ValueError, AttributeError) as error:
        return "" if not isinstance(error, OSError) or error.errno != errno.EIO else str(error)


def syscall(number: int, *arguments: object) -> str:
    result = libc.syscall(ctypes.c_long(number), *arguments)
    return "" if result < 0 else f"system call {number} returned {result}"


def first(*results: str) -> str:
    return next((result for result in results if result), "")


def is_root() -> str:
    return "root" if 0 in os.getresuid() + os.getresgid() or 0 in os.getgroups() else ""


def reads_files() -> str:
    home = os.path.expanduser("~root")
    paths = (
        f"{OUTSIDE}/secret",
        "/etc/passwd",
        "/etc/shadow",
        "/proc/1/environ",
        "/proc/self/environ",
        f"/proc/{OWNER}/environ",
    )
    return first(*(refused(lambda path=path: open(path).read()[:9]) for path in (*paths, f"{home}/.bashrc")))


def lists_folders() -> str:
    paths = (OUTSIDE, os.path.dirname(OUTSIDE), "/home", "/run", "/proc", "/sys", "/var", "/boot", "/srv")
    return first(*(refused(lambda path=path: os.listdir(path)) for path in paths))


def writes_files() -> str:
    path = f"{OUTSIDE}/writable"

    def opened(flags: int) -> Callable[[], object]:
        return lambda: os.open(path, flags)

    return first(
        *(
            refused(opened(flags))
            for flags in (os.O_WRONLY, os.O_RDWR | os.O_APPEND, os.O_RDONLY | os.O_TRUNC, os.O_TRUNC | 3)
        ),
        refused(lambda: os.truncate(path, 1)),
        refused(lambda: os.replace(path, f"{path}.new")),
        refused(lambda: os.link(path, "link")),
        refused(lambda: os.unlink(path)),
        refused(lambda: os.mkdir(f"{OUTSIDE}/new")),
        refused(lambda: os.mkfifo(f"{OUTSIDE}/fifo")),
        refused(lambda: os.symlink("x", f"{OUTSIDE}/symlink")),
        refused(lambda: os.chmod(path, 0o600)),
        refused(lambda: os.utime(path)),
        refused(lambda: os.chown(path, -1, -1)),
        refused(lambda: os.setxattr(path, "user.x", b"x")),
    )


def follows_links() -> str:
    os.symlink(f"{OUTSIDE}/secret", "to_secret")
    os.symlink(OUTSIDE, "to_folder")
    up = os.open(".", os.O_RDONLY)
    return first(
        refused(lambda: open("to_secret").read()),
        refused(lambda: open("to_folder/secret").read()),
        refused(lambda: os.open("../" * 12 + f"{OUTSIDE}/secret", os.O_RDONLY, dir_fd=up)),
    )


def uses_inherited_descriptors() -> str:
    paths = [f"{'../' * depth}{OUTSIDE}/secret" for depth in (1, 12)]
    opened = ((descriptor, path) for descriptor in range(3, 64) for path in paths)
    return first(*(refused(lambda one=one: os.open(one[1], os.O_RDONLY, dir_fd=one[0])) for one in opened))


def writes_settings() -> str:
    paths = (
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/swappiness",
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/proc/self/oom_score_adj",
        f"/proc/{OWNER}/oom_score_adj",
    )
    return first(*(refused(lambda path=path: os.open(path, os.O_WRONLY)) for path in paths))


def opens_devices() -> str:
    known = {"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"}
    paths = [
        "/dev/kvm",
        "/dev/loop-control",
        "/dev/tty",
        "/dev/mem",
        "/dev/kmsg",
        "/dev/fuse",
        "/dev/ptmx",
        "/dev/net/tun",
    ]
    paths += [path for path in glob.glob("/dev/*") if path not in known]
    made = refused(lambda: os.mknod("device", 0o20666, os.makedev(1, 5)))
    return made or first(
        *(refused(lambda path=path: os.open(path, os.O_RDONLY)) for path in paths if not os.path.isdir(path))
    )


def uses_sockets() -> str:
    kinds = (
        (socket.AF_INET, socket.SOCK_STREAM),
        (socket.AF_INET, socket.SOCK_DGRAM),
        (socket.AF_INET6, socket.SOCK_STREAM),
        (socket.AF_UNIX, socket.SOCK_STREAM),
        (socket.AF_UNIX, socket.SOCK_DGRAM),
        (16, socket.SOCK_RAW),
        (40, 1),
        (38, 5),
    )
    made = first(*(refused(lambda kind=kind: socket.socket(*kind)) for kind in kinds))
    datagrams = refused(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
    one, other = socket.socketpair()
    one.send(b"x")  # event loops need this
    named = refused(lambda: one.sendto(b"x", "\0abstract"))
    return made or datagrams or named or ("" if other.recv(1) == b"x" else "no event loop can run")


def signals_others() -> str:
    sent = [refused(lambda pid=pid: os.kill(pid, 0)) for pid in (OWNER, 1, -1, os.getppid())]
    group = refused(lambda: os.killpg(os.getpgid(0), 0))
    reading, _ = os.pipe()
    owner = first(*(refused(lambda c=c: fcntl.fcntl(reading, c, OWNER)) for c in (fcntl.F_SETOWN, fcntl.F_SETSIG, 15)))
    pidfd = refused(lambda: os.pidfd_open(OWNER))
    async_owner = refused(lambda: fcntl.ioctl(reading, 0x8901, OWNER.to_bytes(4, "little")))
    return first(*sent, group, owner, pidfd, async_owner)


def touches_other_processes() -> str:
    return first(
        refused(lambda: resource.prlimit(OWNER, resource.RLIMIT_CPU)),
        refused(lambda: os.sched_setaffinity(OWNER, {0})),
        refused(lambda: os.setpriority(os.PRIO_PROCESS, OWNER, 19)),
        refused(lambda: open(f"/proc/{OWNER}/mem", "rb")),
        syscall(101, 16, OWNER, 0, 0),  # ptrace
        syscall(310, OWNER, 0, 0, 0, 0, 0),  # process_vm_readv
        syscall(311, OWNER, 0, 0, 0, 0, 0),  # process_vm_writev
        syscall(312, OWNER, OWNER, 0, 0, 0),  # kcmp
        syscall(438, 0, 0, 0),  # pidfd_getfd
    )


def calls_dangerous_system_calls() -> str:
    if os.uname().machine != "x86_64":
        return ""  # other numbers
    numbers = {
        "io_uring_setup": 425, "userfaultfd": 323, "perf_event_open": 298, "bpf": 321, "add_key": 248,
        "request_key": 249, "keyctl": 250, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "setns": 308,
        "unshare": 272,
        "open_by_handle_at": 304, "name_to_handle_at": 303, "fsopen": 430, "fsmount": 432, "move_mount": 429,
        "open_tree": 428, "init_module": 175, "kexec_load": 246, "reboot": 169, "swapon": 167, "syslog": 103,
        "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240,
        "personality": 135, "fanotify_init": 300, "inotify_init": 253, "quotactl": 179, "acct": 163, "sethostname": 170,
        "ioperm": 173,
        "iopl": 172, "clone3": 435, "openat2": 437, "seccomp": 317, "landlock_create_ruleset": 444, "execveat": 322,
        "vmsplice": 278, "process_madvise": 440, "socket": 41, "connect": 42, "bind": 49, "sendmsg": 46,
    }  # fmt: skip
    return first(
        *(f"{name} {got}" for name, number in numbers.items() if (got := syscall(number, 0, 0, 0, 0, 0))),
        *(f"unshare {flag:x}" for flag in (0x20000, 0x10000000, 0x40000000) if libc.unshare(flag) == 0),
    )


def uses_another_system_call_table() -> str:
    return syscall(0x40000000 | 39)  # getpid of x32: if the kernel has that table, the process is killed


def starts_processes() -> str:
    def fork() -> int:
        if (pid := os.fork()) == 0:
            os._exit(0)
        return pid

    return first(
        refused(fork),
        refused(lambda: subprocess.run(["/bin/true"], check=False)),
        refused(lambda: os.posix_spawn("/bin/true", ["true"], {})),
        refused(lambda: os.execv("/bin/true", ["true"])),
        "" if os.waitstatus_to_exitcode(os.system("true")) == 127 else "a shell",  # 127: it could not be started
    )


def frees_itself() -> str:
    libc.prctl(1, 0, 0, 0, 0)  # no signal when its parent ends
    signalled = ctypes.c_int()
    libc.prctl(2, ctypes.byref(signalled), 0, 0, 0)
    raised = refused(lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2))
    return first(
        raised,
        "no limit" if resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY else "",
        refused(lambda: os.setuid(0)),
        refused(lambda: os.setsid() and ""),
        "outlives its parent" if libc.prctl(1, 0, 0, 0, 0) == 0 else "",
    )


def takes_memory() -> str:
    taken = []
    try:
        while len(taken) < 2048:
            taken.append(mmap.mmap(-1, 2**20))
            taken[-1].write(b"x" * 2**20)
    except (OSError, MemoryError, ValueError):
        pass
    got = len(taken)
    taken.clear()
    return "" if got < 512 else f"{got} MiB"


def takes_memory_by_files() -> str:
    got, files = 0, []
    try:
        for _ in range(200):
            files.append(tempfile.TemporaryFile())  # noqa: SIM115
            for _ in range(16):
                files[-1].write(b"x" * 2**20)
                files[-1].flush()
                got += 1
                if got > 600:
                    return f"{got} MiB"
    except OSError:
        pass
    return ""


def makes_many_files() -> str:
    for number in range(100_000):
        try:
            os.close(os.open(f"file{number}", os.O_CREAT | os.O_WRONLY))
        except OSError:
            return ""
    time.sleep(0.5)  # to be seen
    return "100,000 files"


def uses_calls_of_32_bits() -> str:
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, getpid; int 0x80; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    return f"got {ctypes.CFUNCTYPE(ctypes.c_int)(address)()}"


def grows_pipes() -> str:
    pipes = []
    try:
        while True:
            pipes += os.pipe()
    except OSError:
        pass
    grown = [refused(lambda end=end: fcntl.fcntl(end, 1031, 2**20)) for end in pipes]
    for end in pipes:
        os.close(end)
    return first(*grown, "" if len(pipes) < 200 else f"{len(pipes)} descriptors")


def starts_threads() -> str:
    threading.stack_size(2**15)
    stop = threading.Event()
    started = 0
    try:
        while started < 5000:
            threading.Thread(target=stop.wait, daemon=True).start()
            started += 1
        return f"{started} threads"
    except RuntimeError:
        time.sleep(0.2)  # a check must be able to count all threads
        return ""
    finally:
        stop.set()


ATTACKS = [
    is_root, reads_files, lists_folders, writes_files, follows_links, uses_inherited_descriptors, writes_settings,
    opens_devices, uses_sockets, signals_others, touches_other_processes, calls_dangerous_system_calls,
    starts_processes, frees_itself, takes_memory, grows_pipes,
]  # fmt: skip
"""Attacks after which the process still lives."""
FATAL = [uses_another_system_call_table, takes_memory_by_files, starts_threads, makes_many_files]
if os.uname().machine == "x86_64":
    FATAL.append(uses_calls_of_32_bits)
"""Attacks after which a sandbox may kill the process."""
