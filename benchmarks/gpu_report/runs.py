"""Runs of `asyncrl train` for the parts of the report: each is done once, and its memory is sampled.

A part's limit is its process's. Runs are shared by files, because each part has its own process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from common import ASYNCRL, metrics

from asyncrl_cli.checks.machine import installed_gpus
from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.journal.schema import FILE, open_for_reading
from asyncrl_cli.spec.problems import SpecError
from gpu_report.peak import PeakMemory, gpu_memory
from gpu_report.report import FAILED, NOT_RUN, OK, Row, append, page, rows_of

Device = Literal["cuda", "cpu"]
REFUSED = re.compile(r"differ from the trainer's by ([0-9.e+-]+) nats")
LOOK_S = 0.2
"""Seconds between two checks of a run that will be killed."""
WORKERS_END_S = 60.0
"""Seconds in which a killed driver's other processes must have ended."""


class Bench:
    """The device, the report's folder with the finished runs, and the part that this process runs."""

    def __init__(
        self, device: Device, out: Path, titles: Mapping[str, str] | None = None, model: Path | None = None
    ) -> None:
        """``titles``: the parts' titles on the page. ``model``: the folder of a saved model."""
        self.device = device
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.model = model
        self.part = ""
        self.csv = out / "report.csv"
        self.gpus = installed_gpus() if device == "cuda" else ()
        self._titles = titles or {}

    @property
    def gpu_bytes(self) -> int:
        """Memory of the smallest GPU."""
        return min(gpu_memory("memory.total").values())

    def add(self, row: Row) -> None:
        """Add a row to the report, and print it."""
        append(self.csv, row)
        outcome = "ok" if row.result == OK else f"{row.result.upper()}: {str(row.figures['error']).splitlines()[-1]}"
        print(f"{row.part}{row.case and ', ' + row.case}: {outcome}", file=sys.stderr, flush=True)

    def write_page(self) -> None:
        """Write the page of all rows so far."""
        (self.out / "report.md").write_text(page(rows_of(self.csv), self._titles, self.device, self.gpus))

    def case(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Measure a case of the part, and report its figures; None if it failed, or if this version or this machine
        lacks a setting."""
        started = time.monotonic()
        try:
            result, figures = OK, measure()
        except (SpecError, ConfigError) as error:
            result, figures = NOT_RUN, {"error": str(error).splitlines()[0].removeprefix("error: ")}
        except Exception as error:
            result, figures = FAILED, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
        self.add(Row(self.part, name, result, time.monotonic() - started, figures))
        return figures if result == OK else None

    def once(self, name: str, make: Callable[[], Path]) -> Path:
        """The run of this name, made at the first call of any part. A failed run is not repeated: its error is raised
        again."""
        outcome = self.out / "runs" / f"{name}.json"
        if not outcome.exists():
            outcome.parent.mkdir(parents=True, exist_ok=True)
            outcome.write_text(json.dumps({"error": "an earlier part was ended while it made this run"}))
            try:
                record = {"run": str(make())}
            except Exception as error:
                record = {"error": str(error)}
            outcome.write_text(json.dumps(record))
        record = json.loads(outcome.read_text())
        if "error" in record:
            raise RuntimeError(f"{name}: {record['error']}")
        return Path(record["run"])

    def train(self, name: str, spec: dict[str, Any], kill_after: int | None = None) -> Path:
        """A run of ``spec`` on the device; returns its folder. Raises ``RuntimeError`` with the end of its output.

        Its peak memory is in `peak.json` next to its spec. ``kill_after``: its driver gets SIGKILL once that many steps
        are reported, and `kill.json` has the time that its other processes took to end.
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
                (folder / "kill.json").write_text(json.dumps(self._kill(process, folder, kill_after)))
            else:
                finish(process)
        (folder / "peak.json").write_text(json.dumps(peak.bytes))
        (manifest,) = folder.glob("*/manifest.json")
        return manifest.parent

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

    def cli(self, *arguments: str, check: bool = True) -> str:
        """The standard output of an `asyncrl` command."""
        return finish(self._start(*arguments), check)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        pipe = subprocess.PIPE
        return subprocess.Popen([*ASYNCRL, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment)

    def _kill(self, process: subprocess.Popen[str], folder: Path, steps: int) -> dict[str, Any]:
        while not any(len(metrics(path.parent)) >= steps for path in folder.glob("*/metrics.jsonl")):
            if process.poll() is not None:
                raise RuntimeError(f"the run ended before it was killed: {last_lines(*process.communicate())}")
            time.sleep(LOOK_S)
        workers = psutil.Process(process.pid).children(recursive=True)
        started = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(workers, timeout=WORKERS_END_S)
        return {
            "processes": len(workers),
            "processes left": len(alive),
            "seconds until they ended": time.monotonic() - started,
        }


def finish(process: subprocess.Popen[str], check: bool = True) -> str:
    """The standard output of a command. Raises ``RuntimeError`` with its last lines if it fails."""
    written = process.communicate()
    if check and process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {last_lines(*written)}")
    return written[0]


def last_lines(output: str, errors: str) -> str:
    """The end of a command's output: its error message."""
    return "\n".join((errors.strip() or output.strip()).splitlines()[-12:])


def probe_gaps(folder: Path) -> list[float]:
    """The gaps (nats) between the trainer's log-probs of a version's probe and an engine's, for every engine that the
    runs in ``folder`` refused."""
    gaps: list[float] = []
    for path in folder.glob(f"*/{FILE}"):
        with closing(open_for_reading(path)) as journal:
            for (message,) in journal.execute("SELECT message FROM failures"):
                gaps += [float(gap) for gap in REFUSED.findall(message)]
    return gaps


def checksums(run: Path) -> dict[int, str]:
    """The checksum of each version's weights."""
    with closing(open_for_reading(run / FILE)) as journal:
        return dict(journal.execute("SELECT version, checksum FROM publishes ORDER BY version"))
