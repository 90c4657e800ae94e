"""Faster imports of torch, transformers, DeepSpeed and vLLM, which dominate a run's start, and errors for packages that
are not installed."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from asyncrl_cli.core.errors import ConfigError

UNUSED = ("mlflow", "scipy", "sklearn")
"""Packages that DeepSpeed's autotuner, vLLM's audio resampling and transformers' assisted generation import if they are
installed. Each takes a second or two."""
STACK = ("stack", "cpu", "gpu")
"""Extras with the packages of engines and trainer."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
MALLOC = "MALLOC_MMAP_THRESHOLD_"
M_MMAP_THRESHOLD = -3
"""The parameter that ``MALLOC`` sets, from glibc's malloc.h."""


def set_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables that libraries read when they are imported, and apply ``MALLOC`` and the warning filter
    to this process, which read them at its start."""
    os.environ.update(variables)
    if "PYTHONWARNINGS" in variables:
        warnings.simplefilter("ignore", FutureWarning)
    if MALLOC in variables:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(variables[MALLOC]))


@contextmanager
def large_imports() -> Iterator[None]:
    """A block that only imports large libraries runs a fifth to a third faster (decision 0044).

    Within it, ``UNUSED`` packages that are not imported yet count as not installed, for all threads.
    """
    hidden = [name for name in UNUSED if name not in sys.modules]
    collecting = gc.isenabled()
    # Imports leave little garbage, and each collection would visit all modules again.
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: the import system's own mark
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        # Modules stay until the process ends. Each full collection would take 0.2 s to visit them (decision 0044).
        gc.freeze()
        if collecting:
            gc.enable()


def missing_package(error: ModuleNotFoundError) -> ConfigError | None:
    """The error for the user if one of asyncrl's own dependencies is not installed; None for any other module."""
    from importlib.metadata import PackageNotFoundError, requires

    module = (error.name or "").partition(".")[0]
    distribution = {"yaml": "pyyaml", "starlette": "fastapi"}.get(module, module.lower().replace("_", "-"))
    try:
        declared = requires("asyncrl") or []
    except PackageNotFoundError:  # run from a source tree without an installation
        declared = []
    for requirement in declared:
        match = re.fullmatch(r"([\w.-]+)([^;]*)(?:;.*extra == ['\"](.+)['\"])?.*", requirement)
        name, version, extra = match.groups() if match else ("", "", None)
        if name.lower().replace("_", "-") == distribution:
            if extra in STACK:
                install = f"{shlex.quote(sys.executable)} -m pip install 'asyncrl[cpu]' --extra-index-url {TORCH_INDEX}"
                return ConfigError(
                    f"asyncrl[cpu] or asyncrl[gpu] is not installed: engines and trainer need it (no package {name})",
                    hint=f"{install}, or 'asyncrl[gpu]'",
                )
            package = f"asyncrl[{extra}]" if extra else f"{name}{version.strip()}"
            hint = f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(package)}"
            return ConfigError(f"the package {name} is not installed", hint=hint)
    return None
