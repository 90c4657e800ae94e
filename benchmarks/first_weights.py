"""Seconds and processor time from `asyncrl train` to the first weights that engines serve, with the quickstart's spec.

    python benchmarks/first_weights.py [--repeats 5] [--runs-dir FOLDER] [KEY=VALUE ...]

A first run, which is not counted, makes the model; with `--runs-dir` of earlier runs it is there already. Each run is
interrupted once its journal has the first published version.
"""

from __future__ import annotations

import argparse
import signal
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import psutil
from common import ASYNCRL, QUICKSTART, header, overrides, row

LOOK_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs that count")
    parser.add_argument("--runs-dir", type=Path, help="default: a temporary folder")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="of the spec")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = arguments.runs_dir or Path(temporary)
        measured = [first_weights(folder, arguments.changes) for _ in range(1 + arguments.repeats)][1:]
    print(header("", "seconds", "processor time, s"))
    for number, figures in enumerate(measured, 1):
        print(row(str(number), *(f"{value:.2f}" for value in figures)))
    print(row("median", *(f"{statistics.median(values):.2f}" for values in zip(*measured, strict=True))))


def first_weights(folder: Path, changes: Sequence[str]) -> tuple[float, float]:
    """Seconds until the first weights, and the processor time of all processes that are running then."""
    before = set(folder.glob("*/journal.db"))
    options = overrides([f"runs_dir={folder}", *changes])
    began = time.monotonic()
    with subprocess.Popen([*ASYNCRL, "train", str(QUICKSTART), *options], stdout=subprocess.DEVNULL) as run:
        while not any(map(has_published, set(folder.glob("*/journal.db")) - before)):
            if run.poll() is not None:
                raise SystemExit(f"the run ended with exit code {run.returncode}")
            time.sleep(LOOK_S)
        seconds, used = time.monotonic() - began, 0.0
        for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
            with suppress(psutil.Error):  # it has just ended
                times = process.cpu_times()
                used += times.user + times.system
        run.send_signal(signal.SIGINT)
    return seconds, used


def has_published(journal: Path) -> bool:
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection:
        return connection.execute("SELECT 1 FROM publishes").fetchone() is not None
    return False


if __name__ == "__main__":
    main()
