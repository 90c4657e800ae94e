"""Runs of `asyncrl train` for the parts of the report: each is done once, and its memory is sampled."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import yaml
from common import ASYNCRL, metrics

from asyncrl_cli.checks.machine import installed_gpus
from asyncrl_cli.journal.schema import FILE, open_for_reading
from gpu_report.peak import PeakMemory

Device = Literal["cuda", "cpu"]
REFUSED = re.compile(r"differ from the trainer's by ([0-9.e+-]+) nats")
LOOK_S = 0.2
"""Seconds between two checks of a run that will be killed."""


class Bench:
    """The device, the folder, and the finished runs."""

    def __init__(self, device: Device, out: Path, model: Path | None = None) -> None:
        """``model``: the folder of a saved model."""
        self.device = device
        self.out = out
        self.model = model
        self.gpus = installed_gpus() if device == "cuda" else ()
        self.peaks: dict[str, dict[str, int]] = {}
        self._made: dict[str, Path | Exception] = {}

    def once(self, name: str, make: Callable[[], Path]) -> Path:
        """The run of this name, done at the first call. A failed run is not repeated: its error is raised again."""
        if name not in self._made:
            try:
                self._made[name] = make()
            except Exception as error:
                self._made[name] = error
        made = self._made[name]
        if isinstance(made, Exception):
            raise made
        return made

    def train(self, name: str, spec: dict[str, Any], limit_s: float, kill_after: int | None = None) -> Path:
        """A run of ``spec`` on the device; returns its folder. Raises ``RuntimeError`` with the end of its output.

        ``kill_after``: its driver gets SIGKILL once that many steps are reported.
        """
        folder = self.out / "runs" / name
        folder.mkdir(parents=True)
        path = folder / "spec.yaml"
        shutil.copy(Path(__file__).parents[1] / "long_tail.py", folder)
        path.write_text(yaml.safe_dump(self.on_device(spec) | {"name": name, "runs_dir": str(folder)}))
        with PeakMemory(self.device) as peak:
            process = self._start("train", str(path))
            peak.watch(process.pid)
            if kill_after is not None:
                self._kill(process, folder, kill_after, limit_s)
            else:
                finish(process, limit_s)
        self.peaks[name] = peak.bytes
        (made,) = folder.glob("*/manifest.json")
        return made.parent

    def on_device(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The spec with engines and ranks for the device: on one GPU each side has a share, on several half of them."""
        rollout, trainer = dict(spec.get("rollout", {})), dict(spec.get("trainer", {}))
        if self.device == "cuda":
            number = len(self.gpus)
            if number < 2:
                rollout |= {"gpus_per_engine": 0.4}
                trainer |= {"gpus_per_rank": 0.6}
            else:
                rollout |= {"gpus_per_engine": 1, "engines": number // 2}
                trainer |= {"gpus_per_rank": 1, "ranks": number - number // 2}
        return spec | {"rollout": rollout, "trainer": trainer}

    def cli(self, *arguments: str, limit_s: float, check: bool = True) -> str:
        """The standard output of an `asyncrl` command."""
        return finish(self._start(*arguments), limit_s, check)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        pipe = subprocess.PIPE
        return subprocess.Popen([*ASYNCRL, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment)

    def _kill(self, process: subprocess.Popen[str], folder: Path, steps: int, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not any(len(metrics(found.parent)) >= steps for found in folder.glob("*/metrics.jsonl")):
            if process.poll() is not None:
                raise RuntimeError(f"the run ended before it was killed: {last_lines(*process.communicate())}")
            if time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"the run had not reported {steps} steps after {limit_s:.0f} s")
            time.sleep(LOOK_S)
        process.send_signal(signal.SIGKILL)
        process.wait()


def finish(process: subprocess.Popen[str], limit_s: float, check: bool = True) -> str:
    """The standard output of a command. Raises ``RuntimeError`` with its last lines if it fails or takes too long."""
    try:
        written = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # on SIGINT, a run stops its processes
        try:
            written = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            written = process.communicate()
        raise RuntimeError(f"not done after {limit_s:.0f} s: {last_lines(*written)}") from None
    if check and process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {last_lines(*written)}")
    return written[0]


def last_lines(output: str, errors: str) -> str:
    """The end of a command's output: its error message."""
    return "\n".join((errors.strip() or output.strip()).splitlines()[-12:])


def probe_gaps(folder: Path) -> list[float]:
    """The gaps (nats) between the trainer's log-probs of a version's probe and an engine's, for every engine that the
    runs in ``folder`` refused."""
    found: list[float] = []
    for path in folder.glob(f"*/{FILE}"):
        with closing(open_for_reading(path)) as journal:
            for (message,) in journal.execute("SELECT message FROM failures"):
                found += [float(gap) for gap in REFUSED.findall(message)]
    return found


def checksums(run: Path) -> dict[int, str]:
    """The checksum of each version's weights."""
    with closing(open_for_reading(run / FILE)) as journal:
        return dict(journal.execute("SELECT version, checksum FROM publishes ORDER BY version"))
