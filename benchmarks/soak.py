"""A long run: the memory of each of its processes by step, and the commands that read the run afterwards.

    python benchmarks/soak.py [--steps N] [--spec FILE] [--set KEY=VALUE ...] [--plot docs/soak.svg] [--folder DIR]

Without `--spec`, the run is the quickstart's with steps of 2 groups of 2 short rollouts, to take 10,000 steps within an
hour on two cores. Memory is the proportional share of a process in anonymous and shared pages (`smaps_rollup`). Pages
of files do not count: the kernel takes them back. The growth is a straight line through the second half of the samples.
Samples go to DIR/memory.jsonl. Afterwards the commands that look at a run are timed, with their peak of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
from common import ASYNCRL, QUICKSTART, header, overrides, row

SMALL_STEPS = (
    "rollout.group_size=2",
    "rollout.max_running_rollouts=16",
    "rollout.max_response_tokens=24",
    "pipeline.groups_per_step=2",
    "evaluation.every=1000",
    "evaluation.prompts=16",
    "checkpoints.every=500",
    "stop.on_unhealthy=never",
)
SAMPLES = 400
"""Samples of a run, at equal distances in steps."""
LIMIT = 1024.0
"""Bytes per step that count as flat."""
RUN_COMMANDS = (("inspect", "buffer"), ("inspect", "run"), ("staleness",), ("report",))

Series = Mapping[str, Sequence[tuple[int, int]]]
"""Samples (step, bytes) of each part of a run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--spec", type=Path, help="another run than the small one")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the curves as an SVG file")
    parser.add_argument("--folder", type=Path, help="where the run is kept; default: a temporary folder")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    changes = [f"runs_dir={folder}", f"stop.steps={options.steps}", *(() if options.spec else SMALL_STEPS)]
    series = train(options.spec or QUICKSTART, [*changes, *options.changes], options.steps, folder)
    print_growth(series)
    print_commands(folder)
    if options.plot:
        plot(series, options.plot)


def train(spec: Path, changes: Sequence[str], steps: int, folder: Path) -> Series:
    """Run a spec to its end, and sample the memory of its processes."""
    series: dict[str, list[tuple[int, int]]] = defaultdict(list)
    with (folder / "driver.out").open("wb") as output, (folder / "memory.jsonl").open("w") as samples:
        driver = subprocess.Popen(
            [*ASYNCRL, "train", str(spec), *overrides(changes)], stdout=output, stderr=subprocess.STDOUT
        )
        started, next_step = time.monotonic(), 1
        while driver.poll() is None:
            time.sleep(0.5)
            step = trained_steps(folder)
            if step < next_step:
                continue
            next_step = step + max(1, steps // SAMPLES)
            memory = memory_by_part(driver.pid)
            for part, used in memory.items():
                series[part].append((step, used))
            samples.write(json.dumps({"step": step, "seconds": time.monotonic() - started, "bytes": memory}) + "\n")
            samples.flush()
    if driver.returncode:
        raise SystemExit((folder / "driver.out").read_text()[-3000:])
    print(f"{trained_steps(folder):,} steps in {time.monotonic() - started:,.0f} s")
    return series


def trained_steps(folder: Path) -> int:
    """Return the last step in the metrics of the folder's one run."""
    for path in folder.glob("*/metrics.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            steps = [int(step) for step in re.findall(rb'"step": (\d+)', file.read())]
        return steps[-1] if steps else 0
    return 0


def memory_by_part(driver: int) -> dict[str, int]:
    """Return the memory (bytes) of a driver and its descendants, summed by their titles."""
    memory: dict[str, int] = defaultdict(int)
    process = psutil.Process(driver)
    for member in (process, *process.children(recursive=True)):
        try:
            rollup = Path(f"/proc/{member.pid}/smaps_rollup").read_text()
            title = "driver" if member.pid == driver else part_of(member.cmdline())
        except (OSError, psutil.Error):
            continue  # it has just ended
        shares = dict(re.findall(r"(Pss_Anon|Pss_Shmem):\s+(\d+) kB", rollup))
        memory[title] += 1024 * sum(map(int, shares.values()))
    return dict(memory)


def part_of(command: Sequence[str]) -> str:
    """Name the part of a run that a process with this command line is."""
    line = " ".join(command)
    for pattern in (r"ray::(\w+)", r"(VLLM::\w+)", r"asyncrl_cli\.(\S+)", r"/(raylet|gcs_server) ", r"ray/(\S+?)\.py"):
        if match := re.search(pattern, line):
            return match[1]
    return Path(command[0]).name if command else "ended"


def growth(samples: Sequence[tuple[int, int]]) -> float:
    """Return the bytes per step of a straight line through the second half of the samples."""
    steps, used = np.array(samples[len(samples) // 2 :], dtype=float).T
    return float(np.polyfit(steps, used, 1)[0]) if len(steps) > 2 else float("nan")


def print_growth(series: Series) -> None:
    """Print a row for each part that lived through the second half of the run."""
    last = max(samples[-1][0] for samples in series.values())
    print(header("part", "MiB at the start", "in the middle", "at the end", "bytes per step"))
    for part, samples in sorted(series.items(), key=lambda item: -item[1][-1][1]):
        if samples[0][0] > last / 2 or samples[-1][0] < 0.9 * last:
            continue
        values = [samples[0][1], samples[len(samples) // 2][1], samples[-1][1]]
        slope = growth(samples)
        mark = " (grows)" if slope > LIMIT else ""
        print(row(part, *(f"{value / 2**20:,.1f}" for value in values), f"{slope:,.0f}{mark}"))


def print_commands(folder: Path) -> None:
    """Time the commands that look at the folder's one run, and print the journal's size."""
    (run,) = (path.parent for path in folder.glob("*/manifest.json"))
    for name in ("journal.db", "metrics.jsonl"):
        for path in run.glob(f"{name}*"):
            print(f"{path.name}: {path.stat().st_size / 2**20:,.1f} MiB")
    print(header("command", "s", "peak MiB"))
    for command in RUN_COMMANDS:
        started = time.perf_counter()
        child = subprocess.Popen(
            [*ASYNCRL, *command, str(run)], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        failed = f" (exit {os.waitstatus_to_exitcode(status)})" if status else ""
        print(row(" ".join(command) + failed, f"{seconds:.1f}", f"{used.ru_maxrss / 1024:,.0f}"))


def plot(series: Series, file: Path) -> None:
    """Draw each part's memory, less its memory at the first sample, by step."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5))
    for part, samples in sorted(series.items()):
        if len(samples) > SAMPLES // 4:
            steps, used = np.array(samples, dtype=float).T
            axes.plot(steps, (used - used[0]) / 2**20, label=part, linewidth=1)
    axes.set(xlabel="step", ylabel="MiB above the first sample")
    axes.legend(fontsize=6, ncols=2)
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
