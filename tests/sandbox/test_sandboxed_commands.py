"""A sandbox for commands runs them, and withstands attacks by commands."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl_cli.sandbox import bubblewrap
from asyncrl_cli.sandbox.bubblewrap import SandboxError
from asyncrl_cli.sandbox.commands import BlockingSandbox, open_sandbox
from asyncrl_cli.spec.inputs import SandboxSpec
from tests.sandbox.kinds import NEEDS_BUBBLEWRAP, NEEDS_ROOT, SilentHandler, run_as_ordinary_user

pytestmark = [pytest.mark.slow, NEEDS_BUBBLEWRAP]

SETTINGS = SandboxSpec(time_s=30.0, memory_mb=256, processes=32, disk_mb=16, network="none")
Opener = Callable[..., Any]
# Without ps and pgrep, which a small system lacks.
SLEEPING = "cat /proc/[0-9]*/comm 2>/dev/null | grep -cx sleep"
COMMANDS = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"


def replace(settings: SandboxSpec, **changes: Any) -> SandboxSpec:
    return settings.model_copy(update=changes)


@pytest.fixture(scope="module")
def opened() -> Iterator[Opener]:
    """Opens sandboxes, with an event loop in a separate thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    @contextmanager
    def opens(settings: SandboxSpec = SETTINGS, gateway: str | None = None) -> Iterator[BlockingSandbox]:
        manager = open_sandbox(settings, gateway=gateway)
        sandbox = asyncio.run_coroutine_threadsafe(manager.__aenter__(), loop).result()
        try:
            yield BlockingSandbox(sandbox, loop)
        finally:
            asyncio.run_coroutine_threadsafe(manager.__aexit__(None, None, None), loop).result()

    yield opens
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def sandbox(opened: Opener) -> Iterator[BlockingSandbox]:
    with opened() as one:
        yield one


def started_here() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def left_since(before: set[int]) -> list[psutil.Process]:
    """Processes that were started since ``before`` and do not end. Those that have been killed may need a moment."""
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    return psutil.wait_procs(started, timeout=60)[1]


# -- commands


@pytest.mark.parametrize(
    ("command", "output"),
    {
        "the folder": ("pwd", "/sandbox\n"),
        "both streams in order": ("echo a; echo b >&2; echo c", "a\nb\nc\n"),
        "a user without rights": ("whoami; id -u | grep -vx 0 >/dev/null && echo not root", "agent\nnot root\n"),
        "pipes and heredocs": ("cat <<'X' | tr a-z A-Z\nsome text\nX", "SOME TEXT\n"),
        "bash": ("[[ abc == a* ]] && echo {1..3}", "1 2 3\n"),
        "git": ("git init -q r && cd r && echo 1 > f && git add f && git commit -qm x && git log --format=%s", "x\n"),
        "this Python and its packages": ("python -c 'import hypothesis, sys; print(sys.prefix)'", f"{sys.prefix}\n"),
        "programs that start programs": ("timeout 20 xargs -n1 echo <<< 'a b'", "a\nb\n"),
        "multiprocessing": (
            "python -c 'import multiprocessing as m; p = m.Pool(2); print(p.map(abs, [-1, 2])); p.terminate()'",
            "[1, 2]\n",
        ),
        "pytest": (
            "echo 'def test(): assert 1' > test_a.py; PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 pytest -q test_a.py | tail -1 | "
            "cut -c-8",
            "1 passed\n",
        ),
        "no standard input": ("cat; echo end", "end\n"),
        "a NUL": ("echo a\0b", "bash: embedded null byte\n"),
    }.values(),
)
def test_commands_run_as_in_a_shell(sandbox: BlockingSandbox, command: str, output: str) -> None:
    result = sandbox.run(command, env={"GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_EMAIL": "a"})
    assert (result.output, result.stopped) == (output, "")


def test_exit_statuses_are_the_shells(sandbox: BlockingSandbox) -> None:
    statuses = [sandbox.run(command).status for command in ("exit 3", "nothing-like-this", "kill -9 $$", "true")]
    assert statuses == [3, 127, 137, 0]


def test_commands_get_the_given_variables_and_no_secret(
    sandbox: BlockingSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "secret")
    printed = sandbox.run("env", env={"GIVEN": "a\nb = ä"}).output
    assert "GIVEN=a\nb = ä\n" in printed
    assert "secret" not in printed


def test_files_stay_and_processes_do_not(opened: Opener) -> None:
    with opened() as sandbox:
        sandbox.run("echo kept > file; (setsid sleep 600 &) ; sleep 600 & nohup sleep 600 & echo started")
        assert sandbox.run(f"cat file; {SLEEPING}").output == "kept\n0\n"


def test_a_line_that_is_too_long_is_not_run(sandbox: BlockingSandbox) -> None:
    result = sandbox.run(f"echo {'x' * 2**18}")
    assert (result.status, "too long" in result.output) == (126, True)


def test_commands_of_one_sandbox_take_turns(sandbox: BlockingSandbox) -> None:
    line = "for i in 1 2 3; do n=$(cat count || echo 0); sleep 0.01; echo $((n + 1)) > count; done 2>/dev/null"
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(sandbox.run, [line] * 4))
    assert sandbox.run("cat count").output == "12\n"


def test_a_cancelled_command_is_stopped_and_the_next_gets_its_own_answer() -> None:
    async def play() -> list[str]:
        async with open_sandbox(SETTINGS) as sandbox:
            await sandbox.run("touch began")
            first = asyncio.create_task(sandbox.run("echo x > running; sleep 600; echo late > late"))
            waiting = asyncio.create_task(sandbox.run("echo waiting > waiting"))
            await asyncio.sleep(0.2)
            waiting.cancel()
            first.cancel()
            results = [await sandbox.run(f"echo next; ls; {SLEEPING}")]
            await asyncio.gather(first, waiting, return_exceptions=True)
            return [result.output for result in results]

    (output,) = asyncio.run(play())
    assert output.startswith("next\nbegan\n")
    assert output.endswith("\n0\n")
    assert "late" not in output
    assert "waiting" not in output


# -- files


def test_files_go_in_and_out(sandbox: BlockingSandbox) -> None:
    data = bytes(range(256)) * 5000
    sandbox.write_file("some/folder/ä file", data)
    assert sandbox.run("wc -c < 'some/folder/ä file'").output == f"{len(data)}\n"
    sandbox.run("printf changed > 'some/folder/ä file'")
    assert sandbox.read_file("./some//folder/ä file") == b"changed"
    sandbox.write_file("some/folder/ä file", b"")
    assert sandbox.read_file("some/folder/ä file") == b""


@pytest.mark.parametrize("path", ["../up", "a/../../up", "/etc/passwd", "", ".", "a\0b"])
def test_paths_outside_are_refused(sandbox: BlockingSandbox, path: str) -> None:
    with pytest.raises(OSError, match="not a path inside the work folder"):
        sandbox.read_file(path)
    with pytest.raises(OSError, match="not a path inside the work folder"):
        sandbox.write_file(path, b"x")


@pytest.mark.parametrize(
    "made",
    [
        "ln -s /etc/passwd {}/file",
        "ln -s /tmp/elsewhere {}/file",
        "rmdir {}; ln -s /tmp {}; echo x > /tmp/file",
        "mkfifo {}/file",
        "mkdir {}/file",
        "ln -s file {}/file",
    ],
)
def test_links_and_what_is_not_a_file_are_refused(sandbox: BlockingSandbox, made: str) -> None:
    sandbox.run("rm -rf tried; mkdir tried; " + made.replace("{}", "tried"))
    refused = "symbolic links|Not a directory|not a file|No such device|Is a directory"
    with pytest.raises(OSError, match=refused):
        sandbox.read_file("tried/file")
    with pytest.raises(OSError, match=refused):
        sandbox.write_file("tried/file", b"x")
    assert sandbox.run("cat /tmp/elsewhere").status == 1


def test_a_file_with_holes_is_not_read(sandbox: BlockingSandbox) -> None:
    sandbox.run("truncate -s 1T holes")
    with pytest.raises(OSError, match="larger than 256 MiB"):
        sandbox.read_file("holes")
    sandbox.write_file("holes", b"x")
    assert sandbox.read_file("holes") == b"x"


def test_a_missing_file_and_a_full_disk_raise_their_errors(opened: Opener) -> None:
    with opened() as sandbox:
        with pytest.raises(FileNotFoundError):
            sandbox.read_file("missing")
        with pytest.raises(OSError, match="No space left"):
            sandbox.write_file("large", bytes(17 << 20))
        assert sandbox.run("rm large; echo it works on").output == "it works on\n"


# -- attacks


def secret_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "314159"], env={"SECRET": "of the host"})


# A sandbox shows the programs and packages of this Python, wherever they are.
PARTS = [path.split("/") for path in (sys.base_prefix, *bubblewrap.packages())]
SHOWN = {".pyenv", *(parts[2] for parts in PARTS if parts[:2] == ["", "root"])}
OTHERS = f"ls -A /root | grep -vx {' '.join(f'-e {name}' for name in SHOWN)}"
ATTACKS = {
    "the home of root": f"{OTHERS}; cat /root/.bashrc /root/.ssh/* /root/.profile",
    "passwords": "cat /etc/shadow; grep -c : /etc/passwd | grep -vx 2",
    "files of the host": f"cat {__file__}; ls /home/* /var/* /opt/* /srv/* /media/* /boot/* /sys/* /run/user/*",
    "processes of the host": f"{COMMANDS} | grep -a 31415[9]; cat /proc/*/environ | grep -a 'of the [h]ost'",
    "a process's memory": 'cat /proc/1/mem; python -c \'open("/proc/1/mem", "r+b")\' && echo writes; ls /proc/1/root',
    "writing to programs": "touch /usr/x /etc/x /x /run/x /dev/x; echo > /usr/bin/env; rm /etc/passwd /usr/bin/ls",
    "other users": "su -c id; python -c 'import os; os.setuid(0)' && echo root; chown 0 . && echo chown",
    "mounts": "mount -t tmpfs none /tmp && echo mounted; unshare -rm true && echo unshared",
    "new namespaces": "python -c 'import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))' | grep -x 0",
    "devices": "mknod d b 8 0 && echo made; ls /dev | grep -v -x -e null -e zero -e random -e urandom -e shm",
    "own modules": "touch /box/x && echo made; echo >> /box/asyncrl_cli/sandbox/wire.py && echo wrote",
    "kernel settings": "echo 1 > /proc/sys/kernel/panic && echo set; echo b > /proc/sysrq-trigger && echo set",
    "the clock": "date -s 2000-01-01 >/dev/null && echo set",
    "the host's name": "hostname elsewhere; hostname | grep else",
    "priorities": "nice -n -5 true 2>&1 | grep -v -e cannot -e denied",
    "the supervisor's sockets": "ls -l /proc/self/fd | grep socket; cat /proc/net/unix | grep -a @",
    "the capabilities": "grep -E 'Cap(Eff|Prm|Inh|Amb)' /proc/self/status | grep -v 0000000000000000",
    "a program that sets its user": "cp /usr/bin/id . && chmod 4755 id && chown 0 id && ./id -u | grep -x 0",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_reach_nothing_outside(sandbox: BlockingSandbox, attack: str) -> None:
    victim = secret_process()
    try:
        # A successful attack prints to the output; error messages are not captured.
        result = sandbox.run(f"({ATTACKS[attack]}) 2>/dev/null")
    finally:
        victim.kill()
        victim.wait()
    assert result.output == ""


CALLS = {
    "ptrace": "libc.ptrace(16, 1, 0, 0)",
    "ptrace of an own process": "libc.ptrace(16, os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '9'), 0, 0)",
    "process_vm_readv": "libc.syscall(310, 1, 0, 0, 0, 0, 0)",
    "mount": "libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0)",
    "pivot_root": "libc.syscall(155, b'/', b'/')",
    "chroot": "libc.chroot(b'/tmp')",
    "unshare": "libc.unshare(0x10000000)",
    "clone with a user namespace": "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "libc.syscall(435, 0, 0)",
    "setns": "libc.setns(0, 0)",
    "bpf": "libc.syscall(321, 0, 0, 0)",
    "userfaultfd": "libc.syscall(323, 0)",
    "io_uring_setup": "libc.syscall(425, 1, 0)",
    "keyctl": "libc.syscall(250, 0, 0)",
    "add_key": "libc.syscall(248, 0, 0, 0, 0, 0)",
    "perf_event_open": "libc.syscall(298, 0, 0, 0, 0, 0)",
    "memfd_create": "libc.syscall(319, b'x', 0)",
    "shmget": "libc.shmget(0, 4096, 0o1600)",
    "open_by_handle_at": "libc.syscall(304, 0, 0, 0)",
    "pidfd_getfd": "libc.syscall(438, 0, 0, 0)",
    "reboot": "libc.reboot(0)",
    "init_module": "libc.syscall(175, 0, 0, 0)",
    "a packet socket": "libc.socket(17, 3, 0)",
    "a vsock": "libc.socket(40, 1, 0)",
    "an AF_ALG socket": "libc.socket(38, 5, 0)",
}


def test_commands_cannot_read_the_supervisors_start(sandbox: BlockingSandbox) -> None:
    output = sandbox.run("(cat /proc/1/environ /proc/1/maps; ls /proc/1/fd) 2>/dev/null").output
    assert output == ""


def test_system_calls_that_lead_out_do_not_exist(sandbox: BlockingSandbox) -> None:
    lines = ["import ctypes, os", "libc = ctypes.CDLL(None, use_errno=True)"]
    for name, call in CALLS.items():
        lines += ["ctypes.set_errno(0)", f"print({name!r}, {call}, ctypes.get_errno(), sep=';')"]
    sandbox.write_file("calls.py", "\n".join(lines).encode())
    answers = sandbox.run("python calls.py").output.splitlines()
    assert answers == [f"{name};-1;38" for name in CALLS]


def test_signals_reach_neither_the_host_nor_the_supervisor(sandbox: BlockingSandbox) -> None:
    victim = secret_process()
    try:
        sandbox.run(f"kill -9 {victim.pid} {os.getpid()}; kill -9 1; kill -STOP 1; kill -INT 1; kill -TERM 1")
        sandbox.run("kill -9 -1")
        assert victim.poll() is None
        assert sandbox.run("echo alive").output == "alive\n"
    finally:
        victim.kill()
        victim.wait()


def test_sandboxes_do_not_see_each_other(opened: Opener, gateway: Gateway) -> None:
    with opened(replace(SETTINGS, network="gateway"), gateway.url) as first, opened() as second:
        first.run("echo secret | tee /sandbox/secret /tmp/secret")
        assert second.run("ls -A /sandbox; test -e /tmp/secret && echo there").output == ""
        with ThreadPoolExecutor(1) as thread, gateway.waiting() as asked:
            running = thread.submit(first.run, f'exec python -c "{ASK.replace("{}", "stream")}"')
            assert asked.wait(60)
            assert second.run(f"{COMMANDS} | grep -a [s]tream; kill -9 -1 2>/dev/null").output == ""
            second.run("for i in $(seq 2 300); do kill -9 $i; done")
            gateway.read.set()
            assert "second" in running.result().output


def living() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


LIMITS = {
    "time": ("sleep 600", "time"),
    "time, in all processes": ("for i in 1 2 3; do setsid sleep 600 & done; wait", "time"),
    "time, whatever signals say": ("trap '' TERM INT HUP; while :; do sleep 1; done", "time"),
    "a fork bomb": (":(){ :|:& };: ; sleep 600", "processes"),
    "threads": ("python -c 'import threading as t\nwhile 1: t.Thread(target=t.Event().wait).start()'", "processes"),
    "memory of many processes": (
        "for i in 1 2 3 4 5 6; do python -c 'x = bytearray(100 << 20); import time; time.sleep(600)' & done; wait",
        "memory",
    ),
    "shared memory": (
        "python -c 'import mmap, time\nm = mmap.mmap(-1, 400 << 20)\nfor _ in range(400): m.write(bytes(1 << 20))\n"
        "time.sleep(600)'",
        "memory",
    ),
    "sockets": (
        "for i in 1 2 3 4 5 6 7 8; do python -c 'import socket, time\na = [socket.socketpair() for _ in range(400)]\n"
        "for one, _ in a:\n one.setblocking(False)\n one.send(bytes(2**20))\ntime.sleep(600)' & done; wait",
        "memory",
    ),
    "disk": ("yes > file; sleep 600", "disk"),
    "disk at /tmp": ("yes > /tmp/file; sleep 600", "disk"),
}


@pytest.fixture(scope="module")
def limited(opened: Opener) -> Iterator[BlockingSandbox]:
    """A sandbox with a short time limit."""
    with opened(replace(SETTINGS, time_s=0.5)) as one:
        yield one


@pytest.mark.parametrize("name", LIMITS)
def test_limits_stop_a_command(limited: BlockingSandbox, name: str) -> None:
    command, limit = LIMITS[name]
    result = limited.run(command, time_s=None if limit == "time" else 30.0)
    assert (result.stopped, result.status) == (limit, None)
    line = "rm -f file /tmp/file; echo it works on"
    assert limited.run(line, time_s=30.0).output == "it works on\n"
    processes = limited.run("ls -d /proc/[0-9]* | wc -l", time_s=30.0).output
    assert processes <= "4\n"  # the supervisor and this line's processes


def test_one_process_cannot_have_more_memory_than_all(sandbox: BlockingSandbox) -> None:
    result = sandbox.run("python -c 'import time; bytearray(400 << 20); time.sleep(600)'")
    assert "MemoryError" in result.output


def test_files_without_content_are_bounded(opened: Opener) -> None:
    """File names need memory in the kernel."""
    with opened() as sandbox:
        line = "python -c 'import itertools\nfor i in itertools.count(): open(str(i), \"w\").close()'"
        assert sandbox.run(line, time_s=60.0).stopped == "disk"
        assert sandbox.run("ls -U | xargs rm -f; echo it works on").output == "it works on\n"


def test_output_without_end_is_bounded(sandbox: BlockingSandbox) -> None:
    result = sandbox.run("echo first; yes | head -c 50000000; echo last")
    assert result.status == 0
    assert result.output.startswith("first\ny\n")
    assert result.output.endswith("y\nlast\n")
    assert len(result.output) < 70_000
    assert sandbox.run("yes", time_s=0.5).stopped == "time"


ORDINARY = """
import asyncio, os, sys
from tests.sandbox.test_sandboxed_commands import *
assert os.getuid() == 65534

async def main():
    reached = []
    async with open_sandbox(SETTINGS) as sandbox:
        all_of_them = "; ".join(f"({attack}) 2>/dev/null" for attack in ATTACKS.values())
        if output := (await sandbox.run(all_of_them)).output:
            reached.append(output)
        await sandbox.write_file("a/b", b"x")
        await sandbox.run("kill -9 1; kill -9 -1; kill -INT 1")
        lines = ["cat a/b; pwd; whoami", LIMITS["a fork bomb"][0], LIMITS["disk"][0], "rm file; (sleep 9 &) ; echo end"]
        results = [await sandbox.run(line) for line in lines]
        print(reached, [(one.output if not one.stopped else one.stopped) for one in results])

asyncio.run(main())
"""


@NEEDS_ROOT
def test_confinement_holds_for_an_ordinary_user() -> None:
    result = run_as_ordinary_user(ORDINARY)
    assert result.stderr == ""
    assert result.stdout.strip() == str([]) + " " + str(["x/sandbox\nagent\n", "processes", "disk", "end\n"])


# -- the network


class Gateway(ThreadingHTTPServer):
    """Streams two pieces, the second after the first was read."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked, self.read = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), Answer)

    @contextmanager
    def waiting(self) -> Iterator[threading.Event]:
        """Within the block, a stream also waits before its second piece; the event is set when a stream has begun."""
        self.asked.clear()
        self.read.clear()
        try:
            yield self.asked
        finally:
            self.read.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/sessions/1/v1"


class Answer(SilentHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Gateway)
        body = self.body()
        if body == b"read":
            self.server.read.set()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode() + b" " + body + b"\n")
        if body == b"stream":
            self.server.asked.set()
            self.server.read.wait(60)
            self.wfile.write(b"second\n")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def connected(opened: Opener, gateway: Gateway) -> Iterator[BlockingSandbox]:
    with opened(replace(SETTINGS, network="gateway"), gateway.url) as one:
        yield one


ASK = "import os, urllib.request as u; print(u.urlopen(os.environ['OPENAI_BASE_URL'] + '/x', b'{}').read().decode())"


def test_the_gateway_answers_inside(connected: BlockingSandbox) -> None:
    assert connected.base_url == "http://127.0.0.1:18181/sessions/1/v1"
    assert connected.run(f'python -c "{ASK.format("hello")}"').output == "/sessions/1/v1/x hello\n\n"
    with_much = ASK.replace("b'{}'", "b'x' * 3000000").replace(".read().decode()", ".read()[-2000000:].count(b'x')")
    assert connected.run(f'python -c "{with_much}"').output == "1999999\n"


def test_a_stream_arrives_in_pieces(connected: BlockingSandbox) -> None:
    script = """
import os, urllib.request as u
url = os.environ["OPENAI_BASE_URL"]
stream = u.urlopen(url, b"stream")
print(stream.readline())
u.urlopen(url, b"read").read()
print(stream.readline())
"""
    connected.write_file("stream.py", script.encode())
    assert connected.run("python stream.py").output == "b'/sessions/1/v1 stream\\n'\nb'second\\n'\n"


def test_nothing_else_can_be_reached(connected: BlockingSandbox, gateway: Gateway, tmp_path: Path) -> None:
    abstract, path = f"asyncrl-test-{os.getpid()}", tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as hidden, socket.socket(socket.AF_UNIX) as named:
        hidden.bind(f"\0{abstract}")
        hidden.listen()
        named.bind(str(path))
        named.listen()
        address = next(one.address for ones in psutil.net_if_addrs().values() for one in ones if one.family == 2)
        script = f"""
import socket
def tries(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as one:
        one.settimeout(5)
        try:
            one.connect(address)
            if kind == socket.SOCK_DGRAM: one.send(b"x")
            print("reached", address)
        except OSError as error:
            pass
tries(socket.AF_INET, ("127.0.0.1", {gateway.server_port}))
tries(socket.AF_INET, ("{address}", {gateway.server_port}))
tries(socket.AF_INET, ("1.1.1.1", 53))
tries(socket.AF_INET, ("1.1.1.1", 53), socket.SOCK_DGRAM)
tries(socket.AF_INET, ("169.254.169.254", 80))
tries(socket.AF_INET6, ("2606:4700:4700::1111", 53))
tries(socket.AF_UNIX, "\\0{abstract}")
tries(socket.AF_UNIX, "{path}")
try:
    print(socket.getaddrinfo("example.com", 80))
except OSError:
    print("no DNS")
"""
        connected.write_file("network.py", script.encode())
        assert connected.run("python network.py; ls /sys/class/net 2>/dev/null").output == "no DNS\n"
    assert connected.run("cut -d: -f1 -s /proc/net/dev").output.split() == ["lo"]


def test_without_a_network_there_is_no_gateway(opened: Opener, gateway: Gateway) -> None:
    with opened(SETTINGS, gateway.url) as sandbox:
        assert sandbox.base_url is None
        line = "echo x > /dev/tcp/127.0.0.1/18181 && echo reached"
        assert "Connection refused" in sandbox.run(f"echo $OPENAI_BASE_URL; {line}").output


# -- processes and files that remain


def test_closing_leaves_nothing(opened: Opener, gateway: Gateway) -> None:
    before, mounts, threads = started_here(), Path("/proc/mounts").read_text(), threading.active_count()
    with opened(replace(SETTINGS, network="gateway"), gateway.url) as sandbox:
        descriptors = len(os.listdir("/proc/self/fd"))
        sandbox.run("setsid sleep 600 & echo x > file")
        with ThreadPoolExecutor(1) as thread, gateway.waiting() as asked:
            running = thread.submit(sandbox.run, f'setsid sleep 600 & python -c "{ASK.replace("{}", "stream")}"')
            assert asked.wait(60)
            sandbox._loop.call_soon_threadsafe(sandbox._sandbox._shut)  # type: ignore[attr-defined]
            with pytest.raises(SandboxError):
                running.result()
        with pytest.raises(SandboxError):
            sandbox.run("echo x")
    assert left_since(before) == []
    assert Path("/proc/mounts").read_text() == mounts
    assert len(os.listdir("/proc/self/fd")) < descriptors
    assert threading.active_count() <= threads + 32  # the event loop's own thread pool


def test_a_sandbox_that_does_not_start_says_why(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: no permissions' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    before = started_here()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="has not started: bwrap: no permissions"), opened():
        pass
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="bwrap is not installed"), opened():
        pass
    assert left_since(before) == []


def test_further_paths_can_be_read_and_not_written(opened: Opener, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "data").write_text("given\n")
    with opened(replace(SETTINGS, readable=[str(tmp_path)])) as sandbox:
        result = sandbox.run(f"cat {tmp_path}/data; echo x > {tmp_path}/data")
        assert result.output.startswith("given\n")
        assert result.status == 1
    assert (tmp_path / "data").read_text() == "given\n"


def test_without_confinement_time_and_processes_hold(opened: Opener) -> None:
    before = started_here()
    with opened(replace(SETTINGS, kind="none"), "http://gateway:1/v1") as sandbox:
        folder = Path(sandbox.run("pwd").output.strip())
        sandbox.write_file("a/b", b"x")
        assert sandbox.run("cat a/b; (setsid sleep 600 &); sleep 600 & echo").output == "x\n"
        assert sandbox.run("sleep 600", time_s=0.2).stopped == "time"
        assert [child for child in living() if child.name() == "sleep" and child.pid not in before] == []
        assert folder.exists()
        with pytest.raises(OSError, match="not a path inside"):
            sandbox.read_file("../x")
    assert not folder.exists()
    assert left_since(before) == []
