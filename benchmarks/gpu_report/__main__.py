"""Check and measure asyncrl on this machine's GPUs. If one part fails or takes too long, the others still run.

    make gpu    or    PYTHONPATH=benchmarks python -m gpu_report [--device cuda|cpu] [--out FOLDER] [--only PART ...]
                      [--model FOLDER] [--minutes N]

Each part is a process with a time limit. `report.csv` has a line for each part and each of its cases as soon as it
ends; `report.md` is the page that a user can send. The parts are in the order of their value: all of them take about
half an hour on a GPU, and the first three answer most questions. With `--device cpu` every part runs in a smaller size:
everything except the device is tested. `--model` names the folder of a saved model, which is trained for some steps,
with its real vocabulary. No part needs a model hub.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpu_report import edges, engine_full, environment, numerics, parts, steps
from gpu_report.report import FAILED, NOT_RUN, OK, Row, rows_of
from gpu_report.runs import Bench

GRACE_S = 30.0
"""Seconds that a part's processes get to end after SIGINT, on which a run stops its processes."""
LOOK_S = 0.1


class Part(NamedTuple):
    """A part of the report."""

    title: str
    measure: Callable[[Bench], dict[str, Any]]
    limit_s: float


PARTS = {
    "environment": Part("Environment", environment.versions_and_devices, 120),
    "profile": Part("Profile of a training step", steps.profile, 240),
    "settings": Part("The trainer's settings, 0.4B", steps.compare_settings, 480),
    "engine_full": Part("A full engine against bare vLLM, 0.4B", engine_full.small_model, 480),
    "kill": Part("A small run whose driver is killed", parts.kill, 300),
    "qwen": Part("The trainer's settings, shape of Qwen3-4B", steps.compare_qwen_settings, 480),
    "trainer": Part("The trainer's speed", parts.trainer, 480),
    "ratio": Part("`async` against `sync`", parts.ratio, 480),
    "publish": Part("Publishing weights", parts.publish, 480),
    "engine": Part("The engines' speed", parts.engine, 480),
    "memory": Part("Memory against the estimate", parts.memory, 480),
    "repeats": Part("Repeated passes", numerics.repeats, 300),
    "resume": Part("Resume of the killed run, and replay", parts.resume, 480),
    "exactness": Part("Staleness 0 against `sync`, float32", parts.exactness, 480),
    "edges": Part("Edge cases", edges.edges, 240),
    "engine_qwen": Part("A full engine against bare vLLM, shape of Qwen3-4B", engine_full.qwen, 480),
    "quickstart": Part("Quickstart in bfloat16", parts.quickstart, 600),
    "numerics": Part("Numerics and the output head", numerics.numerics, 300),
    "doctor": Part("`asyncrl doctor`", environment.doctor, 300),
    "model": Part("Your own model", parts.own_model, 900),
}
"""The parts in the order of their value. Parts share runs, so a later part often takes no time.

A GPU stopped answering once when a run was killed. So `kill` comes after the parts whose figures matter most, and
before the long runs.
"""


def carry_out(
    bench: Bench, limits: Mapping[str, float], command: Callable[[str], Sequence[str]], end: float = float("inf")
) -> bool:
    """Run the parts' processes in turn, and write the page after each one; returns whether all parts passed.

    ``command``: a part's command, which adds the part's row to the report. ``end``: no part begins after this time of
    the monotonic clock.
    """
    for name, limit_s in limits.items():
        started = time.monotonic()
        if started >= end:
            bench.add(Row(name, "", NOT_RUN, 0.0, {"error": "the time of the report (--minutes) is over"}))
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        process = subprocess.Popen(command(name), start_new_session=True)
        error = None
        try:
            if process.wait(limit_s):
                error = f"the process ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"not done after {limit_s:g} s"
        finally:
            end_group(process)
        if not any(row.part == name and not row.case for row in rows_of(bench.csv)):
            seconds = time.monotonic() - started
            bench.add(Row(name, "", FAILED, seconds, {"error": error or "the process left no result"}))
        bench.write_page()
    bench.write_page()
    return all(row.result == OK for row in rows_of(bench.csv) if row.part in limits and not row.case)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part's processes. Those that have left its group, such as Ray's, end with their run's driver."""
    end = time.monotonic() + GRACE_S
    # A process that waits for a GPU that does not answer may not end, even after SIGKILL.
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        while time.monotonic() < end:
            process.poll()  # otherwise an ended process remains in the group
            os.killpg(process.pid, 0)
            time.sleep(LOOK_S)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(GRACE_S)


def run_part(bench: Bench, name: str) -> int:
    """Run one part in this process, and add its row to the report."""
    started = time.monotonic()
    bench.part = name
    try:
        row = Row(name, "", OK, 0.0, PARTS[name].measure(bench))
    except Exception:
        row = Row(name, "", FAILED, 0.0, {"error": traceback.format_exc()})
    bench.add(row._replace(seconds=time.monotonic() - started))
    return int(row.result != OK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report and of all runs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a saved model for the part `model`")
    parser.add_argument("--minutes", type=float, default=30, help="no part begins later than this (default: 30)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    titles = {name: part.title for name, part in PARTS.items()}
    bench = Bench(options.device, options.out.absolute(), titles, options.model and options.model.absolute())
    if options.part:
        return run_part(bench, options.part)

    def command(name: str) -> list[str]:
        arguments = ["--device", bench.device, "--out", str(bench.out), "--part", name]
        model = ["--model", str(bench.model)] if bench.model is not None else []
        return [sys.executable, "-m", "gpu_report", *arguments, *model]

    limits = {name: PARTS[name].limit_s for name in options.only if name != "model" or bench.model is not None}
    passed = carry_out(bench, limits, command, end=time.monotonic() + 60 * options.minutes)
    print(bench.out / "report.md")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
