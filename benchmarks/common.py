"""Shared parts of benchmarks: the quickstart's spec, the command `asyncrl`, a run's metrics, and tables."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import yaml

QUICKSTART = Path(__file__).parents[1] / "specs/quickstart.yaml"
CHAIN_SUM = QUICKSTART.parent / "models/chain-sum-0.3M"
"""The quickstart's model."""
INIT: dict[str, Any] = yaml.safe_load((CHAIN_SUM / "recipe.yaml").read_text())["model"]["init"]
"""`model.init` of the quickstart's model, for random weights."""
UNTRAINED = ("model.path=null", f"model.init={json.dumps(INIT)}")
"""Changes of the quickstart's spec for random weights."""
ASYNCRL = (sys.executable, "-m", "asyncrl_cli.cli.app")
"""The command `asyncrl` of this environment."""


def run_spec(spec: Path, *options: str) -> None:
    """Run a spec to its end, without its output."""
    subprocess.run([*ASYNCRL, "train", str(spec), *options], check=True, stdout=subprocess.DEVNULL)


def overrides(changes: Iterable[str]) -> list[str]:
    """Options of `asyncrl` that change a spec; each change is ``key=value``."""
    return [part for change in changes for part in ("--set", change)]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps. A killed run's last line may be incomplete, and is skipped."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = (json.loads(line) for line in lines if line.endswith("\n"))
    return [row for row in rows if row["step"] > 0]  # without the updates of a warm start


def seconds_of(action: Callable[[], object]) -> float:
    """Return the duration of a call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time (s) that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def row(*cells: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def header(*names: str) -> str:
    """The two lines above the rows of a Markdown table."""
    return f"{row(*names)}\n|{'-|' * len(names)}"
