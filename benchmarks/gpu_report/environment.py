"""This machine: versions, devices, and the output of `asyncrl doctor`."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from asyncrl_cli.runs.manifest import package_versions
from gpu_report.runs import Bench

ROOT = Path(__file__).parents[2]
GPU_FIELDS = ("name", "memory.total", "driver_version", "pci.bus_id", "power.limit", "clocks.max.sm")


def versions_and_devices(bench: Bench) -> dict[str, Any]:
    """Versions of system and packages, the commit, and each GPU as reported by nvidia-smi and torch."""
    import torch

    versions: dict[str, Any] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": dict(sorted(package_versions().items())),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }
    if bench.device == "cuda":
        listed = output("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
        versions["nvidia-smi"] = listed.splitlines()
        versions["links"] = output("nvidia-smi", "topo", "-m").splitlines()
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no GPU (CUDA {torch.version.cuda})")
        versions["capability"] = list(torch.cuda.get_device_capability())
        versions["bfloat16"] = torch.cuda.is_bf16_supported()
    return versions


def doctor(bench: Bench) -> dict[str, Any]:
    """`asyncrl doctor`."""
    answer = bench.cli("doctor", "--json", "--runs-dir", str(bench.out), check=False)
    document = json.loads(answer)
    problems = [
        f"{finding['check']}: {finding['found']} -> {finding['hint']}"
        for finding in document["findings"]
        if finding["status"] != "ok"
    ]
    if not document["healthy"]:
        raise RuntimeError("; ".join(problems))
    return {"checks": len(document["findings"]), "problems": problems}


def output(*command: str) -> str:
    """The output of a command; empty if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
